"""The engine ``kubernetes``."""

from __future__ import annotations

import contextlib
import math
import secrets
import shlex
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
import msgspec

from djinn.errors import ConfigurationError
from djinn_plugins.cluster.engines import changes, claim, need_commands
from djinn_plugins.cluster.keeping import ENDING_S
from djinn_plugins.cluster.kinds import ClusterSpec, Engine, ProgramReport
from djinn_plugins.cluster.kubernetes.commands import COMMAND, Kubectl, Pod, here
from djinn_plugins.cluster.kubernetes.node import FOLDER
from djinn_plugins.cluster.kubernetes.objects import Objects, name_of
from djinn_plugins.cluster.kubernetes.settings import KubernetesSettings
from djinn_plugins.cluster.records import KeeperRecord, replace_file
from djinn_plugins.common.settings.connection import settings_here

__all__ = ("KubernetesEngine", "KubernetesEngines")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 5.0
"""How often Kubernetes is asked: more seldom the longer nothing changes."""
MAX_ASKED = 16
"""How many Pods are asked at the same time."""
_FOLDER = '"${TMPDIR:-/tmp}/' + FOLDER + '"'


class _Started(msgspec.Struct):
    """A cluster that was started.

    Attributes:
        context: See `Kubectl`.
        namespace: See `Kubectl`.
        run: See `Kubectl`.
        programs: Names of the programs.
        is_stopping: Whether it is being stopped.
    """

    context: str
    namespace: str
    run: str
    programs: list[str]
    is_stopping: bool = False

    @property
    def kubectl(self) -> Kubectl:
        """The command for its objects."""
        return Kubectl(self.context, self.namespace, self.run)


class KubernetesEngine:
    """Runs each program in a Pod of a Job of Kubernetes; see `djinn_plugins.cluster.kinds.Engine`.

    A Pod runs a process that keeps its program running, so that a program that ends is started again at once, on the
    node that it has, and nothing has to run where the cluster was started. The Job replaces a Pod that ends, such as
    with its node.

    Args:
        folder: Where the records are.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "kubernetes.json"

    def start(self, spec: ClusterSpec) -> None:
        """Make the objects."""
        claim(self._file, spec.name)
        try:
            place = here(secrets.token_hex(8))
            objects = _objects(spec, place.run)
            files = [objects.secret(), *objects.jobs()]
            self._write(_Started(place.context, place.namespace, place.run, [each.name for each in spec.programs]))
            # Nothing else is made if somebody has a cluster of this name.
            place.create([objects.service()])
            place.create(files)
        except BaseException:
            with contextlib.suppress(ConfigurationError):
                self.stop(0)
            self._file.unlink(missing_ok=True)
            raise

    def host(self, cluster: str, program: str) -> str:
        """Return the name of a program's Pod, which the Service of its cluster gives it."""
        return f"{program}.{name_of(cluster)}.{self._namespace}.svc"

    def programs(self) -> list[ProgramReport]:
        """Report what Kubernetes says, and what the processes in the Pods have written down."""
        started = self._read()
        if started is None or not started.programs:
            return []
        jobs, pods = started.kubectl.look()
        found = {name: sorted((pod for pod in pods if pod.program == name), key=lambda pod: pod.rank)
                 for name in started.programs}
        with ThreadPoolExecutor(MAX_ASKED) as threads:
            reports = list(threads.map(lambda name: _report(started.kubectl, name, name in jobs, found[name]), found))
        return [attrs.evolve(report, state="stopping") for report in reports] if started.is_stopping else reports

    def watch(self) -> Iterator[list[ProgramReport]]:
        """Report the states now, and after each change."""
        last: list[ProgramReport] | None = None

        def look() -> list[ProgramReport]:
            nonlocal last
            # Kubernetes' server may be away for a while; the Pods continue.
            with contextlib.suppress(*([] if last is None else [ConfigurationError])):
                last = self.programs()
            assert last is not None
            return last

        return changes(look, FIRST_PAUSE_S, LONGEST_PAUSE_S)

    def logs(self, program: str, lines: int) -> list[str]:
        """Return the end of a program's log, from its present Pod."""
        started = self._read()
        if started is None or program not in started.programs:
            raise LookupError(f"There is no program {program!r}.")
        pod = _pod_of(started.kubectl, program)
        return [] if pod is None else _log(started.kubectl, pod, lines)

    def run(self, program: str, words: Sequence[str]) -> str:
        """Run Python in the Pod of a program."""
        started = self._read()
        pod = None if started is None or not started.programs else _pod_of(started.kubectl, program)
        if started is None or pod is None:
            raise ConfigurationError(f"The program {program} has no Pod.", hint="See `djinn cluster status`.")
        return started.kubectl.execute(pod, "python", *words)

    def stop(self, drain_s: float) -> None:
        """Delete the objects. Programs are sent SIGTERM, and are killed when that time is over."""
        started = self._read()
        if started is None:
            return
        if started.programs:
            started.is_stopping = True
            self._write(started)
            started.kubectl.delete(math.ceil(drain_s + ENDING_S) if drain_s else 1)
        self._file.unlink(missing_ok=True)

    @cached_property
    def _namespace(self) -> str:
        """The namespace in which a cluster would be started."""
        return here("").namespace

    def _read(self) -> _Started | None:
        try:
            # Where the objects are not made yet, it is empty.
            content = self._file.read_bytes()
        except FileNotFoundError:
            return None
        return _started_decoder.decode(content) if content else _Started("", "", "", [])

    def _write(self, started: _Started) -> None:
        replace_file(self._file, msgspec.json.encode(started))


def _objects(spec: ClusterSpec, run: str) -> Objects:
    settings = settings_here(KubernetesSettings)
    return Objects(spec, run, settings.kubernetes_image, _fields(settings.kubernetes_pod))


def _fields(path: str) -> Mapping[str, Any]:
    if not path:
        return {}
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigurationError(f"The fields of Pods cannot be read from {path}: {error}.",
                                 hint='Let kubernetes_pod name a file such as {"nodeSelector": {"pool": "gpu"}}.'
                                 ) from None


def _report(kubectl: Kubectl, name: str, has_job: bool, pods: list[Pod]) -> ProgramReport:
    """Report a program.

    Args:
        kubectl: The command.
        name: Its name.
        has_job: Whether its Job exists.
        pods: Its Pods, the present one last.
    """
    if not has_job:
        return ProgramReport(name, "failed", problem="its Job was deleted")
    if not pods:
        return ProgramReport(name, "starting")
    *before, pod = pods
    place = " ".join(filter(None, (f"pod {pod.name}", pod.node and f"on {pod.node}", pod.address)))
    restarts = len(before)
    if pod.has_ended or pod.cannot_begin:
        said = "\n".join(_log(kubectl, pod, 5))
        return ProgramReport(name, "failed", "", place, 0, restarts, f"its Pod {pod.name}: {pod.reason}: {said}")
    written = kubectl.read(pod, f"cat {_FOLDER}/programs.json") if pod.phase == "Running" else ""
    if not written:
        return ProgramReport(name, "starting", "", f"{place}, {pod.phase}" + (f" ({pod.reason})" if pod.reason else ""),
                             0, restarts)
    keeper = _record_decoder.decode(written)
    report = keeper.programs[0].report()
    # The numbers of processes in a Pod are its own.
    is_here = keeper.host == socket.gethostname()
    return attrs.evolve(report, place=place, pid=report.pid if is_here else 0, restarts=report.restarts + restarts)


def _pod_of(kubectl: Kubectl, program: str) -> Pod | None:
    """Return the Pod that stands for a program; ``None`` if there is none."""
    return max((pod for pod in kubectl.look()[1] if pod.program == program), key=lambda pod: pod.rank, default=None)


def _log(kubectl: Kubectl, pod: Pod, lines: int) -> list[str]:
    """Return the end of a program's log; without its process, that of the Pod."""
    if not pod.has_ended:
        name = shlex.quote(pod.program)
        if found := kubectl.read(pod, f"tail -n {lines} {_FOLDER}/{name}.log"):
            return found.splitlines()
    return kubectl.log(pod, lines).splitlines()[-lines:]


class KubernetesEngines:
    """Opens the engine ``kubernetes``; see `djinn_plugins.cluster.kinds.EngineFactory`."""

    name = "kubernetes"
    capabilities = ("apart",)
    """Its programs have the files of an image."""

    def open(self, folder: Path) -> Engine:
        """Open the engine for one cluster."""
        need_commands("kubernetes", [COMMAND], "Install kubectl, and let it know a cluster.")
        return KubernetesEngine(folder)


_started_decoder = msgspec.json.Decoder(_Started)
_record_decoder = msgspec.json.Decoder(KeeperRecord)

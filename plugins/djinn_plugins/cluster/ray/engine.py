"""The engine ``ray``."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import msgspec

from djinn.errors import ConfigurationError
from djinn_plugins.cluster.engines import already_running, changes
from djinn_plugins.cluster.kinds import ClusterSpec, Engine, EngineProgram, ProgramReport, ProgramState
from djinn_plugins.cluster.ray.actors import Actors, Answer
from djinn_plugins.cluster.ray.connecting import HeadGoneError, connected, ray_package
from djinn_plugins.cluster.records import KeeperRecord, Records, end_group, is_running

__all__ = ("RayEngine", "RayEngines")

TICK_S = 0.2
KILLED_S = 10.0
"""How long the process of an actor may take to end after Ray was asked to kill it."""
_OF_THE_NODE = ("CUDA_VISIBLE_DEVICES", "HOSTNAME", "TMPDIR", "XDG_RUNTIME_DIR")
"""Variables that differ between machines: programs get them, and those of Ray, from their node."""


class _Started(msgspec.Struct):
    """A cluster that was started.

    Attributes:
        address: Where the head of the Ray cluster is.
        namespace: The Ray namespace of the actors.
        programs: Names of the programs.
    """

    address: str
    namespace: str
    programs: list[str]


class RayEngine:
    """Runs the programs of a cluster on the nodes of a Ray cluster; see `djinn_plugins.cluster.kinds.Engine`.

    Args:
        folder: Where the records are; all nodes see it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "ray.json"
        self._stopping = folder / "stopping"

    def start(self, spec: ClusterSpec) -> None:
        """Start an actor for each program."""
        if self._started() is not None:
            raise already_running(spec.name)
        ray = connected()
        wanted, there = sum(program.gpus for program in spec.programs), ray.cluster_resources().get("GPU", 0)
        if wanted > there:
            raise ConfigurationError(f"The cluster {spec.name} needs {wanted} GPUs, and the nodes of the Ray cluster "
                                     f"have {there:g}.", hint="Start further nodes before, or give a lower --gpus.")
        started = _Started(ray.get_runtime_context().gcs_address, f"djinn-{spec.name}-{secrets.token_hex(4)}",
                           [program.name for program in spec.programs])
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._write(started, spec.name)
        try:
            Actors(ray, started.namespace).place(list(map(_with_variables, spec.programs)), self._folder)
        except BaseException:
            self.stop(0)
            raise

    def programs(self) -> list[ProgramReport]:
        """Report the answers of the actors, and the last states of those that do not answer."""
        started = self._started()
        if started is None:
            return []
        try:
            answers = Actors(connected(started.address), started.namespace).answers(started.programs)
        except HeadGoneError as error:
            answers = dict.fromkeys(started.programs, str(error))
        return [self._report(name, answers[name]) for name in started.programs]

    def watch(self) -> Iterator[list[ProgramReport]]:
        """Report the states now, and after each change."""
        return changes(self.programs, TICK_S)

    def logs(self, program: str, lines: int) -> list[str]:
        """Return the end of a program's log, from all nodes that it has run on."""
        started = self._started()
        if started is None or program not in started.programs:
            raise LookupError(f"There is no program {program!r}.")
        return self._records(program).tail(program, lines)

    def stop(self, drain_s: float) -> None:
        """Stop the programs and end the actors; without Ray, end what it has left behind on this machine."""
        started = self._started()
        if started is None:
            return
        self._stopping.touch()
        with contextlib.suppress(HeadGoneError):
            Actors(connected(started.address), started.namespace).end(started.programs, drain_s)
        for name in started.programs:
            self._end_here(self._records(name), drain_s)
        shutil.rmtree(self._folder, ignore_errors=True)

    @staticmethod
    def _end_here(records: Records, drain_s: float) -> None:
        keeper = records.read()
        if keeper is None or keeper.host != socket.gethostname():
            return
        deadline = time.monotonic() + KILLED_S
        while is_running(keeper.pid, keeper.born) and time.monotonic() < deadline:
            time.sleep(TICK_S)
        for left in records.left():
            end_group(left, drain_s)

    def _report(self, name: str, answer: Answer) -> ProgramReport:
        last = answer if isinstance(answer, KeeperRecord) else self._records(name).read()
        report = ProgramReport(name, "starting") if last is None else last.programs[0].report()
        if isinstance(answer, KeeperRecord):
            is_here = answer.host == socket.gethostname()
            place = f"{report.place} on {answer.host}" if report.pid else ""
            return attrs.evolve(report, place=place, pid=report.pid if is_here else 0)
        state: ProgramState = "stopping" if self._stopping.exists() else "starting" if answer is None else "failed"
        return attrs.evolve(report, state=state, problem=answer or report.problem, address="", place="", pid=0)

    def _records(self, program: str) -> Records:
        return Records(self._folder / program)

    def _started(self) -> _Started | None:
        try:
            return _decoder.decode(self._file.read_bytes())
        except FileNotFoundError:
            return None

    def _write(self, started: _Started, name: str) -> None:
        """Write down the programs that are started, unless another process has done it in the meantime."""
        own = self._folder / f"{started.namespace}.json"
        own.write_bytes(msgspec.json.encode(started))
        try:
            self._file.hardlink_to(own)
        except FileExistsError:
            raise already_running(name) from None
        finally:
            own.unlink()


def _with_variables(program: EngineProgram) -> EngineProgram:
    """Add the environment variables of this process, which the nodes have not."""
    own = {name: value for name, value in os.environ.items()
           if name not in _OF_THE_NODE and not name.startswith("RAY_")}
    return attrs.evolve(program, variables={**own, **program.variables})


class RayEngines:
    """Opens the engine ``ray``; see `djinn_plugins.cluster.kinds.EngineFactory`."""

    name = "ray"
    capabilities = ("moves",)
    """Its programs run on the nodes that Ray chooses."""

    def open(self, folder: Path) -> Engine:
        """Open the engine for one cluster, if Ray is installed."""
        ray_package()
        return RayEngine(folder)


_decoder = msgspec.json.Decoder(_Started)

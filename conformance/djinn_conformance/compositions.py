"""Sessions as subjects: the default plugins together, with one of them replaced by the tested plugin."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs

from djinn.ir.program import Program
from djinn.plugins import DEFAULTS, Registered
from djinn.session import runtime
from djinn.session.session import Session
from djinn_conformance.harness import served
from djinn_conformance.random_placement import scatter
from djinn_conformance.serving import Servers
from djinn_conformance.subjects import Subject
from djinn_conformance.tally import IN_PROCESS, SERVED
from djinn_plugins.common.kinds.executor import Executor, SupportsCheckedCompile, SupportsSpeculation

__all__ = ("CHECKED_ONCE", "COMPOSED", "COMPUTING", "SCATTERED", "Composition", "composed", "is_second", "running",
           "runs_ahead", "session_of")

COMPUTING = ("interceptor", "shapes", "executor")
"""Kinds whose plugins may change the behaviour of any operator."""
COMPOSED = (*COMPUTING, "guard", "classifier", "scheduler", "transport")
"""Kinds whose plugins take part in every session."""
EXECUTORS = 3
SCATTERED = frozenset({"session.programs_equal", "session.aliases_seen", "session.slices_equal"})
"""Laws tested in a session with several executors; the other laws would test nothing new there."""
CHECKED_ONCE = frozenset({"session.pressure_invisible", "session.recovery_bounded", "session.sharing_invisible",
                          "session.small_work_exact"})
"""Laws that do not depend on where the executor is, so that a session in this process would test nothing new."""
_OF_SERVERS = ("executor", "guard")
"""Kinds whose plugins run in a server, not in its clients."""
_DEFAULTS = {**DEFAULTS, "transport": "local"}


@attrs.frozen
class Composition:
    """A session's plugins: the defaults, with at most one replaced.

    Attributes:
        part: The subject that replaces a default; ``None`` for the defaults alone.
        device: The executor's device.
        executors: How many executors it has. With several, each operation runs on an arbitrary one.
        served: Whether its executors are those of a guarded ``djinn serve`` in another process.
        repeats: Whether it repeats in this process what another session does on a server, so that a sample is enough.
    """

    part: Subject | None = None
    device: str = "cpu"
    executors: int = 1
    served: bool = True
    repeats: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of `djinn.init` that compose the session, except for a server's address."""
        is_of_servers = self.part is not None and self.served and self.part.kind in _OF_SERVERS
        chosen = "" if self.part is None or self.part.kind == "transport" or is_of_servers else self._chosen
        return {"plugins": [chosen] if chosen else [], "device": self.device}

    def address(self, servers: Servers, threads: int | None = None) -> str:
        """Return the address of its server, which is started if necessary; empty without a server.

        Args:
            servers: The running servers.
            threads: See `Servers.address`.
        """
        if not self.served:
            return ""
        chosen = self._chosen if self.part is not None and self.part.kind in _OF_SERVERS else ""
        return servers.address(self.device, chosen, threads)

    @property
    def _chosen(self) -> str:
        return "" if self.part is None else f"{self.part.kind}={self.part.registered.name}"


def composed(subjects: Iterable[Subject], kinds: Collection[str], *, served: bool) -> list[Subject]:
    """List the sessions in which plugins of some kinds take part, each once.

    Args:
        subjects: The plugins.
        kinds: Their kinds.
        served: Whether sessions are those of a guarded server, and those in this process come second.
    """
    made: dict[Composition, Subject] = {}
    for subject in subjects:
        # Encryption makes no difference to a session. An executor may have no device on this machine.
        if subject.kind in kinds and not getattr(subject.registered.value, "encrypts", False) and (
                subject.kind != "executor" or subject.device):
            composition = _composition(subject)
            composition = attrs.evolve(composition, served=composition.served and served)
            made.setdefault(composition, _as_subject(composition, subject))
            if subject.kind in COMPUTING and served:
                here = attrs.evolve(composition, served=False, repeats=True)
                made.setdefault(here, _as_subject(here, subject))
            if subject.kind == "executor":
                several = attrs.evolve(composition, executors=EXECUTORS)
                made.setdefault(several, _as_subject(several, subject))
    # The default transport's session is the one in this process that repeats what the others do on a server.
    return [subject for composition, subject in made.items()
            if composition.repeats or attrs.evolve(composition, repeats=True) not in made]


def is_second(subject: Subject) -> bool:
    """Whether a session repeats in this process what another one does on a server, so that a sample is enough."""
    return bool(subject.registered.value.repeats)


def runs_ahead(subject: Subject) -> bool:
    """Whether the executor of a session can run programs before they are requested."""
    composition: Composition = subject.registered.value
    part = composition.part
    if part is None or part.kind != "executor":
        return True
    executor: Executor = part.registered.value.open(composition.device)
    try:
        program = executor.compile(Program((), (), 0, ()))
    finally:
        executor.close()
    # A server checks the calls of an executor that does not check them between pieces, none of which runs ahead.
    return isinstance(program, SupportsSpeculation) and isinstance(executor, SupportsCheckedCompile)


def session_of(subject: Subject) -> str:
    """Return where a session's executor is, for the published counts."""
    return SERVED if subject.registered.value.served else IN_PROCESS


def _composition(subject: Subject) -> Composition:
    if subject.kind == "executor":
        # The executor of a device is called like its type.
        is_default = subject.registered.name == subject.device.partition(":")[0]
        return Composition(None if is_default else subject, subject.device)
    is_default = _DEFAULTS[subject.kind] == subject.registered.name
    return Composition(None if is_default else subject, served=subject.kind != "transport")


def _as_subject(composition: Composition, subject: Subject) -> Subject:
    entry = subject.registered
    name, plugin = ("defaults", "session") if composition.part is None else (entry.name, entry.plugin)
    if composition.executors > 1:
        name = f"{name} on {composition.executors} executors"
    made = Subject(Registered("session", name, plugin, entry.distribution, composition), composition.device)
    if not is_second(made):
        return made
    return Subject(attrs.evolve(made.registered, name=f"{name} in process"), composition.device)


@contextmanager
def running(subject: Subject, servers: Servers, **settings: Any) -> Iterator[Session]:
    """Start the session that a subject of the kind ``session`` describes, and end it afterwards.

    Args:
        subject: The subject.
        servers: The running servers; a server started for this session is added.
        **settings: Further settings of `djinn.init`.
    """
    composition: Composition = subject.registered.value
    part = composition.part
    try:
        if part is not None and part.kind == "transport":
            with served(part) as address:
                yield runtime.init(address, **composition.settings, **settings)
                runtime.shutdown()
        elif composition.executors > 1:
            address = composition.address(servers) or "local://"
            started = runtime.init(servers=[address] * composition.executors, placement="automatic",
                                   **composition.settings, **settings)
            scatter(started, seed=0)
            yield started
        else:
            yield runtime.init(composition.address(servers), **composition.settings, **settings)
    finally:
        runtime.shutdown()

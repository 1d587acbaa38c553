"""Sessions as subjects: what plugins make together, with one of them in the place of a default."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs

from djinn import runtime
from djinn.plugins import DEFAULTS, Registered
from djinn.session import Session
from djinn_conformance.harness import served
from djinn_conformance.scattered import scatter
from djinn_conformance.subjects import Subject

__all__ = ("COMPOSED", "COMPUTING", "SCATTERED", "Composition", "composed", "running")

COMPUTING = ("interceptor", "shapes", "executor")
"""Kinds whose plugins may make any operator behave differently."""
COMPOSED = (*COMPUTING, "classifier", "scheduler", "transport")
"""Kinds whose plugins take part in every session."""
EXECUTORS = 3
SCATTERED = frozenset({"session.programs_equal", "session.aliases_seen", "session.slices_equal"})
"""Laws that a session with several executors is tested by: the others would say nothing new about it."""
_DEFAULTS = {**DEFAULTS, "transport": "local"}


@attrs.frozen
class Composition:
    """A session's plugins: the defaults, but for one.

    Attributes:
        part: The subject that takes the place of a default; ``None`` for the defaults alone.
        device: The executor's device.
        executors: How many executors it has. With several, operations run on any of them, without reason.
    """

    part: Subject | None = None
    device: str = "cpu"
    executors: int = 1

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of `djinn.init` that compose it, but for a server's address."""
        chosen = [] if self.part is None or self.part.kind == "transport" else [
            f"{self.part.kind}={self.part.registered.name}"]
        return {"plugins": chosen, "device": self.device}


def composed(subjects: Iterable[Subject], kinds: Collection[str]) -> list[Subject]:
    """List the sessions that plugins of some kinds take part in, each once."""
    made: dict[Composition, Subject] = {}
    for subject in subjects:
        # What is encrypted on its way is the same to a session.
        if subject.kind in kinds and not getattr(subject.registered.value, "encrypts", False):
            composition = _composition(subject)
            made.setdefault(composition, _as_subject(composition, subject))
            if subject.kind == "executor":
                several = attrs.evolve(composition, executors=EXECUTORS)
                made.setdefault(several, _as_subject(several, subject))
    return list(made.values())


def _composition(subject: Subject) -> Composition:
    is_default = _DEFAULTS[subject.kind] == subject.registered.name
    if subject.kind == "executor":
        return Composition(None if is_default else subject, subject.device)
    return Composition(None if is_default else subject)


def _as_subject(composition: Composition, subject: Subject) -> Subject:
    entry = subject.registered
    name, plugin = ("defaults", "session") if composition.part is None else (entry.name, entry.plugin)
    if composition.executors > 1:
        name = f"{name} on {composition.executors} executors"
    return Subject(Registered("session", name, plugin, entry.distribution, composition), composition.device)


@contextmanager
def running(subject: Subject, **settings: Any) -> Iterator[Session]:
    """Start the session that a subject of the kind ``session`` is, and end it.

    Args:
        subject: The subject.
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
            started = runtime.init(servers=["local://"] * composition.executors, placement="automatic",
                                   **composition.settings, **settings)
            scatter(started, seed=0)
            yield started
        else:
            yield runtime.init("", **composition.settings, **settings)
    finally:
        runtime.shutdown()

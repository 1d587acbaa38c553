"""A backend that keeps every law, and others that do not."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from djinn.hookspecs import hookimpl
from djinn_plugins.fleet.factory import FleetFactory

BROKEN: dict[str, tuple[str, set[str]]] = {
    "loses-results": ("backend.results_equal", {"backend.random_equal", "backend.failures_raised"}),
    "leaves-the-tape": ("backend.tape_taken", {"backend.values_freed"}),
    "never-frees": ("backend.values_freed", {"backend.tape_taken"}),
    "swallows-failures": ("backend.failures_raised", set()),
    "ignores-seeds": ("backend.random_equal", set()),
    "hides-executors": ("backend.executors_listed", {
        "backend.results_equal", "backend.tape_taken", "backend.values_freed", "backend.failures_raised",
        "backend.random_equal", "backend.closed_is_final"}),
    "never-closes": ("backend.closed_is_final", set()),
}
"""Name of each broken backend, the law that it breaks, and others that it may break as a consequence."""


class _Backend:
    """A fleet with a flaw."""

    def __init__(self, fleet: Any, flaw: str) -> None:
        self._fleet = fleet
        self._flaw = flaw
        self.materializations = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fleet, name)

    @property
    def executors(self) -> Any:
        return [] if self._flaw == "hides-executors" else self._fleet.executors

    def flush(self) -> None:
        if self._flaw != "leaves-the-tape":
            self._fleet.flush()

    def fetch(self, slots: Any, *, whole: bool) -> list[Any]:
        try:
            values: list[Any] = self._fleet.fetch(slots, whole=whole)
        except Exception:
            if self._flaw != "swallows-failures":
                raise
            return [torch.zeros(1, 4) for _ in slots]
        if self._flaw == "loses-results":
            return [torch.zeros_like(value) if isinstance(value, torch.Tensor) else value for value in values]
        return values

    def seed(self, seed: int) -> None:
        self._fleet.seed(0 if self._flaw == "ignores-seeds" else seed)

    def close(self) -> None:
        if self._flaw != "never-closes":
            self._fleet.close()


class _Factory:
    def __init__(self, flaw: str) -> None:
        self.name = self._flaw = flaw

    def open(self, connections: Any, tape: Any, released: Any, context: Any) -> Any:
        own = deque[int]() if self._flaw == "never-frees" else released
        fleet = FleetFactory().open(connections, tape, own, context)
        return fleet if self._flaw == "healthy" else _Backend(fleet, self._flaw)


@hookimpl
def djinn_register_backends(register: Any) -> None:
    for name in ("healthy", *BROKEN):
        register(_Factory(name))

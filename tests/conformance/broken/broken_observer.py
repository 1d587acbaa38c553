"""An observer that adds counters up and keeps every law, and others that do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from djinn.hookspecs import hookimpl

BROKEN: dict[str, tuple[str, set[str]]] = {
    "expects-all": ("observer.does_not_raise", {"observer.stats_unchanged"}),
    "takes-away": ("observer.stats_unchanged", set()),
}
"""Name of each broken observer, the law that it breaks, and others that it may break as a consequence."""


class _Observer:
    def __init__(self, flaw: str) -> None:
        self.name = self._flaw = flaw
        self.seen: Counter[str] = Counter()

    def observe(self, stats: Mapping[str, int]) -> None:
        self.seen.update(stats)
        if self._flaw == "expects-all":
            self.seen["last"] = stats["operations"]
        if self._flaw == "takes-away" and isinstance(stats, dict):
            stats.pop("operations", None)


@hookimpl
def djinn_register_observers(register: Any) -> None:
    for name in ("healthy", *BROKEN):
        register(_Observer(name))

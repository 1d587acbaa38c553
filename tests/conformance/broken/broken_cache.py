"""A cache of results that keeps every law, and others that do not."""

from __future__ import annotations

from typing import Any

from djinn.hookspecs import hookimpl
from djinn_plugins.client.result_cache.cache import ResultCache

BROKEN: dict[str, tuple[str, set[str]]] = {
    "forgets-no-write": ("cache.results_equal", {"cache.values_freed"}),
    "keeps-too-much": ("cache.limit_kept", set()),
    "never-lets-go": ("cache.values_freed", set()),
    "counts-otherwise": ("cache.counts_named", {"cache.limit_kept"}),
}
"""Name of each broken cache, the law that it breaks, and others that it may break as a consequence."""


class _Cache(ResultCache):
    """A cache with a flaw."""

    def __init__(self, max_bytes: int, classifier: Any, flaw: str) -> None:
        super().__init__(max_bytes * 100 if flaw == "keeps-too-much" else max_bytes, classifier)
        self._flaw = flaw

    def written(self, nodes: Any) -> None:
        if self._flaw != "forgets-no-write":
            super().written(nodes)

    def release_all(self) -> list[int]:
        return [] if self._flaw == "never-lets-go" else super().release_all()

    def stats(self) -> Any:
        counts = super().stats()
        return {**counts, "results_kept": -1} if self._flaw == "counts-otherwise" else counts


class _Factory:
    def __init__(self, flaw: str) -> None:
        self.name = self._flaw = flaw

    def open(self, max_bytes: int, classifier: Any) -> Any:
        return _Cache(max_bytes, classifier, self._flaw)


@hookimpl
def djinn_register_caches(register: Any) -> None:
    for name in ("healthy", *BROKEN):
        register(_Factory(name))

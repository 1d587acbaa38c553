"""An output of metrics that keeps every law, and others that do not."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from djinn.hookspecs import hookimpl
from djinn_plugins.server.kinds.metrics import MetricsOutput, MetricsSource
from djinn_plugins.server.options import ServeOptions

BROKEN: dict[str, tuple[str, set[str]]] = {
    "expects-requests": ("metrics.takes_all_totals", {"metrics.source_unchanged", "metrics.restarts_independently"}),
    "takes-away": ("metrics.source_unchanged", set()),
    "goes-on": ("metrics.stop_is_final", set()),
    "keeps-its-place": ("metrics.restarts_independently", {
        "metrics.takes_all_totals", "metrics.source_unchanged", "metrics.stop_is_final"}),
}
"""Name of each broken output, the law that it breaks, and others that it may break as a consequence."""


class _Output(MetricsOutput):
    def __init__(self, flaw: str, source: MetricsSource) -> None:
        self._flaw = flaw
        self._source = source
        self.seen = 0

    def start(self) -> None:
        if self._flaw == "goes-on":
            threading.Thread(target=threading.Event().wait, daemon=True).start()

    def export(self) -> None:
        totals = self._source.totals()
        for found in totals.values():
            requests = found.counts.requests
            self.seen += requests["ok"] if self._flaw == "expects-requests" else requests.get("ok", 0)
        if self._flaw == "takes-away":
            totals.clear()


class _Factory:
    def __init__(self, flaw: str) -> None:
        self.name = self._flaw = flaw
        self._taken: list[ServeOptions] = []

    def open(self, options: ServeOptions, source: MetricsSource) -> MetricsOutput | None:
        if self._flaw == "keeps-its-place":
            if options in self._taken:
                raise OSError("in use")
            self._taken.append(options)
        return _Output(self._flaw, source)

    def sample(self, folder: Path) -> ServeOptions:
        return ServeOptions()


@hookimpl
def djinn_register_metrics(register: Any) -> None:
    for name in ("healthy", *BROKEN):
        register(_Factory(name))

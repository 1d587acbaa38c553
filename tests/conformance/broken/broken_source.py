"""The default source, and others that are the default one with a flaw."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from djinn.hookspecs import hookimpl
from djinn.record import devices
from djinn_plugins.graph.fx_source.source import FxSource
from djinn_plugins.graph.graph import RecordedGraph

BROKEN: dict[str, tuple[str, set[str]]] = {
    "one-name": ("source.graph_well_formed", set()),
    "dangling": ("source.graph_well_formed", {"source.as_recorded", "source.fallback_told"}),
    "leaves-out": ("source.as_recorded", {"source.fallback_told"}),
    "places-nowhere": ("source.as_recorded", {"source.fallback_told"}),
    "counts": ("source.deterministic", {"source.as_recorded", "source.fallback_told"}),
    "scales-weights": ("source.model_unchanged", set()),
    "puts-to-rest": ("source.model_unchanged", set()),
    "silent": ("source.fallback_told", set()),
    "excuses": ("source.fallback_told", set()),
    "sends": ("source.sends_nothing_when_traced", set()),
    "draws": ("source.sends_nothing_when_traced", set()),
    "swallows": ("source.refused_call", set()),
}
"""Name of each broken source, the law that it breaks, and others that it may break as a consequence."""


class _Source(FxSource):
    def __init__(self, flaw: str) -> None:
        self.name = self._flaw = flaw
        self._count = itertools.count()

    def build(self, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> RecordedGraph:
        if self._flaw == "sends":
            torch.ones(1, device=devices.logical_device()).cpu()
        if self._flaw == "draws":
            torch.rand(1)
        try:
            graph = super().build(model, args, kwargs)
        except Exception:
            if self._flaw != "swallows":
                raise
            return RecordedGraph(())
        if self._flaw == "scales-weights":
            with torch.no_grad():
                next(model.parameters()).mul_(2)
        if self._flaw == "puts-to-rest":
            model.train(not model.training)
        return self._with_flaw(graph)

    def _with_flaw(self, graph: RecordedGraph) -> RecordedGraph:
        nodes, reason = graph.nodes(), graph.fallback_reason
        if self._flaw == "one-name":
            nodes = tuple(attrs.evolve(node, id="n0") for node in nodes)
        if self._flaw == "dangling":
            nodes = nodes[1:]
        if self._flaw == "leaves-out":
            nodes = nodes[:-1]
        if self._flaw == "counts":
            line = str(next(self._count))
            nodes = tuple(attrs.evolve(node, origin=attrs.evolve(node.origin, line=line)) for node in nodes)
        if self._flaw == "places-nowhere":
            nodes = tuple(attrs.evolve(node, origin=attrs.evolve(node.origin, module_path="")) for node in nodes)
        if self._flaw == "silent":
            reason = ""
        if self._flaw == "excuses":
            reason = "Somebody wanted it so."
        return RecordedGraph(nodes, graph.storages, graph.backend_type, graph.values, reason)


@hookimpl
def djinn_register_sources(register: Any) -> None:
    for name in ("healthy", *BROKEN):
        register(_Source(name))

"""The data of a graph's page: plain values, without the page's defaults."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from djinn.ir.spec import TensorSpec
from djinn_plugins.graph.annotated import AnnotatedGraph
from djinn_plugins.graph.documents import text_of
from djinn_plugins.graph.graph import Graph, GraphNode, node_of
from djinn_plugins.graph.kinds import PatternMatch
from djinn_plugins.graph.metadata import DataResidency, SemanticMetadata, WorkloadProfile

MAX_TEXT = 400
"""Maximum characters shown of a hint or a fact; longer text is cut."""


def document_of(annotated: AnnotatedGraph) -> dict[str, Any]:
    """Describe a graph in lists, dictionaries, text and numbers.

    Nodes, values and matches refer to each other by position. Values that `page.js` fills in are omitted: zero, empty,
    ``unknown``.
    """
    graph = annotated.graph
    nodes = graph.nodes()
    position = {node.id: index for index, node in enumerate(nodes)}
    values = _Values(annotated)
    rows = [_node(node, annotated.nodes.get(node.id), values) for node in nodes]
    edges = [(position[source], position[target], values.number(value)) for source, target, value in _flow(graph)]
    return {
        "backend": graph.backend_type,
        "fallback": graph.fallback_reason,
        "profile": _profile(annotated.profile),
        "nodes": rows,
        "edges": edges,
        "matches": [_match(match, position) for match in annotated.patterns if match.nodes],
        "values": values.rows,
    }


def _flow(graph: Graph) -> Iterator[tuple[str, str, str]]:
    """List maker, reader and name of each value. A value that was written in place comes from its last writer."""
    storages = graph.storages
    edges = graph.edges()
    written: dict[tuple[str, str], str] = {}
    for edge in edges:
        if edge.kind == "hazard" and edge.value:
            writes, reads = node_of(graph, edge.source).writes, node_of(graph, edge.target).inputs
            if any(storages.get(value, value) == edge.value for value in writes) and any(
                    storages.get(value, value) == edge.value for value in reads):
                written[edge.target, edge.value] = edge.source
    for edge in edges:
        if edge.kind == "data" and (edge.target, storages.get(edge.value, edge.value)) not in written:
            yield edge.source, edge.target, edge.value
    for (target, storage), source in written.items():
        yield source, target, storage


class _Values:
    """Numbers the values in order of appearance."""

    def __init__(self, annotated: AnnotatedGraph) -> None:
        self._annotated = annotated
        self._numbers: dict[str, int] = {}
        self._specs: dict[str, TensorSpec | None] = {}
        for node in annotated.graph.nodes():
            # A node that changes a value in place keeps the value's first metadata; a later reader has the same.
            self._specs |= dict(zip(node.inputs, node.input_specs, strict=False))
            self._specs |= dict(zip(node.outputs, node.specs, strict=False))
        self.rows: list[dict[str, Any]] = []

    def number(self, value: str) -> int:
        """Return the position of a value's row; add the row if it is new."""
        known = self._numbers.get(value)
        if known is not None:
            return known
        info = self._annotated.graph.values.get(value)
        spec = self._specs.get(value) or (info.spec if info else None)
        residency = self._annotated.values.get(value, DataResidency.UNKNOWN)
        self._numbers[value] = len(self.rows)
        self.rows.append(_without_empty({
            "id": value, "name": info.name if info else "", "kind": info.kind if info else "",
            "shape": None if spec is None else list(spec.size), "dtype": _dtype(spec.dtype) if spec else "",
        }) | {"residency": str(residency)})
        return self._numbers[value]


def _node(node: GraphNode, known: SemanticMetadata | None, values: _Values) -> dict[str, Any]:
    known = known or SemanticMetadata(node.operation)
    origin = node.origin
    call = origin.call_index if known.call_index is None else known.call_index
    described = _without_empty({
        "module": known.module_path or origin.module_path,
        "type": known.model_module or origin.module_type,
        "role": known.semantic_role,
        "dtype": _dtype(node.dtype) if node.dtype is not None else known.dtype,
        "phase": _unless_unknown(known.execution_phase),
        "residency": _unless_unknown(known.data_residency),
        "modality": _unless_unknown(known.modality),
        "flops": known.flops, "read": known.bytes_read, "written": known.bytes_written,
        "line": origin.line,
        "inputs": [values.number(value) for value in dict.fromkeys(node.inputs)],
        "outputs": [values.number(value) for value in node.outputs],
        "hints": _facts(known.workload_hints),
        "evidence": {field: (str(told.tier), _plain(told.confidence)) for field, told in known.evidence.items()},
    })
    shape = node.shape if node.shape is not None else known.tensor_shape
    return {"id": node.id, "operation": node.operation, **described,
            **({} if shape is None else {"shape": list(shape)}),
            **({} if call < 0 else {"call": call}),
            **({} if known.memory_pattern == "sequential" else {"memory": str(known.memory_pattern)})}


def _match(match: PatternMatch, position: Mapping[str, int]) -> dict[str, Any]:
    return {"pattern": match.pattern, "nodes": [position[node] for node in match.nodes],
            "confidence": _plain(match.confidence),
            **_without_empty({"metadata": _facts(match.metadata), "hints": _facts(match.hints)})}


def _profile(profile: WorkloadProfile) -> dict[str, Any]:
    return {
        "workload": profile.workload, "confidence": _plain(profile.confidence), "flops": profile.flops,
        "bytes_moved": profile.bytes_moved, "compute_intensity": _plain(profile.compute_intensity),
        "steps": [str(step) for step in profile.steps], "patterns": dict(profile.patterns),
        "residency_bytes": {str(kind): count for kind, count in profile.residency_bytes.items()},
    }


def _facts(given: Mapping[str, Any]) -> dict[str, Any]:
    return {str(name): _plain(value) for name, value in given.items()}


def _plain(value: Any) -> Any:
    """Convert any value to JSON: patterns of third parties may report any objects."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return _facts(value)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_plain(item) for item in value]
    text = text_of(value)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} ..."


def _unless_unknown(name: Any) -> str:
    return "" if name == "unknown" else str(name)


def _without_empty(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value not in ("", 0, None, [], {})}


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")

"""Converts annotated graphs to plain data, which JSON can represent, and back."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import attrs
import cattrs
import torch
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override

from djinn.errors import DocumentError
from djinn.ir.spec import SpecTable, TensorSpec
from djinn_plugins.graph.annotated import AnnotatedGraph
from djinn_plugins.graph.graph import GraphNode, Operand, RecordedGraph, ValueInfo
from djinn_plugins.graph.links import NodeMetadata
from djinn_plugins.graph.match import PatternMatch
from djinn_plugins.graph.metadata import DataResidency, SemanticMetadata, Tier, WorkloadProfile

FORMAT = "djinn.annotated_graph"
VERSION = 1


@attrs.frozen
class _Document:
    """The parts of an annotated graph."""

    nodes: tuple[GraphNode, ...]
    storages: Mapping[str, str]
    backend_type: str
    fallback_reason: str
    known_values: Mapping[str, ValueInfo]
    metadata: Mapping[str, SemanticMetadata]
    residencies: Mapping[str, DataResidency]
    patterns: tuple[PatternMatch, ...]
    profile: WorkloadProfile
    seconds: Mapping[Tier, float]


def to_plain(annotated: AnnotatedGraph) -> dict[str, Any]:
    """Convert to mappings, lists, text, finite numbers, truth values and ``None``."""
    graph = annotated.graph
    document = _Document(tuple(graph.nodes()), graph.storages, graph.backend_type, graph.fallback_reason, graph.values,
                         annotated.nodes, annotated.values, annotated.patterns, annotated.profile, annotated.seconds)
    return {"format": FORMAT, "version": VERSION, **_writer().unstructure(document)}


def from_plain(document: Mapping[str, Any]) -> AnnotatedGraph:
    """Read the output of `to_plain`; equal tensor metadata becomes one object again.

    Raises:
        DocumentError: The document is not such output.
    """
    given: Any = document
    given = dict(given) if isinstance(given, Mapping) else {}
    if given.pop("format", None) != FORMAT or given.pop("version", None) != VERSION:
        raise DocumentError(f"The document is no {FORMAT} of version {VERSION}.",
                            hint="Give what AnnotatedGraph.to_dict returns.")
    try:
        read = _reader().structure(given, _Document)
        missing = {node.id for node in read.nodes} ^ set(read.metadata)
        if missing:
            raise ValueError(f"{min(missing)} is no node, or has no metadata")
    except Exception as error:  # cattrs passes on any exception of a constructor
        faults = cattrs.transform_error(error) if isinstance(error, cattrs.BaseValidationError) else [str(error)]
        raise DocumentError(f"The document is broken: {'; '.join(faults[:3])}.",
                            hint="Give what AnnotatedGraph.to_dict returns.") from error
    graph = RecordedGraph(read.nodes, read.storages, read.backend_type, read.known_values, read.fallback_reason)
    return AnnotatedGraph(graph, read.metadata, read.residencies, read.patterns, read.profile, read.seconds)


@cache
def _writer() -> cattrs.Converter:
    made = cattrs.Converter()
    made.register_unstructure_hook(TensorSpec, lambda spec: {
        "size": list(spec.size), "stride": list(spec.stride), "storage_offset": spec.storage_offset,
        "dtype": str(spec.dtype).removeprefix("torch."), "device": str(spec.device)})
    for kind, names in _FREE.items():
        fields: Any = {name: override(unstruct_hook=_list if name == "arguments" else _plain) for name in names}
        if kind is PatternMatch:
            # The nodes have it.
            fields["operation_sequence"] = fields["given"] = override(omit=True)
        made.register_unstructure_hook(kind, make_dict_unstructure_fn(kind, made, **fields))
    return made


def _reader() -> cattrs.Converter:
    specs, made = SpecTable(), cattrs.Converter()

    def spec(given: Mapping[str, Any], _: Any) -> TensorSpec:
        dtype = getattr(torch, given["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{given['dtype']!r} is no dtype")
        return specs.intern(torch.Size(given["size"]), tuple(map(int, given["stride"])), int(given["storage_offset"]),
                            dtype, torch.device(given["device"]))

    made.register_structure_hook(TensorSpec, spec)
    for kind, names in _FREE.items():
        fields: Any = {name: override(struct_hook=_tuple if name == "arguments" else _rich) for name in names}
        made.register_structure_hook(kind, make_dict_structure_fn(kind, made, **fields))
    return made


_ADDRESS = re.compile(r" at 0x[0-9a-f]+\b")
_FREE: Mapping[type, tuple[str, ...]] = {
    GraphNode: ("arguments", "keywords", "metadata"),
    PatternMatch: ("hints", "metadata"),
    SemanticMetadata: ("workload_hints",),
}
"""Fields whose content is chosen freely by the author of a plugin or of a call."""


def _plain(value: Any) -> Any:
    """Convert any value to plain data; one that JSON lacks becomes a mapping with one key that starts with ``$``."""
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return str(value) if isinstance(value, str) else value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, int):
        return int(value)
    if isinstance(value, complex):
        return {"$complex": [_plain(value.real), _plain(value.imag)]}
    if isinstance(value, Operand):
        return {"$operand": value.position}
    if isinstance(value, tuple):
        return {"$tuple": [_plain(item) for item in value]}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, NodeMetadata):
        # The document has the annotations of all nodes elsewhere.
        return {}
    if isinstance(value, Mapping):
        return {_escaped(str(key)): _plain(item) for key, item in value.items()}
    return text_of(value)


def _rich(value: Any, _: Any = None) -> Any:
    """Undo `_plain`."""
    if isinstance(value, list):
        return [_rich(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if len(value) == 1:
        (key, inner), = value.items()
        if key == "$float":
            return float(inner)
        if key == "$complex":
            return complex(_rich(inner[0]), _rich(inner[1]))
        if key == "$operand":
            return Operand(int(inner))
        if key == "$tuple":
            return tuple(map(_rich, inner))
    return {key.removeprefix("$"): _rich(item) for key, item in value.items()}


def _escaped(key: str) -> str:
    return f"${key}" if key.startswith("$") else key


def _list(values: Any) -> list[Any]:
    return [_plain(item) for item in values]


def _tuple(values: Any, _: Any = None) -> tuple[Any, ...]:
    if not isinstance(values, list):
        raise TypeError("the arguments are no list")
    return tuple(map(_rich, values))


def text_of(value: Any) -> str:
    """Return the text of any value without the addresses of objects, so that files of equal graphs are equal."""
    return _ADDRESS.sub("", str(value))

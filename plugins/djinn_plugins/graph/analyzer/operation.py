"""The first tier: conclusions from a single operation and its arguments."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from djinn.ir.spec import TensorSpec
from djinn_plugins.graph.analyzer.facts import OperatorFacts
from djinn_plugins.graph.analyzer.flops import count_flops
from djinn_plugins.graph.analyzer.survey import Survey
from djinn_plugins.graph.graph import GraphNode
from djinn_plugins.graph.metadata import MemoryPattern

_REUSED_FROM = 8
"""Uses of an element from which on reading its largest operand does not limit a product."""
_FLOPS_PER_BYTE_MOVED = 4_000
"""Operations of an accelerator in the time in which a network transfers one byte: 10 TFLOP/s against 2.5 GB/s."""
_BYTES_PER_BYTE_MOVED = 200
"""Bytes that its memory transfers in the same time: 500 GB/s."""

Fields: TypeAlias = dict[str, Any]
Specs: TypeAlias = Sequence[TensorSpec | None]


class Operations:
    """Computes the fields of each distinct call of a graph once."""

    def __init__(self, found: Survey) -> None:
        self._survey = found
        self._known: dict[Any, Fields] = {}

    def fields(self, position: int) -> Fields:
        """Return the fields of a node; nodes with equal calls share the mapping."""
        found = self._survey
        node, facts = found.nodes[position], found.facts[position]
        operands, results = found.operands[position], found.results[position]
        key: Any = (node.operation, operands, results, found.is_view[position], len(node.writes))
        if found.may_cost[position] or facts.is_indexed:
            key += (repr(node.arguments), repr(node.keywords))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _fields(node, facts, operands, results, found.is_view[position])
        return known


def _fields(
    node: GraphNode, facts: OperatorFacts, operands: Specs, results: Specs, is_view: bool
) -> Fields:
    flops = count_flops(facts, node, operands, results)
    read, written = (0, 0) if is_view else _traffic(node, facts, operands, results)
    made: Fields = {
        "flops": flops,
        "bytes_read": read,
        "bytes_written": written,
        "memory_pattern": _memory_pattern(facts, flops, operands, is_view),
        "operation_type": node.operation,
        "requires_sync": facts.needs_client and not _has_plain_index(facts, operands),
        "can_recompute": not (node.writes or node.is_random or facts.needs_client) and (
            is_view or flops / _FLOPS_PER_BYTE_MOVED + (read + written) / _BYTES_PER_BYTE_MOVED < written),
    }
    spec = next((spec for spec in results if spec is not None), None)
    if spec is None and node.writes:
        spec = operands[node.inputs.index(node.writes[0])]
    if spec is not None:
        made["tensor_shape"] = tuple(spec.size)
        made["dtype"] = str(spec.dtype).removeprefix("torch.")
        if spec.device.type not in ("cpu", "meta"):
            made["device_hint"] = str(spec.device)
    return made


def size_bytes(spec: TensorSpec | None) -> int:
    """Return the bytes that a tensor takes in memory; expanded dimensions count once."""
    if spec is None:
        return 0
    if 0 not in spec.stride:
        return spec.size_bytes
    apart = math.prod(size for size, stride in zip(spec.size, spec.stride, strict=True) if stride or not size)
    return apart * spec.dtype.itemsize


def _traffic(node: GraphNode, facts: OperatorFacts, operands: Specs, results: Specs) -> tuple[int, int]:
    """Return bytes read and bytes written."""
    by_value = dict(zip(node.inputs, operands, strict=True))
    written_values = set(node.writes)
    made = sum(map(size_bytes, results))
    if facts.is_empty:
        return 0, 0
    if facts.is_factory:
        return 0, made
    if facts.is_indexed and not facts.is_backward:
        return _traffic_by_index(by_value, written_values, made)
    changed = sum(size_bytes(by_value[value]) for value in written_values if value in by_value)
    read = sum(size_bytes(spec) for value, spec in by_value.items()
               if not (facts.overwrites and value in written_values))
    return read, made + changed


def _traffic_by_index(
    by_value: Mapping[str, TensorSpec | None], written_values: set[str], made: int
) -> tuple[int, int]:
    """Count only the selected elements of indexed tensors."""
    if not written_values:
        table = max(map(size_bytes, by_value.values()), default=0)
        rest = sum(map(size_bytes, by_value.values())) - table
        return rest + min(table, made), made
    others = [spec for value, spec in by_value.items() if value not in written_values]
    source = max((size_bytes(spec) for spec in others if spec is not None and spec.dtype.is_floating_point), default=0)
    chosen = source or sum(map(size_bytes, others))
    whole = sum(size_bytes(by_value[value]) for value in written_values if value in by_value)
    return sum(map(size_bytes, others)), min(chosen, whole)


def _memory_pattern(
    facts: OperatorFacts, flops: int, operands: Iterable[TensorSpec | None], is_view: bool
) -> MemoryPattern:
    if is_view or facts.is_empty:
        return MemoryPattern.NONE
    if facts.is_indexed:
        return MemoryPattern.RANDOM
    if flops:
        largest = max((spec.numel for spec in operands if spec is not None), default=0)
        return MemoryPattern.STREAMING if flops < 2 * _REUSED_FROM * largest else MemoryPattern.REUSED
    return MemoryPattern.SEQUENTIAL


def _has_plain_index(facts: OperatorFacts, operands: Specs) -> bool:
    """Whether an indexing, whose shape would depend on a mask, has none."""
    return facts.name == "index" and all(spec is None or spec.dtype not in (torch.bool, torch.uint8)
                                         for spec in operands[1:])

"""What the analyzer's first tier says of single operations, and that it takes any graph."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from djinn.ir.phase import ExecutionPhase
from djinn.ir.spec import SpecTable, TensorSpec
from djinn_plugins.graph.analyzer.analyzer import CoreAnalyzer
from djinn_plugins.graph.graph import GraphNode, Operand, RecordedGraph
from djinn_plugins.graph.kinds import PatternMatch
from djinn_plugins.graph.metadata import DataResidency, MemoryPattern, SemanticMetadata, Tier

SPECS = SpecTable()
F32, I64 = torch.float32, torch.int64


def spec(*size: int, dtype: torch.dtype = F32, stride: tuple[int, ...] | None = None) -> TensorSpec:
    made = torch.empty(size, dtype=dtype, device="meta")
    return SPECS.intern(made.size(), stride or made.stride(), 0, dtype, torch.device("meta"))


def said(
    operation: str, operands: list[TensorSpec], results: list[TensorSpec | None], *arguments: Any,
    writes: tuple[int, ...] = (), views: dict[str, str] | None = None, **keywords: Any,
) -> dict[str, Any]:
    """Annotate one operation alone."""
    given = arguments or tuple(map(Operand, range(len(operands))))
    inputs = tuple(f"i{place}" for place in range(len(operands)))
    node = GraphNode("n0", operation, inputs, tuple(f"o{place}" for place in range(len(results))), tuple(results),
                     tuple(inputs[place] for place in writes), input_specs=tuple(operands), arguments=given,
                     keywords=keywords)
    annotations = CoreAnalyzer([Tier.OPERATION]).annotate(RecordedGraph((node,), views or {}), ())
    return dict(annotations.nodes["n0"])


def test_elements_are_read_and_written_once() -> None:
    known = said("aten::add.Tensor", [spec(4, 8), spec(8)], [spec(4, 8)])
    assert (known["bytes_read"], known["bytes_written"], known["flops"]) == (4 * 40, 4 * 32, 0)
    assert known["memory_pattern"] is MemoryPattern.SEQUENTIAL
    assert known["can_recompute"]
    assert known["tensor_shape"] == (4, 8)
    assert known["dtype"] == "float32"


def test_what_is_expanded_is_read_once() -> None:
    assert said("aten::add.Tensor", [spec(4, 8), spec(4, 8, stride=(0, 1))], [spec(4, 8)])["bytes_read"] == 4 * 40


def test_a_view_moves_nothing() -> None:
    known = said("aten::view", [spec(4, 8)], [spec(32)], Operand(0), [32], views={"o0": "i0"})
    assert (known["bytes_read"], known["bytes_written"]) == (0, 0)
    assert known["memory_pattern"] is MemoryPattern.NONE


def test_writing_in_place() -> None:
    known = said("aten::add_.Tensor", [spec(4, 8), spec(4, 8)], [], writes=(0,))
    assert (known["bytes_read"], known["bytes_written"]) == (4 * 64, 4 * 32)
    assert not known["can_recompute"]
    assert known["tensor_shape"] == (4, 8)
    assert said("aten::copy_", [spec(4, 8), spec(4, 8)], [], writes=(0,))["bytes_read"] == 4 * 32
    assert said("aten::zero_", [spec(4, 8)], [], writes=(0,))["bytes_read"] == 0


def test_a_table_is_read_where_it_is_looked_up() -> None:
    known = said("aten::embedding", [spec(50_000, 8), spec(1, 3, dtype=I64)], [spec(1, 3, 8)])
    assert (known["bytes_read"], known["bytes_written"]) == (8 * 3 + 4 * 24, 4 * 24)
    assert known["memory_pattern"] is MemoryPattern.RANDOM


def test_a_cache_is_written_where_it_changes() -> None:
    known = said("aten::index_copy_", [spec(1, 4, 64, 8), spec(1, dtype=I64), spec(1, 4, 1, 8)], [], Operand(0), 2,
                 Operand(1), Operand(2), writes=(0,))
    assert (known["bytes_read"], known["bytes_written"]) == (8 + 4 * 32, 4 * 32)


@pytest.mark.parametrize(("rows", "pattern"), [(1, MemoryPattern.STREAMING), (64, MemoryPattern.REUSED)])
def test_weights_are_streamed_past_few_rows(rows: int, pattern: MemoryPattern) -> None:
    known = said("aten::linear", [spec(rows, 64), spec(128, 64), spec(128)], [spec(rows, 128)])
    assert known["flops"] == 2 * rows * 64 * 128
    assert known["memory_pattern"] is pattern
    assert SemanticMetadata(**known).compute_intensity == pytest.approx(
        known["flops"] / (known["bytes_read"] + known["bytes_written"]))


@pytest.mark.parametrize(("residency", "phase", "names"), [
    (DataResidency.EPHEMERAL_ACTIVATION, ExecutionPhase.TRAINING_FORWARD, {"is_activation"}),
    (DataResidency.EPHEMERAL_ACTIVATION, ExecutionPhase.BACKWARD, set()),
    (DataResidency.GRADIENT, ExecutionPhase.BACKWARD, {"is_gradient"}),
    (DataResidency.STATEFUL_KV_CACHE, ExecutionPhase.LLM_DECODE, {"kv_cache_related"}),
])
def test_earlier_names_follow_from_what_is_known(
    residency: DataResidency, phase: ExecutionPhase, names: set[str]
) -> None:
    known = SemanticMetadata("aten::add.Tensor", data_residency=residency, execution_phase=phase)
    assert {name for name in ("is_activation", "is_gradient", "kv_cache_related") if getattr(known, name)} == names
    assert known.compute_intensity == 0


def test_who_waits() -> None:
    assert said("aten::nonzero", [spec(4)], [None])["requires_sync"]
    assert said("aten::masked_select", [spec(4), spec(4, dtype=torch.bool)], [None])["requires_sync"]
    mask, index = spec(4, dtype=torch.bool), spec(2, dtype=I64)
    assert said("aten::index.Tensor", [spec(4), mask], [None], Operand(0), [Operand(1)])["requires_sync"]
    assert not said("aten::index.Tensor", [spec(4), index], [spec(2)], Operand(0), [Operand(1)])["requires_sync"]


@pytest.mark.parametrize(("operation", "operands", "result", "arguments", "flops"), [
    ("aten::mv", [spec(3, 4), spec(4)], spec(3), (), 24),
    ("aten::dot", [spec(4), spec(4)], spec(), (), 8),
    ("aten::addmm_", [spec(3, 5), spec(3, 4), spec(4, 5)], spec(3, 5), (), 120),
    ("aten::_grouped_mm", [spec(6, 4), spec(2, 4, 5), spec(2, dtype=torch.int32)], spec(6, 5), (), 2 * 6 * 4 * 5),
    ("aten::einsum", [spec(2, 3, 4), spec(4, 5)], spec(2, 3, 5), ("...k,kj->...j", [Operand(0), Operand(1)]), 240),
    ("aten::einsum", [spec(3, 4), spec(4, 5)], spec(3, 5), ("ik,kj", [Operand(0), Operand(1)]), 120),
    ("aten::einsum", [spec(3), spec(4)], spec(3, 4), ("i,j->ij", [Operand(0), Operand(1)]), 0),
    ("aten::conv2d", [spec(3, 8, 8), spec(6, 3, 3, 3)], spec(6, 6, 6), (), 2 * 36 * 6 * 27),
    ("aten::bilinear", [spec(2, 3), spec(2, 4), spec(5, 3, 4)], spec(2, 5), (), 2 * 2 * 60),
    ("aten::lstm.input", [spec(7, 2, 4), spec(1, 2, 5), spec(1, 2, 5), spec(20, 4), spec(20, 5)], spec(7, 2, 5),
     (Operand(0), [Operand(1), Operand(2)], [Operand(3), Operand(4)], False, 1, 0.0, False, False, False),
     2 * 14 * (80 + 100)),
])
def test_formulas(
    operation: str, operands: list[TensorSpec], result: TensorSpec, arguments: tuple[Any, ...], flops: int
) -> None:
    assert said(operation, operands, [result], *arguments)["flops"] == flops


def test_a_size_that_nobody_told_is_inferred() -> None:
    convolution = (Operand(0), Operand(1), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    known = said("aten::convolution", [spec(2, 3, 8, 8), spec(6, 3, 3, 3)], [None], *convolution)
    assert known["flops"] == 2 * 2 * 36 * 6 * 27


def test_an_unknown_operator_costs_nothing_and_fails_nothing() -> None:
    known = said("nobody::knows.this", [spec(4)], [spec(4)])
    assert (known["flops"], known["bytes_read"], known["requires_sync"]) == (0, 16, False)


def test_a_formula_that_fails_fails_nothing() -> None:
    assert said("aten::mm", [spec(3, 4), spec(5, 6)], [spec(3, 6)])["flops"] == 0


def test_matches_of_another_graph_are_left_aside() -> None:
    node = GraphNode("n0", "aten::relu", ("x",), ("y",), (spec(4),), input_specs=(spec(4),), arguments=(Operand(0),))
    foreign = PatternMatch("attention", ("n7",), metadata={"query_length": 1, "key_length": 5})
    strange = PatternMatch("attention", ("n0",), metadata={"query_length": "many", "layer": "first"},
                           values={"key": "nothing"})
    found = CoreAnalyzer().annotate(RecordedGraph((node,)), [foreign, strange])
    assert found.nodes["n0"]["execution_phase"] is ExecutionPhase.FORWARD
    assert set(found.values) == {"x", "y"}
    assert found.values["y"] is DataResidency.EPHEMERAL_ACTIVATION


def test_lineage_and_places() -> None:
    spec_ = spec(4)
    nodes = (
        GraphNode("a", "aten::relu", ("x",), ("y",), (spec_,), input_specs=(spec_,), arguments=(Operand(0),)),
        GraphNode("b", "aten::view", ("y",), ("z",), (spec_,), input_specs=(spec_,), arguments=(Operand(0), [4])),
        GraphNode("c", "aten::add_.Tensor", ("z", "x"), (), (), ("z",), input_specs=(spec_, spec_),
                  arguments=(Operand(0), Operand(1))),
    )
    found = CoreAnalyzer().annotate(RecordedGraph(nodes, {"z": "y"}), ()).nodes
    assert found["c"]["data_lineage"].sources == ("x",)
    assert found["c"]["data_lineage"].producers == ("b",)
    assert (found["a"]["data_lineage"].last_use, found["c"]["data_lineage"].last_use) == ("b", "")
    assert (found["b"]["must_colocate"], found["c"]["must_colocate"]) == ("a", "a")
    assert "must_colocate" not in found["a"]


def test_time_grows_with_the_graph_only() -> None:
    def chain(length: int) -> RecordedGraph:
        one = spec(4)
        return RecordedGraph(tuple(
            GraphNode(f"n{place}", "aten::add.Tensor", (f"v{place - 1}", "v0"), (f"v{place}",), (one,),
                      input_specs=(one, one), arguments=(Operand(0), Operand(1))) for place in range(1, length)))

    def took_s(graph: RecordedGraph) -> float:
        began = time.thread_time()
        CoreAnalyzer().annotate(graph, ())
        return time.thread_time() - began

    short, long = chain(2_000), chain(40_000)
    took_s(short)
    assert min(took_s(long) for _ in range(3)) < 60 * min(took_s(short) for _ in range(5))

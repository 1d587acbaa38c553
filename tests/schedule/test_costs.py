"""The cost model adds up what its formulae say; fitting finds a device again that it knows by times alone."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import djinn
from djinn.ir.spec import SpecTable
from djinn_plugins.graph.graph import GraphNode, RecordedGraph
from djinn_plugins.graph.kinds import PatternMatch
from djinn_plugins.graph.metadata import MemoryPattern, SemanticMetadata
from djinn_plugins.schedule.costs import CostModel, CostWeights, waiting_s
from djinn_plugins.schedule.fitting import Measured, MeasuredCall, fit
from djinn_plugins.schedule.schedule import (
    DeviceInfo,
    DeviceProfile,
    ExecutionSchedule,
    LinkProfile,
    OperationProfile,
    Rate,
    Sample,
    Transfer,
)

PLAIN = DeviceProfile(rate=Rate(100.0, 10.0), launch_s=1.0, view_s=0.5, run_s=3.0)
NEAR = LinkProfile(2.0, 5.0, is_measured=True)


def node(name: str, inputs: str = "", outputs: str = "", flops: int = 0, moved: int = 0, **fields: Any) -> GraphNode:
    meaning = SemanticMetadata("any", flops=flops, bytes_read=moved)
    return GraphNode(name, "any", tuple(inputs), tuple(outputs), (), metadata={"meaning": meaning}, **fields)


def schedule(order: str, devices: str, *transfers: Transfer, **fields: Any) -> ExecutionSchedule:
    return ExecutionSchedule(tuple(order), dict(zip(order, devices, strict=True)), transfers, **fields)


def test_an_operation_takes_its_launch_and_what_binds_it() -> None:
    assert PLAIN.seconds(1000, 10) == 1 + 10
    assert PLAIN.seconds(10, 1000) == 1 + 100
    assert PLAIN.seconds(0, 0, MemoryPattern.NONE) == 0.5
    random = DeviceProfile(rates={MemoryPattern.RANDOM: Rate(1.0, 1.0)}, launch_s=0.0)
    assert random.seconds(0, 7, MemoryPattern.RANDOM) == 7


def test_an_operation_that_was_measured_goes_by_that() -> None:
    known = OperationProfile(0.25, (Sample(0, 100, 2.0), Sample(0, 10_000, 400.0)))
    profile = DeviceProfile(operations={"op": known})
    assert profile.seconds(0, 100, operation="op") == pytest.approx(2.25, rel=1e-3)
    assert profile.seconds(0, 10_000, operation="op") == pytest.approx(400.25, rel=1e-3)
    between = profile.seconds(0, 1000, operation="op") - 0.25
    assert between == pytest.approx((20 + 40) / 2, rel=1e-3)
    assert profile.seconds(0, 1e-9, operation="op") == pytest.approx(0.25)


@given(flops=st.floats(1, 1e15), moved=st.floats(1, 1e12))
def test_measured_operations_stay_between_what_was_measured(flops: float, moved: float) -> None:
    samples = (Sample(1e6, 1e4, 1e-3), Sample(1e9, 1e6, 0.5), Sample(1e7, 1e7, 2e-3))
    got = OperationProfile(0.0, samples).seconds(flops, moved)
    scaled = [sample.seconds * flops / sample.flops for sample in samples]
    assert min(scaled) * (1 - 1e-9) <= got <= max(scaled) * (1 + 1e-9)


def test_waiting_follows_the_queue_of_one_server() -> None:
    assert waiting_s(2.0, 0.0) == 0
    assert waiting_s(2.0, 0.5) == pytest.approx(2.0)
    assert waiting_s(2.0, 0.9) == pytest.approx(18.0)
    for load in (1.0, -0.1, math.nan):
        with pytest.raises(ValueError, match="load"):
            waiting_s(1.0, load)


def test_one_device_does_one_thing_after_the_other() -> None:
    graph = RecordedGraph((node("a", "x", "y", flops=400), node("b", "y", "z", moved=70)))
    found = CostModel([DeviceInfo("0", profile=PLAIN)]).estimate(schedule("ab", "00"), graph)
    assert (found.compute_s, found.latency_s) == (5 + 8, 3 + 5 + 8)
    assert not found.is_measured


def test_what_waits_for_others_takes_longer_and_counts_as_queueing() -> None:
    graph = RecordedGraph((node("a", "x", "y", flops=400),))
    found = CostModel([DeviceInfo("0", profile=PLAIN, load=0.75)]).estimate(schedule("a", "0"), graph)
    assert (found.compute_s, found.queueing_s, found.latency_s) == (5, 15, 23)


def test_transfers_wait_for_their_value_and_for_the_link_and_overlap_with_work() -> None:
    # a and b run on device 0; their results move one after the other while c runs; d reads both on device 1.
    graph = RecordedGraph((node("a", "i", "x", flops=400), node("b", "i", "y", flops=400),
                           node("c", "i", "w", flops=400), node("d", "xy", "z", flops=100)))
    moves = (Transfer("x", "0", "1", "a", size_bytes=50), Transfer("y", "0", "1", "b", size_bytes=100))
    devices = [DeviceInfo("0", profile=PLAIN, links={"1": NEAR}), DeviceInfo("1", profile=PLAIN)]
    found = CostModel(devices).estimate(schedule("abcd", "0001", *moves), graph)
    # x leaves at 5 and is there at 17; y could leave at 10, waits for the link, and takes 22 s.
    assert found.transfer_s == (2 + 10) + (2 + 20)
    assert found.latency_s == 3 + (17 + 22) + 2
    assert found.transferred_bytes == 150
    assert found.compute_s == 5 + 5 + 5 + 2


def test_a_chain_of_transfers_takes_the_sum_whatever_order_it_is_given_in() -> None:
    graph = RecordedGraph((node("a", "i", "x", flops=400), node("b", "x", "y", flops=400)))
    moves = (Transfer("x", "1", "2", "a", size_bytes=5), Transfer("x", "0", "1", "a", size_bytes=5))
    devices = [DeviceInfo(name, profile=PLAIN, links={"1": NEAR, "2": NEAR}) for name in "012"]
    assert CostModel(devices).estimate(schedule("ab", "02", *moves), graph).latency_s == 3 + 5 + 3 + 3 + 5


def test_a_write_comes_after_those_that_read_before_it_wherever_they_run() -> None:
    graph = RecordedGraph((node("a", "i", "x", flops=900), node("b", "i", "", flops=100, writes=("i",))))
    devices = [DeviceInfo(name, profile=PLAIN) for name in "01"]
    assert CostModel(devices).estimate(schedule("ab", "01"), graph).latency_s == 3 + 10 + 2


def test_replicas_cost_on_each_device() -> None:
    graph = RecordedGraph((node("a", "i", "x", flops=100), node("b", "x", "y", flops=100)))
    devices = [DeviceInfo(name, profile=PLAIN) for name in "01"]
    found = CostModel(devices).estimate(schedule("ab", "01", replicas={"a": ("1",)}), graph)
    assert (found.compute_s, found.latency_s) == (6, 3 + 4)


def test_the_score_weighs_its_parts() -> None:
    graph = RecordedGraph((node("a", "i", "x", flops=400), node("b", "x", "y", flops=400)))
    devices = [DeviceInfo("0", profile=PLAIN, links={"1": NEAR}, load=0.5), DeviceInfo("1", profile=PLAIN)]
    given = schedule("ab", "01", Transfer("x", "0", "1", "a", size_bytes=40))
    found = CostModel(devices, CostWeights(1.0, 10.0, 100.0)).estimate(given, graph)
    assert found.score == 10 + 10 * 10 + 100 * 5


def test_a_prediction_is_measured_if_all_that_it_rests_on_is() -> None:
    measured = DeviceProfile(is_measured=True)
    graph = RecordedGraph((node("a", "i", "x"), node("b", "x", "y")))
    given = schedule("ab", "01", Transfer("x", "0", "1", "a"))
    for first, link, expected in ((measured, NEAR, True), (PLAIN, NEAR, False), (measured, LinkProfile(), False)):
        devices = [DeviceInfo("0", profile=first, links={"1": link}), DeviceInfo("1", profile=measured)]
        assert CostModel(devices).estimate(given, graph).is_measured is expected


def test_without_meaning_operands_and_results_are_what_moves() -> None:
    spec = SpecTable().intern(torch.Size([10]), (1,), 0, torch.float32, torch.device("meta"))
    plain = GraphNode("a", "any", ("x",), ("y",), (spec,), input_specs=(spec,))
    assert CostModel([DeviceInfo("0", profile=PLAIN)]).node_seconds(plain) == 1 + 8


TRUE = {"add": (2e-6, 0.0, 2e10), "gelu": (5e-6, 0.0, 4e9), "mm": (8e-6, 8e10, 1e30), "view": (1e-6, 0.0, 1e30)}
"""Launch, FLOP/s and bytes/s of a device that nobody knows."""


def took(operation: str, flops: float, moved: float) -> float:
    launch_s, flops_per_s, bytes_per_s = TRUE[operation]
    return launch_s + (flops / flops_per_s if flops else 0.0) + moved / bytes_per_s


def workload(*calls: tuple[str, float, float]) -> Measured:
    patterns = {"view": MemoryPattern.NONE, "mm": MemoryPattern.REUSED}
    made = tuple(MeasuredCall(name, flops, moved, patterns.get(name, MemoryPattern.SEQUENTIAL))
                 for name, flops, moved in calls)
    return Measured(str(calls), made, 1e-3 + sum(took(*call) for call in calls))


def test_fitting_finds_a_device_again() -> None:
    small = [workload(*[(name, 0.0, 100.0)] * 40) for name in ("add", "gelu")]
    small += [workload(*[("mm", 100.0, 100.0)] * 40), workload(*[("view", 0.0, 0.0)] * 40)]
    large = [workload(*[(name, 0.0, moved)] * 5) for name in ("add", "gelu") for moved in (1e6, 1e7)]
    large += [workload(*[("mm", flops, 1e6), ("view", 0.0, 0.0), ("add", 0.0, 1e6)] * 5) for flops in (1e8, 1e9)]
    profile = fit([*large, *small], empty_s=1e-3, run_s=5e-4)
    for call in (("add", 0.0, 3e6), ("gelu", 0.0, 5e5), ("mm", 3e8, 1e6), ("view", 0.0, 0.0), ("add", 0.0, 10.0)):
        assert profile.seconds(call[1], call[2], operation=call[0]) == pytest.approx(took(*call), rel=0.02), call
    assert (profile.run_s, profile.is_measured) == (5e-4, True)
    assert profile.view_s == pytest.approx(1e-6)
    assert profile.launch_s == pytest.approx(5e-6, rel=0.02)
    # What nobody measured goes by what is usual.
    assert profile.seconds(1e9, 1e6, MemoryPattern.REUSED, "other") == pytest.approx(1e9 / 8e10, rel=0.05)
    assert 4e9 < profile.rates[MemoryPattern.SEQUENTIAL].bytes_per_s < 2.1e10


def test_times_that_make_no_sense_leave_what_is_known() -> None:
    quick = Measured("quick", (MeasuredCall("add", 0.0, 1e6, MemoryPattern.SEQUENTIAL),), 1e-9)
    assert fit([quick, Measured("nothing", (), 1.0)], empty_s=1e-3, run_s=0.0).operations == {}


def two_products(rows: int) -> RecordedGraph:
    """Two independent chains of products, whose results meet."""
    djinn.shutdown()
    with djinn.capture() as captured, torch.no_grad():
        x = torch.randn(rows, rows)
        one, other = x @ x, x @ x
        for _ in range(3):
            one, other = one @ one, other @ other
        one + other
    graph = captured.graph
    djinn.shutdown()
    return graph


@pytest.mark.parametrize("strategy", ["latency", "throughput"])
def test_weights_decide_whether_values_move(strategy: str) -> None:
    graph, devices = two_products(256), [DeviceInfo("a"), DeviceInfo("b")]
    apart = djinn.schedule(graph, strategy, devices, CostWeights())
    together = djinn.schedule(graph, strategy, devices, CostWeights(beta=1e6))
    assert set(apart.devices.values()) == {"a", "b"}
    assert len(set(together.devices.values())) == 1
    # Times are those of the devices and links as they are; the score is weighted.
    plain = djinn.schedule(graph, strategy, devices)
    assert plain.devices == apart.devices
    assert apart.estimate.latency_s == pytest.approx(plain.estimate.latency_s, rel=0.05)
    moved = CostModel(devices, CostWeights(beta=1e6)).estimate(apart, apart.graph)
    assert together.estimate.score < moved.score
    assert apart.spans.keys() == plain.spans.keys()
    assert apart.transfer_spans.keys() == set(apart.transfers)


def test_weights_decide_whether_work_waits_for_others() -> None:
    fast = DeviceProfile(rate=Rate(1e11, 2e10))
    graph, devices = two_products(256), [DeviceInfo("busy", profile=fast, load=0.4), DeviceInfo("idle")]
    links = CostWeights(beta=1e6)
    patient, urgent = (djinn.schedule(graph, "latency", devices, attrs.evolve(links, gamma=gamma))
                       for gamma in (0.0, 10.0))
    assert set(patient.devices.values()) == {"busy"}
    assert set(urgent.devices.values()) == {"idle"}
    assert patient.estimate.queueing_s > 0
    for weights in (CostWeights(alpha=0.0), CostWeights(beta=-1.0)):
        with pytest.raises(ValueError, match="alpha is above zero"):
            djinn.schedule(graph, "latency", devices, weights)


def test_a_hint_of_a_pattern_keeps_its_nodes_together() -> None:
    graph, devices = two_products(256), [DeviceInfo("a"), DeviceInfo("b")]
    products = tuple(node.id for node in graph.nodes() if node.operation in {"aten::mm", "aten::matmul"})
    assert len(products) == 8
    first = next(node for node in graph.nodes() if node.id == products[0])

    def used(hints: dict[str, Any]) -> set[str]:
        match = PatternMatch("pair", products, hints=hints, values={"source": first.inputs[0]})
        return set(djinn.schedule(djinn.annotate_graph(graph, [match]), "latency", devices).devices.values())

    assert used({}) == used({"colocate": False}) == {"a", "b"}
    for hint in (True, "source", "no value of it"):
        assert len(used({"colocate": hint})) == 1

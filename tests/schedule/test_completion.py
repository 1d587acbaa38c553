"""What follows from where the nodes are placed: what moves, what is made again, what is placed, in which order."""

from __future__ import annotations

import attrs
import pytest
from support.planning import graphs as made

from djinn.errors import ScheduleError
from djinn_plugins.graph.graph import RecordedGraph, ValueInfo
from djinn_plugins.graph.metadata import DataLineage
from djinn_plugins.schedule.check import check_schedule
from djinn_plugins.schedule.completion import complete
from djinn_plugins.schedule.problem import Problem
from djinn_plugins.schedule.schedule import CachingPolicy, DeviceInfo, ExecutionSchedule, LinkProfile

SLOW = LinkProfile(2e-4, 1e9)


def devices(**holds: str) -> list[DeviceInfo]:
    return [DeviceInfo(name, holds=frozenset(values.split())) for name, values in holds.items()]


def completed(graph: RecordedGraph, offered: list[DeviceInfo], *places: int, order=None) -> ExecutionSchedule:
    problem = Problem(graph, offered)
    schedule = complete(problem, places or [0] * len(problem.nodes), order)
    check_schedule(schedule, graph, offered)
    return schedule


def moves(schedule: ExecutionSchedule) -> set[tuple[str, str, str, str]]:
    return {(transfer.value, transfer.source, transfer.target, transfer.after) for transfer in schedule.transfers}


def test_a_value_moves_once_to_each_device_that_reads_it() -> None:
    graph = RecordedGraph((made.node("m", ["x"], ["v"]), made.node("r", ["v"], ["a"]), made.node("s", ["v"], ["b"]),
                           made.node("t", ["v"], ["c"])))
    schedule = completed(graph, devices(p="x", q="", r=""), 0, 1, 1, 2)
    assert sorted(transfer.target for transfer in schedule.transfers) == ["q", "r"]
    assert {transfer.value for transfer in schedule.transfers} == {"v"}


def test_views_are_made_again_where_their_base_goes_anyway() -> None:
    sizes = {"v": 1200, "a": 400, "b": 400, "c": 400}
    views = [made.node(name, ["v"], [name], sizes) for name in "abc"]
    graph = RecordedGraph((made.node("m", ["x"], ["v"], sizes), *views, made.node("r", ["a", "b", "c"], ["y"], sizes)),
                          dict.fromkeys("abc", "v"))
    schedule = completed(graph, devices(p="x", q=""), 0, 0, 0, 0, 1)
    assert moves(schedule) == {("v", "p", "q", "m")}
    assert schedule.replicas == dict.fromkeys("abc", ("q",))
    assert schedule.caching["a"] is CachingPolicy.RECOMPUTE
    assert "recomputes" not in schedule.flags


def test_one_small_view_moves_itself() -> None:
    sizes = {"v": 10_000_000, "a": 4}
    graph = RecordedGraph((made.node("m", ["x"], ["v"], sizes), made.node("a", ["v"], ["a"], sizes),
                           made.node("r", ["a"], ["y"], sizes)), {"a": "v"})
    assert moves(completed(graph, devices(p="x", q=""), 0, 0, 1)) == {("a", "p", "q", "a")}


@pytest.mark.parametrize("is_cheap", [True, False])
def test_what_is_cheaper_to_compute_again_is_computed_again(is_cheap: bool) -> None:
    sizes = {"v": 4_000_000, "x": 4}
    again = made.meaning(can_recompute=True, flops=1000 if is_cheap else 10**12)
    graph = RecordedGraph((made.node("m", ["x"], ["v"], sizes, metadata=again), made.node("r", ["v"], ["y"], sizes)))
    offered = [DeviceInfo("p", holds=frozenset({"x"})), DeviceInfo("q", copies=frozenset({"x"}))]
    schedule = completed(graph, offered, 0, 1)
    assert bool(schedule.replicas) == is_cheap
    assert bool(schedule.transfers) != is_cheap
    assert ("recomputes" in schedule.flags) == is_cheap


def test_what_has_been_written_since_is_not_made_again() -> None:
    graph = RecordedGraph((made.node("m", ["x"], ["v"]), made.node("a", ["v"], ["a"]),
                           made.node("w", ["v"], [], writes=("v",)), made.node("r", ["a", "v"], ["y"])), {"a": "v"})
    schedule = completed(graph, devices(p="x", q=""), 0, 0, 0, 1)
    assert moves(schedule) == {("a", "p", "q", "w"), ("v", "p", "q", "w")}
    assert not schedule.replicas


@pytest.mark.parametrize("is_far", [True, False])
def test_values_go_through_a_nearer_device_only_if_that_is_faster(is_far: bool) -> None:
    near, far = LinkProfile(1e-5, 1e10), LinkProfile(1e-2 if is_far else 1.5e-5, 1e10)
    graph = RecordedGraph((made.node("r", ["x"], ["v"]),))
    offered = [DeviceInfo("p", holds=frozenset({"x"}), links={"q": near, "r": far}),
               DeviceInfo("q", links={"p": near, "r": near}), DeviceInfo("r", links={"p": far, "q": near})]
    found = moves(completed(graph, offered, 2))
    assert found == ({("x", "p", "q", ""), ("x", "q", "r", "")} if is_far else {("x", "p", "r", "")})


def test_what_several_devices_hold_is_written_where_most_of_it_is() -> None:
    sizes = {"x": 4, "y": 4000}
    graph = RecordedGraph((made.node("w", ["x", "y"], [], sizes, writes=("x", "y")),
                           made.node("r", ["x"], ["v"], sizes)))
    schedule = completed(graph, devices(p="x", q="y"))
    assert schedule.devices["w"] == "q"
    assert moves(schedule) == {("x", "p", "q", ""), ("x", "q", "p", "w")}


def test_what_can_run_nowhere_is_refused() -> None:
    graph = RecordedGraph((made.node("m", ["x", "y"], ["a", "b"]),), {"a": "x", "b": "y"})
    with pytest.raises(ScheduleError, match="can run on none of them"):
        complete(Problem(graph, devices(p="x", q="y")), [0])


def test_what_nobody_holds_is_placed_where_it_is_read_first() -> None:
    graph = RecordedGraph((made.node("m", ["x"], ["v"]), made.node("r", ["v", "y"], ["u"]),
                           made.node("w", ["z"], [], writes=("z",))))
    schedule = completed(graph, devices(p="", q=""), 0, 1, 1)
    assert schedule.placements == {"x": "p", "y": "q", "z": "q"}
    assert all(schedule.caching[value] is CachingPolicy.PERSIST for value in "xyzu")
    assert "v" not in schedule.caching


def test_urgent_nodes_and_what_they_wait_for_come_first() -> None:
    urgent = made.meaning(priority=10)
    graph = RecordedGraph((made.node("a", ["x"], ["v"], metadata=made.meaning(flops=10**9)),
                           made.node("b", ["x"], ["w"]), made.node("c", ["w"], ["y"], metadata=urgent)))
    assert completed(graph, devices(p="x")).order == ("b", "c", "a")


def test_what_another_device_waits_for_comes_first() -> None:
    graph = RecordedGraph((made.node("a", ["x"], ["v"]), made.node("b", ["x"], ["w"]), made.node("c", ["w"], ["y"])))
    assert completed(graph, devices(p="x", q=""), 0, 0, 1).order[0] == "b"


def test_budgets_count_what_is_there_at_once() -> None:
    sizes = dict.fromkeys("xabc", 1000)
    graph = RecordedGraph(tuple(made.node(out, [source], [out], sizes, metadata=made.meaning())
                                for source, out in zip("xab", "abc", strict=True)))
    offered = [DeviceInfo("p", memory_bytes=10_000, held_bytes=5_000, holds=frozenset("x"))]
    assert completed(graph, offered).budgets == {"p": 7_000}
    placed = [attrs.evolve(offered[0], holds=frozenset())]
    assert completed(graph, placed).budgets == {"p": 8_000}


def test_large_reductions_stay_where_their_operand_is_and_this_is_said() -> None:
    sizes = {"x": 4_000_000, "v": 4}
    graph = RecordedGraph((made.node("sum", ["x"], ["v"], sizes),))
    assert "reduction_remote" in completed(graph, devices(p="x", q=""), 0).flags
    assert "reduction_remote" not in completed(graph, devices(p="x", q=""), 1).flags


def test_waiting_for_the_work_of_others_is_counted() -> None:
    graph = RecordedGraph((made.node("m", ["x"], ["v"], metadata=made.meaning(flops=5 * 10**9)),))
    idle = completed(graph, [DeviceInfo("p")]).estimate
    busy = completed(graph, [DeviceInfo("p", load=0.75)]).estimate
    assert busy.latency_s == pytest.approx(4 * idle.latency_s)
    assert busy.compute_s == pytest.approx(idle.compute_s)
    assert busy.queueing_s == pytest.approx(3 * idle.compute_s)


def test_the_kind_of_a_value_is_known_to_the_problem() -> None:
    graph = RecordedGraph((made.node("m", ["x", "w"], ["v"], {"w": 1_000_000}),),
                          values={"w": ValueInfo(kind="parameter")})
    problem = Problem(graph, devices(p="x"))
    assert [problem.values[value] for value, stays in enumerate(problem.stays) if stays] == ["w"]


@pytest.mark.parametrize("last_use", ["r", ""])
def test_what_outlives_the_graph_by_its_lineage_is_kept(last_use: str) -> None:
    known = made.meaning(data_lineage=DataLineage(sources=("x",), last_use=last_use))
    graph = RecordedGraph((made.node("m", ["x"], ["v"], metadata=known), made.node("r", ["v"], ["y"])))
    schedule = completed(graph, devices(p="x"), 0, 0)
    assert (schedule.caching.get("v") is CachingPolicy.PERSIST) is (not last_use)

"""The simulated cluster against cases that can be worked out by hand, formulae, and what schedulers expect."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence

import attrs
import pytest
import torch
from support.planning.cluster_simulator import Cluster, SimulatedRun, simulate

from djinn.ir.spec import SpecTable, TensorSpec
from djinn_plugins.graph.graph import GraphNode, RecordedGraph
from djinn_plugins.schedule.check import check_schedule
from djinn_plugins.schedule.costs import CostModel, waiting_s
from djinn_plugins.schedule.latency.scheduler import LatencyScheduler
from djinn_plugins.schedule.schedule import (
    CachingPolicy,
    DeviceInfo,
    ExecutionSchedule,
    LinkProfile,
    StepSpan,
    Transfer,
)
from djinn_plugins.schedule.single.scheduler import SingleScheduler
from djinn_plugins.schedule.throughput.scheduler import ThroughputScheduler

SPECS = SpecTable()
LINK = LinkProfile(latency_s=1.0, bytes_per_s=100.0)


def spec(size_bytes: int = 400) -> TensorSpec:
    return SPECS.intern(torch.Size((size_bytes // 4,)), (1,), 0, torch.float32, torch.device("meta"))


def node(identifier: str, inputs: Sequence[str] = (), outputs: Sequence[str] = (), *, writes: Sequence[str] = (),
         size_bytes: int = 400, is_random: bool = False) -> GraphNode:
    return GraphNode(identifier, "made::up", tuple(inputs), tuple(outputs), (spec(size_bytes),) * len(outputs),
                     tuple(writes), is_random, (spec(size_bytes),) * len(inputs))


def device(name: str, **known) -> DeviceInfo:
    others = {"a", "b", "c"} - {name}
    return DeviceInfo(name, links=dict.fromkeys(others, LINK), **known)


def run(nodes: Sequence[GraphNode], places: str, transfers: Sequence[Transfer] = (), *, seconds: float = 1.0,
        devices: Sequence[DeviceInfo] = (), storages=None, uplinks=None, seed: int = 0, **more) -> SimulatedRun:
    graph = RecordedGraph(tuple(nodes), storages or {})
    order = tuple(each.id for each in nodes)
    schedule = ExecutionSchedule(order, dict(zip(order, places, strict=True)), tuple(transfers), **more)
    cluster = Cluster(tuple(devices) or tuple(device(name) for name in sorted(set(places))), uplinks or {})
    return simulate(schedule, cluster, graph, node_seconds=lambda *_: seconds, seed=seed)


def test_a_chain_on_one_device_takes_the_sum() -> None:
    found = run([node("n0", [], ["x"]), node("n1", ["x"], ["y"]), node("n2", ["y"], ["z"])], "aaa")
    assert found.makespan_s == 3.0
    assert [found.spans[name, "a"] for name in ("n0", "n1", "n2")] == [StepSpan(0, 1), StepSpan(1, 2), StepSpan(2, 3)]
    assert found.utilisation == {"a": 1.0}
    assert found.violations == ()


def test_a_value_that_crosses_takes_latency_and_bandwidth() -> None:
    moved = Transfer("x", "a", "b", "n0", 400)
    found = run([node("n0", [], ["x"]), node("n1", ["x"], ["y"])], "ab", [moved])
    assert found.transfer_spans == {moved: StepSpan(1.0, 6.0)}
    assert found.spans["n1", "b"] == StepSpan(6.0, 7.0)
    assert found.link_bytes == {("a", "b"): 400}
    assert found.utilisation == {"a": pytest.approx(1 / 7), "b": pytest.approx(1 / 7)}
    assert found.violations == ()


def test_two_devices_work_side_by_side() -> None:
    found = run([node("n0", [], ["x"]), node("n1", [], ["y"])], "ab")
    assert found.makespan_s == 1.0
    assert found.utilisation == {"a": 1.0, "b": 1.0}


def test_a_link_carries_one_transfer_at_a_time() -> None:
    moves = [Transfer("x", "a", "b", "n0", 400), Transfer("y", "a", "b", "n1", 400)]
    found = run([node("n0", [], ["x"]), node("n1", [], ["y"]), node("n2", ["x", "y"], ["z"])], "aab", moves)
    assert found.transfer_spans == {moves[0]: StepSpan(1.0, 6.0), moves[1]: StepSpan(6.0, 11.0)}
    assert found.makespan_s == 12.0


def test_an_uplink_is_shared_fairly_by_its_links() -> None:
    moves = [Transfer("x", "a", "b", "n0", 400), Transfer("x", "a", "c", "n0", 400)]
    nodes = [node("n0", [], ["x"]), node("n1", ["x"], ["y"]), node("n2", ["x"], ["z"])]
    alone = run(nodes, "abc", moves)
    assert [alone.transfer_spans[move].end_s for move in moves] == [6.0, 6.0], "two links, nothing shared"
    shared = run(nodes, "abc", moves, uplinks={"a": 100.0})
    assert [shared.transfer_spans[move].end_s for move in moves] == [10.0, 10.0], "two at half the speed"
    unequal = [moves[0], attrs.evolve(moves[1], size_bytes=100)]
    found = run(nodes, "abc", unequal, uplinks={"a": 100.0})
    # The small one is done after 2 s at half speed; the large one has 300 bytes left, at full speed.
    assert [found.transfer_spans[move].end_s for move in unequal] == [7.0, 4.0]


def test_what_goes_on_from_where_it_came_waits_for_its_coming() -> None:
    chain = [Transfer("x", "a", "b", "n0", 400), Transfer("x", "b", "c", "n0", 400)]
    found = run([node("n0", [], ["x"]), node("n1", ["x"], ["y"]), node("n2", ["x"], ["z"])], "abc", chain)
    assert found.transfer_spans[chain[1]] == StepSpan(6.0, 11.0)
    assert found.violations == ()


def test_a_replica_runs_where_it_is_needed_and_nothing_moves() -> None:
    nodes = [node("n0", ["w"], ["x"]), node("n1", ["x"], ["y"]), node("n2", ["x"], ["z"])]
    devices = (device("a", holds=frozenset("w")), device("b", copies=frozenset("w")))
    found = run(nodes, "aab", replicas={"n0": ("b",)}, devices=devices)
    assert found.spans["n0", "b"] == StepSpan(0, 1)
    assert found.spans["n2", "b"] == StepSpan(1, 2)
    assert found.makespan_s == 2.0
    assert found.violations == ()


def test_what_is_not_there_is_a_violation() -> None:
    nodes = [node("n0", [], ["x"]), node("n1", ["x"], ["y"])]
    assert run(nodes, "ab").violations == ("n1 on b reads x, which is not there",)
    assert run(nodes, "ab", [Transfer("x", "a", "b", "n0", 400)]).violations == ()
    # Somebody writes it in between: what came before is no longer good.
    stale = [node("n0", [], ["x"]), node("n1", ["x"], [], writes=["x"]), node("n2", ["x"], ["y"])]
    early = run(stale, "aab", [Transfer("x", "a", "b", "n0", 400)])
    assert early.violations == ("n2 on b reads x, which is not there",)
    assert run(stale, "aab", [Transfer("x", "a", "b", "n1", 400)]).violations == ()


def test_what_was_written_elsewhere_comes_home() -> None:
    nodes = [node("n0", ["w"], [], writes=["w"]), node("n1", ["w"], ["y"])]
    devices = (device("a", holds=frozenset("w")), device("b"))
    there, back = Transfer("w", "a", "b", "", 400), Transfer("w", "b", "a", "n0", 400)
    found = run(nodes, "ba", [there, back], devices=devices)
    assert (found.transfer_spans[there], found.transfer_spans[back]) == (StepSpan(0, 5), StepSpan(6, 11))
    assert found.spans["n1", "a"] == StepSpan(11, 12)
    assert found.violations == ()


def test_draws_of_random_numbers_follow_each_other() -> None:
    nodes = [node("n0", [], ["x"], is_random=True), node("n1", [], ["y"], is_random=True)]
    assert run(nodes, "ab").spans["n1", "b"].begin_s == 1.0


def test_memory_follows_storages_from_the_maker_to_the_last_reader() -> None:
    nodes = [node("n0", [], ["x"]), node("n1", ["x"], ["v"]), node("n2", ["v"], ["y"]), node("n3", ["y"], ["z"])]
    found = run(nodes, "aaaa", storages={"v": "x"})
    assert found.peak_bytes == {"a": 800}, "x and y; a view takes nothing, and x has gone when z comes"
    kept = run(nodes, "aaaa", storages={"v": "x"}, caching={"x": CachingPolicy.PERSIST})
    assert kept.peak_bytes == {"a": 1200}


def test_a_device_that_has_to_hold_more_than_it_has_is_a_violation() -> None:
    nodes = [node("n0", ["w"], ["x"]), node("n1", ["x"], ["y"])]
    devices = (device("a", holds=frozenset("w"), held_bytes=400, memory_bytes=1200),)
    assert run(nodes, "aa", devices=devices).violations == ()
    small = (attrs.evolve(devices[0], memory_bytes=1199),)
    assert run(nodes, "aa", devices=small).violations == ("a holds 1200 bytes and has 1199",)


def test_copies_take_room_until_their_last_reader() -> None:
    nodes = [node("n0", [], ["x"]), node("n1", ["x"], ["y"]), node("n2", ["y"], ["z"])]
    found = run(nodes, "abb", [Transfer("x", "a", "b", "n0", 400)])
    assert found.peak_bytes == {"a": 400, "b": 800}


@pytest.mark.parametrize("load", [0.2, 0.5, 0.8])
def test_waiting_for_others_is_as_long_as_the_queue_says(load: float) -> None:
    service_s = 1e-3
    busy = (device("a", load=load),)
    waits = [run([node("n0", [], ["x"])], "a", devices=busy, seconds=1e-6, seed=seed).waited_s["a"]
             for seed in range(3000)]
    # The mean of so many lies within four standard errors of the true one, 999,937 times of a million.
    error_s = statistics.stdev(waits) / len(waits) ** 0.5
    assert statistics.fmean(waits) == pytest.approx(waiting_s(service_s, load), abs=4 * error_s)
    assert error_s < waiting_s(service_s, load) / 10, "close enough to tell the formula from others"


def layered(count: int, width: int, seed: int) -> RecordedGraph:
    """A graph of layers, each node reading two values of the layer before."""
    choose = random.Random(seed)
    nodes: list[GraphNode] = []
    for number in range(count):
        last = range(max(0, number // width - 1) * width, number // width * width)
        inputs = sorted({f"v{choose.choice(last)}" for _ in range(2)}) if last else []
        nodes.append(node(f"n{number}", inputs, [f"v{number}"], size_bytes=4 * choose.randrange(1, 1000)))
    return RecordedGraph(tuple(nodes))


def dealt(graph: RecordedGraph, devices: Sequence[DeviceInfo], seed: int = 0) -> ExecutionSchedule:
    """Deal nodes out to devices at random, with the transfers which that needs."""
    choose = random.Random(seed)
    places = {each.id: choose.choice(devices).id for each in graph.nodes()}
    makers = {value: each.id for each in graph.nodes() for value in each.outputs}
    transfers = {}
    for each in graph.nodes():
        for value, known in zip(each.inputs, each.input_specs, strict=True):
            source, target = places[makers[value]], places[each.id]
            if source != target:
                transfers[Transfer(value, source, target, makers[value], known.size_bytes)] = None
    return ExecutionSchedule(tuple(places), places, tuple(transfers), graph=graph)


def test_it_agrees_with_the_cost_model_where_nothing_is_contended() -> None:
    devices = [device(name) for name in "abc"]
    chain = RecordedGraph(tuple(node(f"n{index}", [f"v{index - 1}"] if index else [], [f"v{index}"])
                                for index in range(40)))
    for seed in range(20):
        schedule = dealt(chain, devices, seed)
        found = simulate(schedule, Cluster(tuple(devices)))
        expected = CostModel(devices).estimate(schedule, chain)
        assert found.violations == ()
        assert found.makespan_s == pytest.approx(expected.latency_s, rel=0.01)
        assert sum(found.link_bytes.values()) == expected.transferred_bytes


SCHEDULERS = {"latency": LatencyScheduler, "throughput": ThroughputScheduler, "single": SingleScheduler}


@pytest.mark.parametrize("name", ["latency", "throughput"])
def test_it_agrees_with_what_schedulers_expect(name: str) -> None:
    quick = LinkProfile(latency_s=1e-6, bytes_per_s=1e10)
    devices = [DeviceInfo(each, links=dict.fromkeys({"a", "b", "c"} - {each}, quick)) for each in "abc"]
    apart = []
    for seed in range(12):
        graph = layered(120, 12, seed)
        schedule = SCHEDULERS[name]().schedule(graph, devices)
        check_schedule(schedule, graph, devices)
        found = simulate(schedule, Cluster(tuple(devices)), graph)
        assert found.violations == (), seed
        expected_s = max(span.end_s for span in schedule.spans.values())
        apart.append(found.makespan_s / expected_s)
        assert set(found.transfer_spans) == set(schedule.transfers)
    assert statistics.fmean(apart) == pytest.approx(1, abs=0.03), apart
    assert all(0.85 < each < 1.15 for each in apart), apart


@pytest.mark.parametrize("name", SCHEDULERS)
def test_no_scheduler_needs_what_is_not_there(name: str) -> None:
    """Weights that are held here and there, views, writes, random draws."""
    for seed in range(30):
        graph, devices = tangled(40, seed)
        schedule = SCHEDULERS[name]().schedule(graph, devices)
        check_schedule(schedule, graph, devices)
        found = simulate(schedule, Cluster(tuple(devices)), graph)
        assert found.violations == (), seed
        assert len(found.transfer_spans) == len(schedule.transfers)


def tangled(count: int, seed: int) -> tuple[RecordedGraph, list[DeviceInfo]]:
    choose = random.Random(seed)
    weights = [f"w{number}" for number in range(6)]
    values, storages, nodes = list(weights), {}, []
    for number in range(count):
        inputs = choose.sample(values, choose.randrange(1, 3))
        kind = choose.choice(("plain", "plain", "plain", "view", "write", "random"))
        output = f"v{number}"
        if kind == "view":
            inputs = inputs[:1]
            storages[output] = storages.get(inputs[0], inputs[0])
        nodes.append(node(f"n{number}", inputs, () if kind == "write" else (output,), is_random=kind == "random",
                          writes=inputs[:1] if kind == "write" else ()))
        values += [] if kind == "write" else [output]
    owners = {weight: choose.choice("abc") for weight in weights}
    devices = [DeviceInfo(each, holds=frozenset(weight for weight, owner in owners.items() if owner == each))
               for each in "abc"]
    return RecordedGraph(tuple(nodes), storages), devices


def test_a_hundred_thousand_nodes_are_simulated_in_reasonable_time() -> None:
    graph = layered(100_000, 100, 0)
    devices = [DeviceInfo(f"d{index}") for index in range(100)]
    schedule = dealt(graph, devices)
    began = time.process_time()
    found = simulate(schedule, Cluster(tuple(devices)))
    took_s = time.process_time() - began
    assert found.violations == ()
    assert len(found.spans) == 100_000
    assert took_s < 30, took_s

"""Balance and memory: what `throughput` is for, and what both schedulers keep."""

from __future__ import annotations

import random

import pytest
from support.planning import graphs as made

from djinn_plugins.graph.graph import RecordedGraph, ValueInfo
from djinn_plugins.schedule.check import check_schedule
from djinn_plugins.schedule.latency.scheduler import LatencyScheduler
from djinn_plugins.schedule.schedule import DeviceInfo, LinkProfile
from djinn_plugins.schedule.throughput.scheduler import ThroughputScheduler

SCHEDULERS = [LatencyScheduler(), ThroughputScheduler()]
FAST = LinkProfile(1e-6, 1e11)


def linked(count: int, memory_bytes: int | None = None) -> list[DeviceInfo]:
    names = [f"d{index}" for index in range(count)]
    return [DeviceInfo(name, memory_bytes, links={other: FAST for other in names if other != name}) for name in names]


def stacked(layers: int, weight_bytes: int) -> RecordedGraph:
    """Layer after layer, each with a weight."""
    sizes = {f"w{layer}": weight_bytes for layer in range(layers)}
    nodes = [made.node(f"n{layer}", [f"v{layer}", f"w{layer}"], [f"v{layer + 1}"], sizes,
                       metadata=made.meaning(flops=10**8)) for layer in range(layers)]
    return RecordedGraph(tuple(nodes), values={name: ValueInfo(kind="parameter") for name in sizes})


def test_load_is_balanced() -> None:
    graph, devices = stacked(24, 1000), linked(3)
    schedule = ThroughputScheduler().schedule(graph, devices)
    check_schedule(schedule, graph, devices)
    busy = dict.fromkeys((device.id for device in devices), 0.0)
    for name, span in schedule.spans.items():
        busy[schedule.devices[name]] += span.end_s - span.begin_s
    assert max(busy.values()) <= 1.01 * sum(busy.values()) / 3
    assert len(schedule.transfers) == 2


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=lambda scheduler: scheduler.name)
def test_models_are_split_by_memory_and_weights_stay(scheduler) -> None:
    graph, devices = stacked(12, 1_000_000), linked(3, 5_000_000)
    schedule = scheduler.schedule(graph, devices)
    check_schedule(schedule, graph, devices)
    assert not [transfer for transfer in schedule.transfers if transfer.value.startswith("w")]
    for layer in range(12):
        assert schedule.placements[f"w{layer}"] == schedule.devices[f"n{layer}"]
    assert max(schedule.budgets.values()) <= 5_000_000


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=lambda scheduler: scheduler.name)
def test_work_goes_to_the_weights(scheduler) -> None:
    graph = stacked(12, 1_000_000)
    names = [f"d{index}" for index in range(3)]
    devices = [DeviceInfo(name, holds=frozenset(f"w{layer}" for layer in range(12) if layer // 4 == index),
                          links={other: FAST for other in names if other != name}) for index, name in enumerate(names)]
    schedule = scheduler.schedule(graph, devices)
    check_schedule(schedule, graph, devices)
    assert {name: schedule.devices[name] for name in schedule.order} == {
        f"n{layer}": f"d{layer // 4}" for layer in range(12)}
    assert len(schedule.transfers) == 2


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=lambda scheduler: scheduler.name)
@pytest.mark.parametrize("seed", range(20))
def test_an_equal_share_of_memory_and_room_for_one_piece_is_enough(scheduler, seed: int) -> None:
    """Where a piece does not fit, less is left than the largest piece takes: not everywhere, for that is too much."""
    rng = random.Random(seed)
    graph, count = made.layered(rng, rng.randint(5, 60), 6), rng.randint(2, 4)
    sizes = {name: known.size_bytes for n in graph for name, known in
             (*zip(n.inputs, n.input_specs, strict=True), *zip(n.outputs, n.specs, strict=True))}
    pieces = [sum(sizes[value] for value in {*n.inputs, *n.outputs}) for n in graph]
    devices = linked(count, sum(pieces) // count + max(pieces) + 1)
    check_schedule(scheduler.schedule(graph, devices), graph, devices)


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=lambda scheduler: scheduler.name)
def test_the_same_graph_gets_the_same_schedule(scheduler) -> None:
    for seed in range(10):
        rng = random.Random(seed)
        graph, outside = made.tangled(rng, 30)
        devices = made.scattered(rng, outside, 3)
        assert scheduler.schedule(graph, devices) == scheduler.schedule(graph, devices)

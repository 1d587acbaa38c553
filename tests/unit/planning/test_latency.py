"""How good the scheduler `latency` is: against the optimum, against HEFT, and by the clock."""

from __future__ import annotations

import itertools
import random
import statistics
import time

import planning_graphs as made
import pytest
from djinn_scheduler_latency.scheduler import LatencyScheduler
from planning_peers import Numbers, heft, optimum, simulated

from djinn.model.graph import RecordedGraph
from djinn.model.schedule import DeviceInfo, LinkProfile
from djinn.planning.check import check_schedule

LATENCY = LatencyScheduler()


def small(seed: int) -> tuple[RecordedGraph, list[DeviceInfo]]:
    rng = random.Random(seed)
    graph = made.layered(rng, rng.randint(2, 9), rng.randint(1, 4))
    return graph, made.layered_devices(rng, graph, 3, is_uniform=rng.random() < 0.5)


@pytest.mark.timeout(600)
def test_small_graphs_are_scheduled_nearly_as_well_as_possible() -> None:
    ratios = []
    for seed in range(300):
        graph, devices = small(seed)
        schedule = LATENCY.schedule(graph, devices)
        check_schedule(schedule, graph, devices)
        took = schedule.estimate.latency_s
        best, _ = optimum(graph, devices, took)
        ratios.append(took / best)
    assert max(ratios) <= 1.35, max(ratios)
    assert statistics.mean(ratios) <= 1.05, statistics.mean(ratios)


def test_large_graphs_are_scheduled_no_worse_than_by_heft() -> None:
    ratios = []
    for seed in range(200):
        rng = random.Random(seed)
        graph = made.layered(rng, round(50 * 40 ** rng.random() ** 2), rng.randint(2, 24))
        devices = made.layered_devices(rng, graph, rng.randint(2, 4), is_uniform=rng.random() < 0.5)
        schedule = LATENCY.schedule(graph, devices)
        check_schedule(schedule, graph, devices)
        ratios.append(schedule.estimate.latency_s / heft(graph, devices))
    assert statistics.mean(ratios) <= 1.0, (statistics.mean(ratios), max(ratios))


@pytest.mark.parametrize("seed", range(30))
def test_times_are_those_of_devices_and_links_that_do_one_thing_at_a_time(seed: int) -> None:
    rng = random.Random(seed)
    graph = made.layered(rng, rng.randint(20, 200), 8)
    devices = made.layered_devices(rng, graph, 3)
    schedule = LATENCY.schedule(graph, devices)
    assert schedule.estimate.latency_s == pytest.approx(simulated(Numbers(graph, devices), schedule))
    assert schedule.estimate.latency_s == max(span.end_s for span in schedule.spans.values())
    for device in devices:
        spans = sorted((schedule.spans[node].begin_s, schedule.spans[node].end_s)
                       for node in schedule.order if schedule.devices[node] == device.id)
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
    for link in {(transfer.source, transfer.target) for transfer in schedule.transfers}:
        spans = sorted((span.begin_s, span.end_s) for transfer, span in schedule.transfer_spans.items()
                       if (transfer.source, transfer.target) == link)
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))


def linked(count: int) -> list[DeviceInfo]:
    names = [f"d{index}" for index in range(count)]
    return [DeviceInfo(name, links={other: LinkProfile(2e-5, 1e10) for other in names if other != name})
            for name in names]


def test_a_model_of_541_nodes_takes_30_ms() -> None:
    graph, devices = made.layered(random.Random(1), 541, 12), linked(3)
    took_s = []
    for _ in range(10):
        began = time.process_time()
        LATENCY.schedule(graph, devices)
        took_s.append(time.process_time() - began)
    assert min(took_s) <= 0.03, took_s


def test_100_000_nodes_on_100_devices_take_20_s() -> None:
    graph, devices = made.layered(random.Random(1), 100_000, 200), linked(100)
    began = time.process_time()
    schedule = LATENCY.schedule(graph, devices)
    assert time.process_time() - began <= 20
    check_schedule(schedule, graph, devices)
    alone = LATENCY.schedule(graph, devices[:1])
    assert schedule.estimate.latency_s < alone.estimate.latency_s / 10

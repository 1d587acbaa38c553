"""How good the scheduler `latency` is: against the optimum, against HEFT, and by the clock."""

from __future__ import annotations

import itertools
import random
import statistics
import time

import pytest
from support.planning import graphs as made
from support.planning.peers import Numbers, heft, optimum, simulated

from djinn_plugins.graph.graph import RecordedGraph
from djinn_plugins.schedule.check import check_schedule
from djinn_plugins.schedule.latency.scheduler import LatencyScheduler
from djinn_plugins.schedule.schedule import DeviceInfo, LinkProfile

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
    for seed in range(100):
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


def test_scheduling_takes_time_by_nodes_and_edges_and_no_more() -> None:
    """The times that are promised are measured by `nox -s bench`; what grows faster than the graph is seen here."""
    took_s = []
    for count in (541, 5_410):
        graph, devices = made.layered(random.Random(1), count, 12), linked(3)
        graph.edges()
        taken = []
        for _ in range(3):
            began = time.process_time()
            LATENCY.schedule(graph, devices)
            taken.append(time.process_time() - began)
        took_s.append(min(taken))
    assert took_s[1] <= 25 * took_s[0], took_s


def test_a_wide_graph_is_spread_over_many_devices() -> None:
    graph, devices = made.layered(random.Random(1), 10_000, 200), linked(100)
    schedule = LATENCY.schedule(graph, devices)
    check_schedule(schedule, graph, devices)
    alone = LATENCY.schedule(graph, devices[:1])
    assert schedule.estimate.latency_s < alone.estimate.latency_s / 10

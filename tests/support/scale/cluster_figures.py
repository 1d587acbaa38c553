"""Clusters of 10, 100 and 1,000 servers, simulated: ``python -m support.scale.cluster_figures FOUND.jsonl``."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
from support.clients.tenants import percentile
from support.planning import graphs
from support.planning.cluster_sessions import Failure, Workload, simulate_sessions

from djinn_plugins.cluster.directory.choosing import ServerListing
from djinn_plugins.cluster.messages import LoadReport, Resolve
from djinn_plugins.schedule.latency.scheduler import LatencyScheduler
from djinn_plugins.schedule.schedule import DeviceInfo
from djinn_plugins.schedule.throughput.scheduler import ThroughputScheduler

SIZES = (10, 100, 1000)
LOADS = (0.5, 0.7, 0.9)
LENGTH_S, WARMING_S = 120.0, 40.0
FAILING_S = 60.0
"""When a tenth of the servers fails."""
UNNOTICED_S = 15.0
"""How long a client takes to notice that a machine does not answer; see ``KEEPALIVE`` of the transport."""
NODES, WIDTH = 541, 12
"""Of the graph that is placed: as large as one step of GPT-2."""
FAILURES = {
    "processes that are killed": Failure(FAILING_S, 0.1, back_s=5.0),
    "machines that vanish": Failure(FAILING_S, 0.1, back_s=1e9, unnoticed_s=UNNOTICED_S),
}


@attrs.frozen
class Queueing:
    """Waits of requests in a cluster; times are in seconds.

    Attributes:
        servers, load: Its size, and which part of its time requests need.
        requests: Requests that were answered.
        waits_s: p50, p90 and p99 of how long they waited.
        most: Largest number of sessions on a server over the mean.
        choosing_us: Mean processor time of the directory's choice, in microseconds.
    """

    servers: int
    load: float
    requests: int
    waits_s: Sequence[float]
    most: float
    choosing_us: float


@attrs.frozen
class Failing:
    """A tenth of the servers fails.

    Attributes:
        servers: How many there are.
        what: What happens to them.
        interrupted: Sessions that lost their server.
        interrupted_s: p50 and p99 of how long until another one had repeated their work.
        answered: Answers a second and server, over time.
        waits_s: p99 of the waits of requests, by second in which they were asked.
    """

    servers: int
    what: str
    interrupted: int
    interrupted_s: Sequence[float]
    answered: Sequence[tuple[float, float]]
    waits_s: Sequence[tuple[float, float]]


@attrs.frozen
class Placing:
    """Processor time of placing work, in seconds.

    Attributes:
        servers: How many there are.
        choosing_s: The directory's choice of a server for a session.
        schedulers_s: Each scheduler's schedule of one graph.
    """

    servers: int
    choosing_s: float
    schedulers_s: Mapping[str, float]


def queueing(servers: int, load: float, seed: int) -> Queueing:
    run = simulate_sessions(servers, Workload(load=load), LENGTH_S, seed=seed)
    waits = [answer.waited_s for answer in run.answers if answer.asked_s > WARMING_S]
    return Queueing(servers, load, len(waits), [percentile(waits, part) for part in (0.5, 0.9, 0.99)], run.most,
                    statistics.fmean(run.choosing_s) * 1e6)


def failing(servers: int, what: str, seed: int) -> Failing:
    run = simulate_sessions(servers, Workload(), LENGTH_S, failures=(FAILURES[what],), seed=seed)
    step_s = 10.0 if servers < 100 else 2.0
    answered, waits = Counter[int](), dict[int, list[float]]()
    for answer in run.answers:
        answered[int((answer.asked_s + answer.waited_s) / step_s)] += 1
        waits.setdefault(int(answer.asked_s / step_s), []).append(answer.waited_s)
    steps = range(int(WARMING_S / step_s / 2), int(LENGTH_S / step_s) - 3)
    return Failing(
        servers, what, len(run.interrupted_s), [percentile(list(run.interrupted_s), part) for part in (0.5, 0.99)],
        [(step * step_s, answered[step] / step_s / servers) for step in steps],
        [(step * step_s, percentile(waits[step], 0.99)) for step in steps if step in waits])


def placing(servers: int, seed: int) -> Placing:
    """Measure how long choices take, of a directory and of schedulers."""
    listing = ServerListing(time.monotonic)
    draw = random.Random(seed)
    models = tuple(f"model-{number}" for number in range(40))
    for number in range(servers):
        listing.report(listing.join(f"tcp://server-{number}:7070"), LoadReport(
            sessions=draw.randrange(20), held_bytes=draw.randrange(10**9), limit_bytes=10**9, models=models))
    rounds = 200
    began_s = time.process_time()
    for _ in range(rounds):
        listing.choose(Resolve("", models=(draw.choice(models),), memory_bytes=10**8))
    choosing_s = (time.process_time() - began_s) / rounds
    graph = graphs.layered(random.Random(1), NODES, WIDTH)
    graph.edges()
    devices = [DeviceInfo(f"d{number}") for number in range(servers)]
    took = {}
    for scheduler in (LatencyScheduler(), ThroughputScheduler()):
        began_s = time.process_time()
        scheduler.schedule(graph, devices)
        took[scheduler.name] = time.process_time() - began_s
    return Placing(servers, choosing_s, took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("found", type=Path, help="where to add what was found")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    queues, failed, placed = [], [], []
    for servers in SIZES:
        for load in LOADS:
            queues.append(queueing(servers, load, options.seed))
            print(queues[-1], flush=True)
        for what in FAILURES:
            failed.append(failing(servers, what, options.seed))
            print(failed[-1].servers, what, failed[-1].interrupted, failed[-1].interrupted_s, flush=True)
        placed.append(placing(servers, options.seed))
        print(placed[-1], flush=True)
    with options.found.open("a") as found:
        found.write(json.dumps({"cluster": {
            "seed": options.seed, "queueing": list(map(attrs.asdict, queues)),
            "failing": list(map(attrs.asdict, failed)), "placing": list(map(attrs.asdict, placed))}}) + "\n")


if __name__ == "__main__":
    main()

"""Many clients of one server, and many models of its store: ``python -m support.scale.many_clients FOUND.jsonl``.

Tenants with shares of one device, each with as many clients, want more than the device can do. What is counted: every
request, compared with eager PyTorch; each tenant's device time; the memory of all processes of the server; and the
processor time that the gateway needs for a connection.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import attrs
import torch
from support.clients.tenants import percentile
from support.processes.warm import clean_environment
from support.reports.performance import machine
from support.scale.crowd import Crowd, Event, Kind, Orders
from support.scale.stored_models import StoredModel, write_models
from support.servers.serving import PROGRAM, children_of

from djinn.errors import DjinnError
from djinn.kinds.transport import ConnectOptions
from djinn_plugins.server.tenant_limits import Limits
from djinn_plugins.server.tokens.tokens import TokenFile
from djinn_plugins.transport.tcp.client import connect
from djinn_plugins.watch.monitor.reading import read

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}
MEMORY_MIB = 256
"""Of all sessions of a tenant."""
SAMPLE_S = 2.0
SETTLING_S = 10.0
"""How long after most sessions are there the tenants' shares are measured from."""
BATCH = 50
"""Connections of which the mean time is taken."""
PATIENCE_S = 180.0
"""How long clients may take to end, when their time is over."""


@attrs.frozen
class Sample:
    """What the server's processes have and have done.

    Attributes:
        at_s: Seconds since the beginning.
        mib: Memory, where pages that several processes share are counted once.
        threads: Number of threads.
        sessions: Sessions.
        device_s: Device time by tenant.
    """

    at_s: float
    mib: float
    threads: int
    sessions: int
    device_s: Mapping[str, float]


class Server:
    """``djinn serve``, guarded and in its sandbox, with a store and tenants.

    Args:
        folder: Its models, tokens and log.
    """

    def __init__(self, folder: Path) -> None:
        tokens = TokenFile(folder / "tokens.json")
        self.tokens = {name: tokens.create(name, weight=weight) for name, weight in WEIGHTS.items()}
        self.full = tokens.create("full", limits=Limits(sessions=1))
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", PROGRAM, "serve", "--port", "0", "--device", "cpu", "--threads", "1",
                 "--device-turns", "1", "--models", str(folder / "models"), "--tokens", str(tokens.path),
                 "--memory-mib", str(MEMORY_MIB), "--metrics-port", "0", "--drain-s", "0"],
                env=clean_environment(OMP_NUM_THREADS="1"), stdout=subprocess.PIPE, stderr=log, text=True, cwd=folder)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip().removeprefix("djinn serving ")
        assert self.address, self.log.read_text()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def gateway_s(self) -> float:
        """Return the processor time of the gateway; see clock_getcpuclockid(3)."""
        return time.clock_gettime(~self.process.pid << 3 | 2)

    def processes(self) -> list[int]:
        """List the gateway, and all processes that it has started."""
        found = [self.process.pid]
        for process in found:
            found += children_of(process)
        return found

    def worker_of(self, tenant: str) -> int:
        """Return the latest worker of a tenant."""
        return int(re.findall(rf"{tenant}: worker (\d+) serves", self.log.read_text())[-1])

    def sample(self, began_s: float) -> Sample:
        """Look at it."""
        kib = threads = 0
        for process in self.processes():
            try:
                rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
                threads += len(list(Path(f"/proc/{process}/task").iterdir()))
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended
            kib += int(re.findall(r"(?m)^Pss:\s+(\d+)", rollup)[0])
        (url,) = set(re.findall(r"metrics on (http://[^/]+)/metrics", self.log.read_text()))
        tenants = read(url).tenants
        return Sample(time.monotonic() - began_s, kib / 1024, threads, sum(each.sessions for each in tenants.values()),
                      {name: tenants[name].device_s for name in WEIGHTS if name in tenants})


def run_crowd(server: Server, models: Sequence[StoredModel], options: argparse.Namespace
              ) -> tuple[list[Event], list[Sample], Crowd, float]:
    """Let clients work; return what has happened in them and in the server, and when it began."""
    events: list[Event] = []
    samples: list[Sample] = []
    names = list(WEIGHTS)
    with Crowd(options.seed) as crowd:
        crowd.prepare(Orders(0, server.address, server.tokens["a"], models, math.inf, options.pause_s, 0.0, server.log))
        began_s = time.monotonic()
        until_s = began_s + options.minutes * 60
        orders = [Orders(number, server.address, server.tokens[names[number % len(names)]], models, until_s,
                         options.pause_s, options.crashes, server.log.with_name("clients.log"))
                  for number in range(options.clients)]
        for each in orders:
            crowd.add(each)
        killed = not options.kill
        while crowd and time.monotonic() < until_s + PATIENCE_S:
            events += crowd.events(SAMPLE_S)
            crowd.replace()
            samples.append(server.sample(began_s))
            print(f"{samples[-1].at_s:5.0f} s {samples[-1].mib:7.0f} MiB {samples[-1].sessions:4} sessions "
                  f"{len(events)} events", flush=True)
            if not killed and time.monotonic() > (began_s + until_s) / 2:
                killed = True
                os.kill(server.worker_of("b"), signal.SIGKILL)
        crowd.failed += [f"{len(crowd)} clients did not end"] if crowd else []
    return events, samples, crowd, began_s


def shares(samples: Sequence[Sample]) -> tuple[dict[str, float], float]:
    """Return each tenant's part of the device time while all of them had work, and the part of the time it was used."""
    first, last = samples[0], samples[-1]
    used = {name: last.device_s.get(name, 0.0) - first.device_s.get(name, 0.0) for name in WEIGHTS}
    total_s = sum(used.values())
    return {name: used_s / total_s for name, used_s in used.items()}, total_s / (last.at_s - first.at_s)


def admission_costs(server: Server, count: int) -> dict[str, float]:
    """Return the gateway's processor time for a connection, in seconds: of clients that are admitted or refused.

    It is the median over batches, because other programs empty the processor's caches now and then.
    """
    def costs(token: str, expects: type[DjinnError] | None) -> float:
        found = []
        for _ in range(count // BATCH + 1):
            before_s = server.gateway_s()
            for _ in range(BATCH):
                _open(server.address, token, expects)
            found.append((server.gateway_s() - before_s) / BATCH)
        return statistics.median(found)

    found = {"admitted": costs(server.tokens["a"], None), "wrong token": costs("x" * 40, DjinnError)}
    held = connect(server.address, ConnectOptions(token=server.full))
    found["too many sessions"] = costs(server.full, DjinnError)
    held.close()
    return found


def _open(address: str, token: str, expects: type[DjinnError] | None) -> None:
    try:
        connect(address, ConnectOptions(token=token)).close()
        refused = False
    except DjinnError:
        refused = True
    assert refused == (expects is not None)


@attrs.frozen
class Outcome:
    """What a run has shown; times are in seconds.

    Attributes:
        date: When.
        machine: Where.
        clients, models, minutes: How much.
        models_mib: Size of all models.
        sessions: Sessions that began.
        answers: Requests that were answered, each as eager PyTorch would.
        wrong, lost, crashed: Requests with other answers and with errors, and clients that were killed.
        restarted: How often a worker was killed.
        shares: Each tenant's part of the device time.
        device_use: Part of the time in which the device was in use.
        weights: What it should be.
        answer_s, session_s: p50, p90 and p99 of requests, and of beginning a session.
        recovered_s: Of requests whose worker was killed: how many there were, their p50, and the longest.
        goodput: Right answers a second, over time.
        memory: MiB of the server's processes, over time.
        sessions_open: Sessions, over time.
        admission_ms: Processor time of the gateway for a connection.
        gateway_share: Part of a processor that the gateway used under load.
    """

    date: str
    machine: str
    clients: int
    models: int
    minutes: float
    models_mib: float
    sessions: int
    answers: int
    wrong: int
    lost: int
    crashed: int
    restarted: int
    shares: Mapping[str, float]
    device_use: float
    weights: Mapping[str, float]
    answer_s: Sequence[float]
    session_s: Sequence[float]
    recovered_s: Sequence[float]
    goodput: Sequence[tuple[float, float]]
    memory: Sequence[tuple[float, float]]
    sessions_open: Sequence[tuple[float, float]]
    admission_ms: Mapping[str, float]
    gateway_share: float


def told(options: argparse.Namespace, models: Sequence[StoredModel], events: Sequence[Event],
         samples: Sequence[Sample], crowd: Crowd, began_s: float) -> Outcome:
    """Sum up a run."""
    counts = Counter(event.kind for event in events)
    took = {kind: [event.took_s for event in events if event.kind is kind] or [0.0] for kind in Kind}
    length_s = options.minutes * 60
    step_s = max(1.0, length_s / 120)
    steps = Counter(int((event.at_s - began_s) / step_s) for event in events
                    if event.kind in (Kind.ANSWER, Kind.RECOVERED))
    first_s = next((each.at_s for each in samples if each.sessions > 0.9 * options.clients), 0.0)
    busy = [each for each in samples if first_s + SETTLING_S <= each.at_s <= length_s]
    return Outcome(
        datetime.datetime.now(datetime.UTC).date().isoformat(), machine(), options.clients, len(models),
        options.minutes, sum(model.size_bytes for model in models) / 2**20, counts[Kind.SESSION],
        counts[Kind.ANSWER] + counts[Kind.RECOVERED], counts[Kind.WRONG], counts[Kind.LOST] + len(crowd.failed),
        crowd.crashed, int(options.kill), *shares(busy),
        {name: weight / sum(WEIGHTS.values()) for name, weight in WEIGHTS.items()},
        [percentile(took[Kind.ANSWER], part) for part in (0.5, 0.9, 0.99)],
        [percentile(took[Kind.SESSION], part) for part in (0.5, 0.9, 0.99)],
        [counts[Kind.RECOVERED], *(percentile(took[Kind.RECOVERED], part) for part in (0.5, 1.0))],
        [(step * step_s, steps[step] / step_s) for step in range(int(length_s / step_s))],
        [(each.at_s, each.mib) for each in samples], [(each.at_s, each.sessions) for each in samples], {}, 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("found", type=Path, help="where to add what was found")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--pause-s", type=float, default=0.05)
    parser.add_argument("--crashes", type=float, default=0.02)
    parser.add_argument("--kill", action="store_true", help="kill the worker of a tenant at half time")
    parser.add_argument("--admissions", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        folder.joinpath("models").mkdir()
        models = write_models(folder / "models", options.models, options.seed)
        with Server(folder) as server:
            idle = admission_costs(server, options.admissions)
            before_s = server.gateway_s()
            events, samples, crowd, began_s = run_crowd(server, models, options)
            used = (server.gateway_s() - before_s) / (time.monotonic() - began_s)
            outcome = attrs.evolve(told(options, models, events, samples, crowd, began_s), gateway_share=used,
                                   admission_ms={how: seconds * 1e3 for how, seconds in idle.items()})
            complaints = folder / "clients.log"
            if complaints.exists():
                print(complaints.read_text()[-8000:])
            print(*crowd.failed, sep="\n")
    with options.found.open("a") as found:
        found.write(json.dumps({"clients": attrs.asdict(outcome)}) + "\n")
    sys.exit("\n".join(faults(outcome)) or None)


def faults(outcome: Outcome) -> list[str]:
    """Say what is not as it should be."""
    found = [f"{count} requests {what}" for what, count in (("with wrong answers", outcome.wrong),
                                                            ("lost", outcome.lost)) if count]
    found += [f"tenant {name} had {share:.1%} of the device, not {outcome.weights[name]:.1%}"
              for name, share in outcome.shares.items() if abs(share / outcome.weights[name] - 1) > 0.1]
    half = len(outcome.memory) // 2
    first, last = (statistics.fmean(mib for _, mib in part) for part in (
        outcome.memory[half // 2:half], outcome.memory[half:]))
    if last > 1.1 * first:
        found.append(f"memory grew from {first:.0f} to {last:.0f} MiB")
    found += [f"{how}: {ms:.2f} ms of the gateway" for how, ms in outcome.admission_ms.items() if ms >= 1]
    return found


if __name__ == "__main__":
    main()

"""What bad connections leave behind in a server: nothing."""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from support.network.frame_feeder import resident_bytes

from djinn.errors import RemoteTimeoutError
from djinn.ir.program import Program, Step, Template, TensorArgument
from djinn.ir.schema import facts_of
from djinn.kinds.transport import ConnectOptions
from djinn.wire import messages
from djinn.wire.messages import (
    Batch,
    Define,
    Run,
    TensorHeader,
    Upload,
)
from djinn.wire.tensors import header_of
from djinn_plugins.common.wire.frames import encode_head
from djinn_plugins.transport.tcp.client import connect

CORPUS = Path(__file__).parents[2] / "specs" / "wire" / "malformed.json"
MOST_GROWTH_BYTES = 16 * 2**20
POOL_THREADS = 2
KEPT = torch.arange(1000.0)
ADD = Program((Template("aten::add.Tensor", facts_of(torch.ops.aten.add.Tensor).digest,
                        (TensorArgument(), TensorArgument())),), (Step(0, (-1, -2), 1),), 2, (0,))
linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what a process holds")


def frame(message: Any, body: bytes = b"", *, sequence: int = 1) -> bytes:
    header = messages.encode(message)
    return encode_head(sequence, len(header), len(body)) + header + body


@attrs.frozen
class Footprint:
    """What a process holds."""

    resident_bytes: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, process: int) -> Footprint:
        """Measure, when the process has come to rest."""
        found, last = cls._now(process), None
        for _ in range(50):
            if found == last:
                return found
            time.sleep(0.2)
            found, last = cls._now(process), found
        return found

    @classmethod
    def _now(cls, process: int) -> Footprint:
        proc = Path("/proc") / str(process)
        return cls(resident_bytes(process), len(list((proc / "fd").iterdir())),
                   len(list((proc / "task").iterdir())))


def descriptors_of(process: int) -> set[int]:
    """Return the numbers of a process's descriptors, a moment later."""
    time.sleep(0.05)
    return {int(path.name) for path in Path(f"/proc/{process}/fd").iterdir()}


def misbehave(raw_client: Any, port: int, seed: int) -> None:
    """Connect and do one of many wrong things."""
    choice = random.Random(seed)
    kind = seed % 5
    with raw_client(port, greets=kind > 1) as client:
        if kind in {0, 2}:
            client.send(choice.randbytes(choice.randrange(200)))
            client.end()
        elif kind in {1, 3}:
            data = bytes.fromhex(choice.choice(json.loads(CORPUS.read_text())["cases"])["frame"])
            client.send(data)
            client.end()
        else:
            client.send(frame(Batch([Define(1, ADD), Run(1, (5, 6), [], (9,))], fetch=(9, 8, 7)), sequence=2))
            assert client.outcome() == "Result"
            whole = frame(Batch([Upload(1, TensorHeader("uint8", (2**20,), (1,)))]), bytes(2**20), sequence=3)
            client.send(whole[:choice.randrange(len(whole))])
        if kind < 4:
            assert client.outcome() in {"closed", "DJ303", "DJ304"}


@linux
@pytest.mark.timeout(280)
def test_thousands_of_bad_connections_leave_nothing_behind(start_server: Any, raw_client: Any) -> None:
    attacked = start_server("--isolate", "tenant", DJINN_LOG_LEVEL="ERROR")
    first = connect(attacked.address, ConnectOptions())
    first.request(Batch([Upload(1, header_of(KEPT))], synchronize=True), [KEPT])
    for seed in range(300):
        misbehave(raw_client, attacked.port, seed)
    (worker,) = attacked.workers
    before = [Footprint.of(process) for process in (attacked.process.pid, worker)]
    for seed in range(2000):
        misbehave(raw_client, attacked.port, seed)
    after = [Footprint.of(process) for process in (attacked.process.pid, worker)]
    assert torch.equal(first.request(Batch(fetch=(1,)), ())[1][0], KEPT)
    first.close()
    assert attacked.workers == [worker]
    for earlier, later in zip(before, after, strict=True):
        assert later.descriptors == earlier.descriptors
        # Threads of the event loop's pool end when they have been idle for some seconds.
        assert later.threads <= earlier.threads + POOL_THREADS
        assert later.resident_bytes < earlier.resident_bytes + MOST_GROWTH_BYTES


@linux
def test_a_server_without_file_descriptors_serves_on_and_recovers(start_server: Any) -> None:
    starved = start_server()
    first = connect(starved.address, ConnectOptions())
    first.request(Batch([Upload(1, header_of(KEPT))], synchronize=True), [KEPT])
    before = resource.prlimit(starved.process.pid, resource.RLIMIT_NOFILE)
    # None is free below this limit, whatever the server opens and closes meanwhile.
    standard = {0, 1, 2}
    assert standard <= descriptors_of(starved.process.pid)
    resource.prlimit(starved.process.pid, resource.RLIMIT_NOFILE, (len(standard), before[1]))
    with pytest.raises(RemoteTimeoutError, match=starved.address):
        connect(starved.address, ConnectOptions(connect_timeout_s=0.5))
    assert torch.equal(first.request(Batch(fetch=(1,)), ())[1][0], KEPT)
    resource.prlimit(starved.process.pid, resource.RLIMIT_NOFILE, before)
    connect(starved.address, ConnectOptions()).close()
    assert "no connection could be accepted" in starved.log.read_text()
    first.close()


@linux
def test_a_session_that_ends_gives_its_memory_back(start_server: Any) -> None:
    running = start_server()
    connect(running.address, ConnectOptions()).close()
    (worker,) = running.workers
    before = Footprint.of(worker)
    for _ in range(3):
        connection = connect(running.address, ConnectOptions())
        large, small = torch.zeros(2**25), [torch.zeros(2**10) for _ in range(10_000)]
        connection.request(Batch([Upload(1, header_of(large))], synchronize=True), [large])
        connection.request(Batch([Upload(2 + index, header_of(tensor)) for index, tensor in enumerate(small)],
                                 synchronize=True), small)
        assert Footprint.of(worker).resident_bytes > before.resident_bytes + 150 * 2**20
        connection.close()
        after = Footprint.of(worker)
    assert after.resident_bytes < before.resident_bytes + MOST_GROWTH_BYTES
    assert (after.descriptors, after.threads) == (before.descriptors, before.threads)



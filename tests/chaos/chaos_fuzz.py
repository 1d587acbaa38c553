"""What `nox -s chaos -- fuzz` does to a server: a million tampered frames, most of them at the rate of its code."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.network.frame_feeder import limit_memory
from support.network.frame_fuzzer import TYPED, attack, came_to_rest, feed, loud_lines
from support.network.frames import Frames, load, record, save, written
from support.servers.serving import Serving

from djinn.kinds.transport import ConnectOptions
from djinn.wire.messages import Batch, Upload
from djinn.wire.tensors import header_of
from djinn_plugins.transport.tcp.client import connect

FRAMES = int(os.environ.get("DJINN_CHAOS_FRAMES", "1000000"))
FRAMES_OVER_TCP = FRAMES // 25
SEED = int(os.environ.get("DJINN_CHAOS_SEED", "0"))
FRAMES_OF_SHAPES = FRAMES // 8
"""Fed to code that has no guard, and does everything but compute."""
MOST_GROWTH = 1.01
KEPT = torch.arange(1000.0)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    with Serving(folder / "log") as server:
        save([*record(server.port), written()], folder / "sessions")
    return folder / "sessions"


@pytest.fixture(scope="module")
def sessions(corpus: Path) -> list[Frames]:
    return load(corpus)


def test_a_servers_code_takes_whatever_comes(
    corpus: Path, tmp_path: Path, tell: Callable[[str, str], None],
) -> None:
    shares = {"cpu": FRAMES - FRAMES_OVER_TCP - FRAMES_OF_SHAPES, "meta": FRAMES_OF_SHAPES}
    with ThreadPoolExecutor(len(shares)) as pool:
        done = dict(zip(shares, pool.map(lambda device: feed(corpus, shares[device], SEED, tmp_path, device), shares),
                        strict=True))
    for device, fed in done.items():
        print(f"{device}: {fed.frames} frames, {fed.frames / fed.seconds:.0f} a second: {dict(fed.outcomes)}; "
              f"{[round(length / 2**20, 1) for length in fed.resident]} MiB; the slowest took {fed.slowest_s:.2f} s")
    assert [text for fed in done.values() for text in fed.unhandled] == []
    # Where operators run, kernels of PyTorch keep buffers for the largest that they were asked for.
    lengths = done["meta"].resident
    growth = lengths[-1] / lengths[len(lengths) // 2 - 1]
    assert growth < MOST_GROWTH
    frames, seconds = sum(fed.frames for fed in done.values()), max(fed.seconds for fed in done.values())
    tell(f"{frames:,} tampered frames of recorded sessions, fed to a server's code",
         f"0 crashes, 0 unhandled errors, in {seconds:.0f} s; memory at {growth:.4f} of what it was at half time")


def test_a_server_takes_whatever_comes(
    sessions: list[Frames], tmp_path: Path, tell: Callable[[str, str], None],
) -> None:
    with Serving(tmp_path / "log", "--isolate", "tenant", DJINN_LOG_LEVEL="WARNING") as server:
        (worker,) = server.workers
        limit_memory(worker, 2**31)
        bystander = connect(server.address, ConnectOptions())
        bystander.request(Batch([Upload(1, header_of(KEPT))], synchronize=True), [KEPT])
        outcomes = attack(server.port, sessions, FRAMES_OVER_TCP // 3, SEED)
        before = [came_to_rest(process) for process in (server.process.pid, worker)]
        began = time.monotonic()
        later = attack(server.port, sessions, FRAMES_OVER_TCP - outcomes["frames"], SEED + 1)
        took_s = time.monotonic() - began
        after = [came_to_rest(process) for process in (server.process.pid, worker)]
        outcomes.update(later)
        growth = [last / first for first, last in zip(before, after, strict=True)]
        assert torch.equal(bystander.request(Batch(fetch=(1,)), ())[1][0], KEPT)
        bystander.close()
        assert server.workers == [worker]
        assert loud_lines(server.log) == []
        assert set(outcomes) - {"frames", "closed", "reset"} <= TYPED
        assert max(growth) < MOST_GROWTH
        tell(f"{outcomes['frames']:,} tampered frames, sent over TCP at {later['frames'] / took_s:.0f} a second",
             "0 crashes, 0 unhandled errors, a session beside them unharmed; memory of gateway and worker at "
             f"{growth[0]:.4f} and {growth[1]:.4f} of what it was after a third of them")

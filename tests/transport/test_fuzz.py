"""Tampered frames of real sessions: nothing crashes, nothing is unforeseen, nothing is left behind.

A few thousand of them; ``nox -s chaos -- fuzz`` takes a million.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.network.frame_feeder import limit_memory
from support.network.frame_fuzzer import TYPED, attack, feed, loud_lines
from support.network.frames import Frames, Mutator, load, parts, record, save, written

from djinn.kinds.transport import ConnectOptions
from djinn.wire.messages import Batch, Upload
from djinn.wire.tensors import header_of
from djinn_plugins.transport.tcp.client import connect

pytest.importorskip("transformers")
linux = pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process can be limited on Linux")
KEPT = torch.arange(1000.0)


@pytest.fixture(scope="module")
def corpus(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "sessions"
    save([*record(server.port), written()], path)
    return path


@pytest.fixture(scope="module")
def sessions(corpus: Path) -> list[Frames]:
    return load(corpus)


def test_what_was_recorded_are_frames_of_all_kinds_of_commands(sessions: list[Frames]) -> None:
    said = b"".join(parts(frame)[1] for frames in sessions[:-1] for frame in frames)
    for command in (b"define", b"upload", b"run", b"delta", b"seed", b"free"):
        assert command in said


def test_tampering_is_repeatable_and_of_all_kinds(sessions: list[Frames]) -> None:
    one, same, other = (Mutator(sessions, seed) for seed in (1, 1, 2))
    first = [one.next() for _ in range(500)]
    assert [same.next() for _ in range(500)] == first
    assert [other.next() for _ in range(500)] != first
    kinds = {mutated.kind for mutated in first}
    assert kinds >= {"bits", "header-bits", "truncated", "extended", "head", "fields", "swapped", "spliced", "nested",
                     "huge", "plausible", "duplicated", "reordered", "foreign"}
    changed = [mutated for mutated in first if mutated.frames[0] != sessions[mutated.session][mutated.at]]
    assert len(changed) > 350


@linux
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_servers_code_takes_whatever_comes(corpus: Path, tmp_path: Path, device: str) -> None:
    fed = feed(corpus, 2000, 11, tmp_path, device)
    assert not fed.unhandled
    assert fed.frames >= 2000
    for outcome in ("done", "failed", "ProtocolError", "EOFError", "ProtocolVersionError"):
        assert outcome in fed.outcomes


@linux
def test_a_server_takes_whatever_comes(start_server: Any, sessions: list[Frames]) -> None:
    attacked = start_server("--isolate", "tenant", DJINN_LOG_LEVEL="INFO")
    (worker,) = attacked.workers
    limit_memory(worker, 2**31)
    bystander = connect(attacked.address, ConnectOptions())
    bystander.request(Batch([Upload(1, header_of(KEPT))], synchronize=True), [KEPT])
    outcomes = attack(attacked.port, sessions, 500, 3)
    assert set(outcomes) - {"frames", "closed", "reset"} <= TYPED
    assert outcomes["DJ303"] > 50
    assert torch.equal(bystander.request(Batch(fetch=(1,)), ())[1][0], KEPT)
    bystander.close()
    assert attacked.workers == [worker]
    assert loud_lines(attacked.log) == []

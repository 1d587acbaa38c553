"""One copy in memory: of equal uploads for the sessions of an owner, and of a stored model for all tenants."""

from __future__ import annotations

import hashlib
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.servers.connection_options import connect_options
from support.servers.serving import Serving
from support.servers.upload_sessions import DOUBLE, SUM, UploadSession, steady_bytes, template, used_bytes

import djinn
from djinn.ir.program import ConstantArgument, NumberArgument, Program, Step, TensorArgument, TorchArgument
from djinn.wire.messages import Batch, Define, Run, Upload
from djinn.wire.tensors import header_of
from djinn_plugins.common.operators.stored_models import stored_operators
from djinn_plugins.server.tokens.tokens import TokenFile
from djinn_plugins.transport.tcp.client import SocketConnection, connect

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads what processes use from /proc")
OWNER = "a secret of these tests"
CLIENTS = 8
PIECE = 2**19
"""Elements of 2 MiB: less than what the transport keeps memory for."""
PIECE_BYTES = 4 * PIECE
PIECES = 96
TOTAL_BYTES = PIECES * PIECE_BYTES
MOST_COPIES = 1.05
T, N = TensorArgument(), NumberArgument()


def told_held_bytes(address: str) -> int:
    connection = connect(address, connect_options(owner=OWNER))
    held_bytes = connection.welcome.held_bytes
    connection.close()
    return held_bytes


@pytest.mark.parametrize("has_files", [True, False], ids=["files in memory", "none"])
def test_eight_sessions_with_the_same_weights_cost_one_copy_and_what_they_write(
    has_files: bool, tmp_path: Path
) -> None:
    """Without files in memory, as on a GPU, kept uploads are one copy, and the values of all sessions another one."""
    prelude, least = ("", 1) if has_files else ("import os\ndel os.memfd_create\n", 2)
    weights = [torch.full((PIECE,), float(number)) for number in range(PIECES)]
    with ExitStack() as stack:
        server = stack.enter_context(
            Serving(tmp_path / "log", "--keep-mib", "256", "--sandbox", "auto", prelude=prelude))

        def opened() -> UploadSession:
            made = UploadSession(server.address, owner=OWNER)
            stack.callback(made.connection.close)
            return made

        # The first two know of nothing that is kept, and send everything.
        sessions = [opened(), opened()]
        empty = used_bytes(server)
        without_weights = [opened() for _ in range(CLIENTS - len(sessions))]
        before = used_bytes(server)
        for number in range(CLIENTS):
            sessions += [opened()] if number >= 2 else []
            for handle, weight in enumerate(weights, 1):
                sessions[number].upload(handle, weight)
        assert [session.connection.bytes_not_sent > 0 for session in sessions] == [False] * 2 + [True] * (CLIENTS - 2)
        for session in sessions:
            assert [session.sum_of(handle) for handle in range(1, PIECES + 1)] == [n * PIECE for n in range(PIECES)]
        own_bytes = before - empty  # of as many sessions as began since
        kept = steady_bytes(server)
        copies = (kept - before - own_bytes) / TOTAL_BYTES
        # Ordinary memory that was used before and is free may be used again, so it may grow by less.
        reused_bytes = own_bytes if has_files else 10 * PIECE_BYTES
        assert least - reused_bytes / TOTAL_BYTES <= copies <= least * MOST_COPIES
        assert own_bytes < 2**19 * len(without_weights)
        assert told_held_bytes(server.address) < 1000, "weights are counted where they are kept"

        for handle in (2, 3):
            sessions[0].double(handle)
        grown_bytes = used_bytes(server) - kept
        assert (0.9 * 2 * PIECE_BYTES if has_files else 0) <= grown_bytes <= 1.2 * 2 * PIECE_BYTES
        assert 0 <= told_held_bytes(server.address) - 2 * PIECE_BYTES < 1000
        for number, session in enumerate(sessions):
            factors = (2, 2) if number == 0 else (1, 1)
            for handle, factor in zip((2, 3), factors, strict=True):
                [found] = session.ask(fetch=(handle,))
                assert torch.equal(found, weights[handle - 1] * factor)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    weight = torch.full((PIECES * PIECE,), 0.5)
    save_file({"w": weight}, folder / "large.safetensors")
    save_file({"w": weight[:PIECE]}, folder / "small.safetensors")
    return folder


def loading(file: str) -> Program:
    """A program that loads a tensor, and adds its elements."""
    load = template(stored_operators().tensor, T, ConstantArgument(file), ConstantArgument("w"), N,
                    dtype=TorchArgument("dtype", "float32"))
    return Program((load, SUM), (Step(0, (-1,), 1), Step(1, (0,), 1)), 1, (0, 1))


def load(connection: SocketConnection, program: int, file: str, size: int) -> float:
    like, handle = torch.zeros(0), 10 * program
    result, data = connection.request(Batch(
        [Upload(handle, header_of(like)), Define(program, loading(file)),
         Run(program, (handle,), [[size]], (handle + 1, handle + 2))], fetch=(handle + 2,)), [like])
    assert not result.failures, result.failures
    return float(data[0])


@pytest.mark.parametrize("has_tokens", [True, False], ids=["tenants", "owners"])
def test_a_stored_model_is_in_memory_once_for_eight_tenants(
    has_tokens: bool, stored: Path, start_server: Any, tmp_path: Path
) -> None:
    tokens = TokenFile(tmp_path / "tokens.json")
    given = [tokens.create(f"tenant-{number}") if has_tokens else "" for number in range(CLIENTS)]
    with_tokens = ("--tokens", str(tokens.path)) if has_tokens else ()
    server = start_server("--models", str(stored), *with_tokens, "--sandbox", "auto", "--worker-idle-s", "0.1")
    djinn.init(server=server.address, token=given[0] or None)
    large, small = (model.digest for model in djinn.models.list())
    djinn.shutdown()
    with ExitStack() as stack:
        connections = []
        for number, token in enumerate(given):
            connections.append(connect(server.address, connect_options(token=token, owner=f"owner {number}")))
            stack.callback(connections[-1].close)
            assert load(connections[-1], 1, small, PIECE) == PIECE / 2
        until = time.monotonic() + 10
        while len(server.workers) > CLIENTS and time.monotonic() < until:
            time.sleep(0.1)  # that of the first session ends
        assert len(server.workers) == CLIENTS
        before = used_bytes(server)
        for connection in connections:
            assert load(connection, 2, large, PIECES * PIECE) == PIECES * PIECE / 2
        assert TOTAL_BYTES <= used_bytes(server) - before <= MOST_COPIES * TOTAL_BYTES


def test_stored_weights_count_against_the_limit_when_they_are_written(stored: Path, start_server: Any) -> None:
    server = start_server("--models", str(stored), "--memory-mib", str(TOTAL_BYTES * 4 // 3 // 2**20))
    digest = hashlib.sha256((stored / "large.safetensors").read_bytes()).hexdigest()
    with ExitStack() as stack:
        first, second, third = (connect(server.address, connect_options(owner=OWNER)) for _ in range(3))
        for connection in (first, second, third):
            stack.callback(connection.close)
            assert load(connection, 2, digest, PIECES * PIECE) == PIECES * PIECE / 2
        assert told_held_bytes(server.address) < 1000
        double = Batch([Define(3, DOUBLE), Run(3, (21,), [2.0], ())], synchronize=True)
        result, _ = first.request(double, ())
        assert not result.failures
        assert 0 <= told_held_bytes(server.address) - TOTAL_BYTES < 1000
        result, _ = second.request(double, ())
        assert [failure.kind for failure in result.failures] == ["OutOfMemoryError"], "there is no room for two"
        for connection, factor in ((first, 2), (second, 1), (third, 1)):
            result, [total] = connection.request(Batch(
                [Define(4, Program((SUM,), (Step(0, (-1,), 1),), 1, (0,))), Run(4, (21,), [], (99,))], fetch=(99,)), ())
            assert total == factor * PIECES * PIECE / 2

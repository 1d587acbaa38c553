"""Uploads of the tenants of a group are in memory once, across workers, and nobody sees what another one writes."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from support.servers.metrics import wait_for
from support.servers.upload_sessions import UploadSession, steady_bytes, template

from djinn.ir.program import NumberArgument, Program, Step, TensorArgument
from djinn.wire.messages import Define, Free, Run
from djinn_plugins.server.tokens.tokens import TokenFile
from djinn_plugins.watch.monitor.reading import Reading

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux")
TENANTS = 8
PIECE = 2**20 - 2**10
"""Elements of almost 4 MiB: less than what the transport keeps memory for."""
PIECES = 24
TOTAL_BYTES = 4 * PIECE * PIECES
MOST_COPIES = 1.05
T, N = TensorArgument(), NumberArgument()
WRITE_PART = Program((template(torch.ops.aten.slice.Tensor, T, N, N, N),
                      template(torch.ops.aten.add_.Scalar, T, N)), (Step(0, (-1,), 1), Step(1, (0,), 0)), 1, ())
"""Adds a number to a part of a value."""
SIZE = 2**18
"""Elements of the smallest upload that workers share."""


def kept(reading: Reading) -> list[int]:
    """Return the bytes of kept uploads that each tenant is charged."""
    return [tenant.kept_bytes for name, tenant in reading.tenants.items() if name]


def files(server: Any) -> list[set[str]]:
    """Return the shared uploads that each worker has mapped, by their numbers in the system."""
    try:
        texts = [Path(f"/proc/{worker}/maps").read_text() for worker in server.workers]
    except PermissionError:
        pytest.skip("only root can read what a worker in its sandbox maps")
    return [{line.split()[4] for line in text.splitlines() if "/memfd:djinn-shared" in line} for text in texts]


def upload_to_all(server: Any, sessions: Sequence[UploadSession], weights: Sequence[torch.Tensor], before: int) -> int:
    """Upload the same weights in each session; they cost one copy. Returns what the workers use then."""
    for session in sessions:
        for handle, weight in enumerate(weights, 1):
            session.upload(handle, weight)
        assert [session.sum_of(handle) for handle in range(1, PIECES + 1)] == [n * PIECE for n in range(PIECES)]
    assert all(session.connection.bytes_not_sent == 0 for session in sessions), "each has sent what it shares"
    used = steady_bytes(server)
    assert TOTAL_BYTES <= used - before <= MOST_COPIES * TOTAL_BYTES, (used - before) / TOTAL_BYTES
    return used


def only_the_first_is_doubled(sessions: Sequence[UploadSession], weight: torch.Tensor) -> None:
    for session, factor in zip(sessions, (2, *[1] * (TENANTS - 1)), strict=True):
        [value] = session.ask(fetch=(2,))
        assert torch.equal(value, weight * factor)


def test_uploads_of_eight_tenants_of_a_group_cost_one_copy_and_what_they_write(
        start_server: Any, tmp_path: Path) -> None:
    tokens = TokenFile(tmp_path / "tokens.json")
    given = [tokens.create(f"tenant-{number}", share="lab") for number in range(TENANTS)]
    server = start_server("--keep-mib", "256", "--tokens", str(tokens.path), "--sandbox", "auto", "--metrics-port", "0")
    weights = [torch.full((PIECE,), float(number)) for number in range(PIECES)]
    with ExitStack() as stack:
        sessions = [UploadSession(server.address, token=token, owner=f"own secret of {token}") for token in given]
        for session in sessions:
            stack.callback(session.connection.close)
            # What a worker needs once for uploads is no part of them.
            session.upload(PIECES + 1, torch.full((PIECE,), -1.0))
            assert session.sum_of(PIECES + 1) == -PIECE
        assert len(server.workers) == TENANTS
        before = steady_bytes(server)
        used = upload_to_all(server, sessions, weights, before)
        # Each is charged its part.
        wait_for(server, lambda now: kept(now) == [4 * PIECE // TENANTS * (PIECES + 1)] * TENANTS)

        sessions[0].double(2)
        assert 0.9 * 4 * PIECE <= steady_bytes(server) - used <= 1.2 * 4 * PIECE
        only_the_first_is_doubled(sessions, weights[1])

        # The part of a tenant that ends is charged to the others.
        tokens.revoke("tenant-0")
        parts = [0, *[4 * PIECE // (TENANTS - 1) * (PIECES + 1)] * (TENANTS - 1)]
        wait_for(server, lambda now: sorted(kept(now)) == parts)


def test_uploads_of_eight_owners_cost_one_copy(start_server: Any) -> None:
    server = start_server("--keep-mib", "256", "--sandbox", "auto")
    weights = [torch.full((PIECE,), float(number)) for number in range(PIECES)]
    with ExitStack() as stack:
        sessions = [UploadSession(server.address, owner=f"secret {number}") for number in range(TENANTS)]
        for session in sessions:
            stack.callback(session.connection.close)
            session.upload(PIECES + 1, torch.full((PIECE,), -1.0))
            assert session.sum_of(PIECES + 1) == -PIECE
        assert len(server.workers) == TENANTS
        before = steady_bytes(server)
        upload_to_all(server, sessions, weights, before)
        sessions[0].double(2)
        only_the_first_is_doubled(sessions, weights[1])


def test_tenants_that_share_no_group_share_no_memory(start_server: Any, tmp_path: Path) -> None:
    tokens = TokenFile(tmp_path / "tokens.json")
    given = [tokens.create(name, share=group) for name, group in (
        ("a", "lab"), ("b", "lab"), ("of-another-group", "office"), ("of-none", ""))]
    server = start_server("--tokens", str(tokens.path))
    with ExitStack() as stack:
        for token in given:
            session = UploadSession(server.address, token=token, owner="the same secret")
            stack.callback(session.connection.close)
            session.upload(1, torch.full((SIZE,), 0.5))
            assert session.sum_of(1) == SIZE / 2
        found = files(server)
        # The workers of one tenant share, too.
        assert list(map(len, found)) == [1, 1, 1, 1]
        assert sorted(Counter(chain(*found)).values()) == [1, 1, 2]


@pytest.fixture(scope="module")
def lab(start_server_of_module: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[UploadSession]]:
    tokens = TokenFile(tmp_path_factory.mktemp("tokens") / "tokens.json")
    given = [tokens.create(name, share="lab") for name in "ab"]
    server = start_server_of_module("--keep-mib", "32", "--tokens", str(tokens.path))
    sessions = [UploadSession(server.address, token=token, owner=token) for token in given]
    for session in sessions:
        session.ask(Define(3, WRITE_PART))
    yield sessions
    for session in sessions:
        session.connection.close()


def contents() -> list[torch.Tensor]:
    """Return uploads; the marks of the first two are equal."""
    ones = torch.ones(SIZE)
    almost = ones.clone()
    almost[SIZE // 2 + 100] = 2
    return [ones, almost, torch.arange(SIZE, dtype=torch.float32)]


HANDLES = st.integers(1, 3)
STEPS = st.one_of(
    st.tuples(st.just("upload"), HANDLES, st.integers(0, 2)),
    st.tuples(st.just("double"), HANDLES),
    st.tuples(st.just("write"), HANDLES, st.integers(0, SIZE - 1), st.integers(1, 2000)),
    st.tuples(st.just("free"), HANDLES),
    st.tuples(st.just("fetch"), HANDLES))


@hypothesis.given(st.lists(st.tuples(st.integers(0, 1), STEPS), max_size=25))
def test_no_tenant_sees_what_another_one_writes(lab: list[UploadSession], steps: list[tuple[int, Any]]) -> None:
    uploads = contents()
    expected: list[dict[int, torch.Tensor]] = [{}, {}]
    for tenant, (what, handle, *details) in steps:
        session, values = lab[tenant], expected[tenant]
        if what == "upload":
            session.upload(handle, uploads[details[0]].clone())
            values[handle] = uploads[details[0]].clone()
        elif handle not in values:
            continue
        elif what == "double":
            session.double(handle)
            values[handle] *= 2
        elif what == "write":
            begin, length = details
            session.ask(Run(3, (handle,), [0, begin, begin + length, 1.0], ()))
            values[handle][begin:begin + length] += 1
        elif what == "free":
            session.ask(Free((handle,)))
            del values[handle]
        else:
            [found] = session.ask(fetch=(handle,))
            assert torch.equal(found, values[handle])
    for session, values in zip(lab, expected, strict=True):
        for handle, value in values.items():
            [found] = session.ask(fetch=(handle,))
            assert torch.equal(found, value), handle
        session.ask(Free(tuple(values)))

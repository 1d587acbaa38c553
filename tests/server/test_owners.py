"""Sessions of different owners run in different workers of their tenant, which share its limits and its turns."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes.warm import clean_environment
from support.servers.connection_options import connect_options
from support.servers.serving import PROGRAM, workers_of
from support.servers.upload_sessions import UploadSession

from djinn.errors import DjinnError, LimitError, RefusedError, TransportError
from djinn_plugins.server.tenant_limits import Limits
from djinn_plugins.server.tokens.tokens import TokenFile
from djinn_plugins.transport.tcp.client import Wish, open_tcp, reach

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it looks for processes in /proc")
MOST_PRIVATE_BYTES = 40 * 10**6
"""Of a worker before it computes."""


_open: list[UploadSession] = []


@pytest.fixture(autouse=True)
def nothing_is_left_open() -> Iterator[None]:
    yield
    while _open:
        _open.pop().connection.close()


def opened(server: Any, owner: str, **options: Any) -> UploadSession:
    _open.append(UploadSession(server.address, owner=owner, **options))
    return _open[-1]


def wait_until(holds: Callable[[], object], timeout_s: float = 10) -> None:
    until = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.05)


def computes(session: UploadSession) -> bool:
    session.upload(5, torch.ones(8))
    return session.sum_of(5) == 8


def refused(server: Any, owner: str, **options: Any) -> DjinnError:
    with pytest.raises(DjinnError) as caught:
        opened(server, owner, **options)
    return caught.value


@pytest.mark.parametrize("has_tokens", [False, True], ids=["without tokens", "with tokens"])
def test_each_owner_has_a_worker_and_the_death_of_one_harms_no_other(
        start_server: Any, tmp_path: Path, has_tokens: bool) -> None:
    tokens = TokenFile(tmp_path / "tokens.json")
    token = tokens.create("lab") if has_tokens else ""
    server = start_server(*(["--tokens", str(tokens.path)] if has_tokens else []), "--sandbox", "auto")
    first = opened(server, "first", token=token)
    [one] = server.workers
    second, again = opened(server, "second", token=token), opened(server, "first", token=token)
    [other] = set(server.workers) - {one}
    os.kill(one, signal.SIGKILL)
    for ended in (first, again):
        with pytest.raises(TransportError):
            ended.ask(fetch=(1,))
    assert computes(second)
    assert second.connection.reconnections == 0
    wait_until(lambda: len(server.workers) == 2)
    assert other in server.workers
    assert one not in server.workers
    anew = opened(server, "first", token=token)
    assert computes(anew)
    assert computes(second)
    told = server.log.read_text()
    assert "sessions of different owners run in different processes, at most 100 at a time" in told


def test_who_shares_a_worker_is_a_setting(start_server: Any) -> None:
    for isolate, count in (("tenant", 1), ("session", 3)):
        server = start_server("--isolate", isolate)
        sessions = [opened(server, owner) for owner in ("a", "a", "b")]
        assert len(server.workers) == count, isolate
        assert all(map(computes, sessions))
        workers = server.workers
        for session in sessions:
            session.connection.close()
        if isolate == "session":
            assert "all sessions run in different processes" in server.log.read_text()
            wait_until(lambda: not set(workers) & set(server.workers))  # noqa: B023  # called at once
        else:
            assert "the sessions of all clients share a process" in server.log.read_text()


def test_clients_that_name_no_owner_share_with_nobody(start_server: Any) -> None:
    server = start_server()
    sessions = [opened(server, "") for _ in range(2)]
    assert len(server.workers) == 2
    assert all(map(computes, sessions))


def test_a_client_comes_back_to_its_worker(start_server: Any) -> None:
    server = start_server()
    # Without what continues a session over another connection.
    first, second = (reach(server.address, open_tcp, connect_options(owner=owner), Wish(True)) for owner in "ab")
    assert len(server.workers) == 2
    for lost, other in ((first, "second"), (second, "anybody")):
        lost._frames.stream.close()
        again = reach(server.address, open_tcp, connect_options(owner=other), Wish(True, lost.welcome.resume, 1))
        assert again.welcome.resume == lost.welcome.resume
        again.close()
    with pytest.raises(RefusedError, match="no such session"):
        reach(server.address, open_tcp, connect_options(owner="first"), Wish(True, bytes(16), 1))


def test_workers_are_bounded_and_idle_ones_make_room_or_end(start_server: Any) -> None:
    server = start_server("--max-workers", "2")
    first, second = opened(server, "first"), opened(server, "second")
    workers = set(server.workers)
    why = refused(server, "third")
    assert "DJ312" in str(why)
    assert "--max-workers" in str(why)
    assert computes(opened(server, "first")), "who has a worker needs no other"
    second.connection.close()

    def third() -> UploadSession | None:
        try:
            return opened(server, "third")
        except RefusedError:
            return None

    wait_until(lambda: (made := third()) is not None and computes(made))
    wait_until(lambda: len(workers & set(server.workers)) == 1)
    assert computes(first), "a worker with sessions stays"


def test_an_idle_worker_ends_and_one_whose_client_may_come_back_does_not(start_server: Any) -> None:
    server = start_server("--worker-idle-s", "0.5", "--lease-s", "3")
    session = opened(server, "leaves")
    lost = reach(server.address, open_tcp, connect_options(owner="is lost"), Wish(True))
    stays = opened(server, "stays")
    workers = server.workers
    assert len(workers) == 3
    session.connection.close()
    lost._frames.stream.close()
    wait_until(lambda: workers[0] not in server.workers)
    assert set(workers[1:]) <= set(server.workers)
    reach(server.address, open_tcp, connect_options(), Wish(True, lost.welcome.resume, 1)).close()
    wait_until(lambda: workers[1] not in server.workers)
    assert computes(stays)
    told = server.log.read_text()
    assert f"worker {workers[0]} is idle: ended" in told
    assert "another worker starts" not in told


def test_limits_of_a_tenant_hold_for_all_its_workers(start_server: Any, tmp_path: Path) -> None:
    tokens = TokenFile(tmp_path / "tokens.json")
    token = tokens.create("small", limits=Limits(sessions=2, handles=16))
    server = start_server("--tokens", str(tokens.path))
    first, second = opened(server, "first", token=token), opened(server, "second", token=token)
    assert len(server.workers) == 2
    assert "There are 2 sessions already; the limit is 2." in str(refused(server, "third", token=token))
    for handle in range(2, 13):
        first.upload(handle, torch.ones(2))
    assert first.sum_of(3) == 2, "it has 13 values"
    assert second.sum_of(1) == 0, "it has 2"
    second.upload(2, torch.ones(2))
    second.upload(3, torch.ones(2))
    with pytest.raises((LimitError, AssertionError), match="the limit for all sessions is 16"):
        second.sum_of(3)
    first.connection.close()

    def is_admitted() -> bool:
        # The server learns of the end after the client.
        with suppress(RefusedError):
            return opened(server, "third", token=token) is not None
        return False

    wait_until(is_admitted)


def test_a_worker_costs_little_before_it_computes(tmp_path: Path) -> None:
    """In a process that has imported nothing before, as a user starts it: what it forks shares its memory."""
    with (tmp_path / "log").open("w") as log, subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "serve", "--device", "cpu", "--drain-s", "0"], stdout=subprocess.PIPE,
            stderr=log, text=True, env=clean_environment()) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip().removeprefix("djinn serving ")
            _open.extend(UploadSession(address, owner=owner) for owner in "ab")
            workers = workers_of(process.pid)
            assert len(workers) == 2
            texts = [Path(f"/proc/{worker}/smaps_rollup").read_text() for worker in workers]
        except PermissionError:
            pytest.skip("only root can read what a worker in its sandbox uses")
        finally:
            process.terminate()
    for text in texts:
        private = [int(line.split()[1]) for line in text.splitlines() if line.startswith("Private_")]
        assert sum(private) * 1024 < MOST_PRIVATE_BYTES

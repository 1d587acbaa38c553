"""The gateway and its workers: who is let in, what tenants can do to each other, what is left when somebody dies."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.servers.serving import Serving, children_of, has_ended

from djinn.errors import RefusedError, TransportError
from djinn.ir.program import Program, Step, Template, TensorArgument
from djinn.ir.schema import facts_of
from djinn.kinds.transport import ConnectOptions
from djinn.wire.messages import Batch, Define, Peer, Poisoned, Receive, Run, Send, Upload
from djinn.wire.tensors import header_of
from djinn_plugins.server.pending_handshakes import MAX_WAITING
from djinn_plugins.server.tenant_limits import Limits
from djinn_plugins.server.tokens.tokens import TokenFile
from djinn_plugins.transport.tcp.client import SocketConnection, connect

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells which processes there are")
ONES = torch.ones(4)
NEGATE = Program((Template("aten::neg", facts_of(torch.ops.aten.neg.default).digest, (TensorArgument(),)),),
                 (Step(0, (-1,), 1),), 1, (0,))


def wait_until(true: Callable[[], Any], patience_s: float = 10) -> float:
    """Wait for something, and return how long it took."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < patience_s
        time.sleep(0.01)
    return time.monotonic() - began


@pytest.fixture
def tokens(tmp_path: Path) -> TokenFile:
    return TokenFile(tmp_path / "state" / "tokens.json")


@pytest.fixture
def start(start_server: Any, tokens: TokenFile) -> Callable[..., Any]:
    """Starts a server for those who have a token in the file."""
    return lambda *arguments: start_server("--tokens", str(tokens.path), *arguments)


def session(server: Any, token: str = "") -> SocketConnection:
    return connect(server.address, ConnectOptions(token=token, connect_timeout_s=60))


def computes(connection: SocketConnection) -> bool:
    """Whether a session can carry out a program."""
    result, data = connection.request(Batch(
        [Upload(1, header_of(ONES)), Define(1, NEGATE), Run(1, (1,), [], (2,))], fetch=(2,)), [ONES])
    return not result.failures and torch.equal(data[0], -ONES)


def worker_of(server: Any, act: Callable[[], SocketConnection]) -> tuple[SocketConnection, int]:
    """Open a session that needs a new worker, and return both."""
    before = set(server.workers)
    opened = act()
    (worker,) = set(server.workers) - before
    return opened, worker


def test_each_tenant_has_a_worker_and_whoever_kills_his_harms_nobody_else(
    start: Callable[..., Any], tokens: TokenFile,
) -> None:
    alice, bob = tokens.create("alice"), tokens.create("bob")
    server = start()
    assert server.workers == []
    of_alice, first = worker_of(server, lambda: session(server, alice))
    of_bob, second = worker_of(server, lambda: session(server, bob))
    again = session(server, alice)
    assert sorted(server.workers) == sorted([first, second])
    assert all(map(computes, (of_alice, of_bob, again)))
    os.kill(first, signal.SIGKILL)
    began = time.monotonic()
    for connection in (of_alice, again):
        with pytest.raises(TransportError, match=server.address):
            connection.request(Batch(synchronize=True), ())
    assert time.monotonic() - began < 3
    assert wait_until(lambda: "SIGKILL" in server.log.read_text(), 3) < 3
    assert computes(of_bob)
    anew = session(server, alice)
    assert computes(anew)
    assert first not in server.workers
    assert len(server.workers) == 2
    assert computes(of_bob)
    for connection in (of_bob, anew):
        connection.close()


def test_a_worker_that_keeps_dying_is_started_less_and_less_often(start_server: Any) -> None:
    server = start_server("--isolate", "tenant")
    connection = session(server)
    for number in (signal.SIGSEGV, signal.SIGKILL, signal.SIGKILL):
        wait_until(lambda: server.workers, 60)
        dying = server.workers[0]
        os.kill(dying, number)
        wait_until(lambda: dying not in server.workers)  # noqa: B023  # called at once
    with pytest.raises(TransportError, match=server.address):
        connection.request(Batch(synchronize=True), ())
    wait_until(lambda: "another worker starts in 0.8 s" in server.log.read_text(), 30)
    delays = [line.split()[-2] for line in server.log.read_text().splitlines() if "another worker starts" in line]
    assert delays == ["0.2", "0.4", "0.8"]
    assert "SIGSEGV" in server.log.read_text()
    assert server.process.poll() is None
    last = session(server)
    assert computes(last)
    last.close()


def test_no_orphans_after_sigterm(start: Callable[..., Any], tokens: TokenFile) -> None:
    made = [tokens.create(name) for name in ("a", "b")]
    server = start()
    connections = [session(server, token) for token in made]
    workers = server.workers
    assert len(workers) == 2
    assert server.stop() == 0
    assert all(map(has_ended, workers))
    for connection in connections:
        with pytest.raises(TransportError):
            connection.request(Batch(synchronize=True), ())


def test_a_worker_knows_no_secrets_of_the_gateway_and_ends_when_that_is_killed(start_server: Any) -> None:
    server = start_server(DJINN_TOKEN="very secret", DJINN_OWNER="mine too", STARTS_FORKSERVER="1")
    (forkserver,) = children_of(server.process.pid)
    assert b"djinn_plugins.server.forkserver" in Path(f"/proc/{forkserver}/cmdline").read_bytes()
    connection = session(server, "very secret")
    workers = server.workers
    for worker in workers:
        environment = Path(f"/proc/{worker}/environ").read_bytes()
        assert b"very secret" not in environment
        assert b"mine too" not in environment
        assert b"very secret" not in Path(f"/proc/{worker}/cmdline").read_bytes()
    server.process.kill()
    server.process.wait(10)
    assert wait_until(lambda: all(map(has_ended, workers))) < 5
    with pytest.raises(TransportError):
        connection.request(Batch(synchronize=True), ())


def test_workers_are_forked_and_go_on_without_whoever_forked_them(start_server: Any) -> None:
    server = start_server()
    (forkserver,) = children_of(server.process.pid)
    (first,) = server.workers
    assert first != forkserver
    os.kill(first, signal.SIGKILL)
    assert wait_until(lambda: server.workers not in ([], [first]), 10) < 5
    (second,) = server.workers
    assert children_of(forkserver) == [second]
    connection = session(server)
    os.kill(forkserver, signal.SIGKILL)
    wait_until(lambda: has_ended(forkserver))
    assert computes(connection)
    os.kill(second, signal.SIGKILL)
    wait_until(lambda: server.log.read_text().count("serves") == 3, 60)
    connection.close()
    connection = session(server)
    assert computes(connection)
    connection.close()
    assert server.stop() == 0
    assert "workers begin more slowly from now on" in server.log.read_text()


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[Serving]:
    """A server that waits a second for its forkserver."""
    prelude = "import djinn_plugins.server.spawning; djinn_plugins.server.spawning.SPAWN_TIMEOUT_S = 1.0\n"
    with Serving(tmp_path / "log", "--isolate", "tenant", prelude=prelude) as running:
        yield running


def test_a_forkserver_may_import_for_longer_than_it_may_take_to_fork(tmp_path: Path, tokens: TokenFile) -> None:
    # On a busy machine, its imports took more than 30 s. Then the gateway started a worker that imported the same, and
    # refused clients.
    prelude = (
        "import djinn_plugins.server.starting; djinn_plugins.server.starting.PATIENCE_S = 0.3\n"
        "import djinn_plugins.server.spawning, djinn_plugins.server.opening as opening, time\n"
        "djinn_plugins.server.spawning.SPAWN_TIMEOUT_S, prepare = 3.0, opening.prepare\n"
        "opening.prepare = lambda plugins: (time.sleep(4), prepare(plugins))\n")
    token = tokens.create("a")
    with Serving(tmp_path / "log", "--tokens", str(tokens.path), prelude=prelude) as server:
        (forkserver,) = children_of(server.process.pid)
        connection = session(server, token)
        assert computes(connection)
        connection.close()
        assert children_of(server.process.pid) == [forkserver]
        assert children_of(forkserver) == [serving_now(server)]
    assert "more slowly" not in server.log.read_text()


def name_of(process: int) -> str:
    return Path(f"/proc/{process}/comm").read_text().strip()


def serving_now(server: Serving) -> int:
    """The worker that the log speaks of last."""
    return int(re.findall(r"worker (\d+) serves", server.log.read_text())[-1])


def test_a_forkserver_that_answers_too_late_shares_no_worker_and_no_client_is_lost(impatient: Serving) -> None:
    server, gateway = impatient, impatient.process.pid
    wait_until(lambda: name_of(children_of(gateway)[0]) == "djinn-forksrv")
    (forkserver,) = children_of(gateway)
    (first,) = server.workers
    os.kill(forkserver, signal.SIGSTOP)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: "another worker starts" in server.log.read_text())
    sessions: list[SocketConnection] = []
    threads = [threading.Thread(target=lambda: sessions.append(session(server))) for _ in range(8)]
    for thread in threads:
        thread.start()
    # The forkserver answers between the start of the worker that is not its own, and the clients that this one gets.
    wait_until(lambda: len(children_of(gateway)) == 2, 60)
    os.kill(forkserver, signal.SIGCONT)
    for thread in threads:
        thread.join(120)
    assert len(sessions) == 8
    assert all(map(computes, sessions))
    (started,) = set(children_of(gateway)) - {forkserver}
    wait_until(lambda: not children_of(forkserver))
    assert serving_now(server) == started

    # The next ones are forked again, and each process is the one that it is taken for.
    for _ in range(2):
        gone = serving_now(server)
        os.kill(gone, signal.SIGKILL)
        wait_until(lambda: serving_now(server) != gone, 60)  # noqa: B023  # called at once
        assert children_of(gateway) == [forkserver]
        assert children_of(forkserver) == [serving_now(server)]
    last = session(server)
    assert computes(last)
    processes = [forkserver, serving_now(server)]
    server.process.terminate()
    assert server.process.wait(20) == 0
    wait_until(lambda: all(map(has_ended, processes)))
    log = server.log.read_text()
    assert "does not end" not in log
    assert "vanished" not in log


def test_a_stopped_worker_is_ended_all_the_same(start_server: Any) -> None:
    server = start_server()
    (worker,) = server.workers
    os.kill(worker, signal.SIGSTOP)
    assert server.stop() == 0
    assert has_ended(worker)
    assert "killed" in server.log.read_text()


def test_a_revoked_token_ends_its_sessions_and_a_spoilt_file_none(
    start: Callable[..., Any], tokens: TokenFile,
) -> None:
    alice, bob = tokens.create("alice"), tokens.create("bob")
    server = start()
    of_alice, of_bob = session(server, alice), session(server, bob)
    assert computes(of_alice)
    tokens.revoke("alice")
    with pytest.raises(RefusedError, match="The token is wrong"):
        session(server, alice)
    of_alice._frames.stream.stall_timeout_s = 10
    began = time.monotonic()

    def ends() -> bool:
        try:
            of_alice.request(Batch(synchronize=True), ())
        except TransportError:
            return True
        return False

    wait_until(ends)
    assert time.monotonic() - began < 5
    assert computes(of_bob)
    for token, said in (("", "missing"), ("x", "wrong"), (alice[:-1], "wrong")):
        with pytest.raises(RefusedError, match=f"The token is {said}"):
            session(server, token)
    wait_until(lambda: len(server.workers) == 1)
    carol = session(server, tokens.create("carol"))
    assert computes(carol)
    tokens.path.write_text("{")
    wait_until(lambda: "the tokens stay as they were" in server.log.read_text())
    assert computes(of_bob)
    with pytest.raises(RefusedError):
        session(server, "x")
    for connection in (of_bob, carol):
        connection.close()
    log = server.log.read_text()
    assert alice not in log
    assert bob not in log


def test_limits_are_each_tenants_own_and_name_the_amounts(start: Callable[..., Any], tokens: TokenFile) -> None:
    small = tokens.create("small", limits=Limits(sessions=2, inflight_bytes=2**20, handles=10, nodes=3))
    large = tokens.create("large")
    server = start("--max-nodes", "5")
    first, second = session(server, small), session(server, small)
    with pytest.raises(RefusedError, match=r"\[DJ312\] There are 2 sessions already; the limit is 2"):
        session(server, small)
    second.close()
    wait_until(lambda: "values dropped" in server.log.read_text())
    second = session(server, small)

    long = Program(NEGATE.templates, tuple(Step(0, (-1 if n == 0 else n - 1,), 1) for n in range(4)), 1, (3,))
    result, _ = first.request(Batch([Upload(1, header_of(ONES)), Define(5, long), Run(5, (1,), [], (2,))], fetch=(2,)),
                              [ONES])
    assert [(failure.kind, failure.message) for failure in result.failures] == [
        ("LimitError", result.failures[0].message)]
    assert "4 steps; the limit is 3" in result.failures[0].message
    assert computes(first)

    uploads = [Upload(handle, header_of(ONES)) for handle in range(1, 13)]
    result, data = second.request(Batch(uploads, fetch=(1, 12)), [ONES] * 12)
    kept = data[0]
    assert torch.equal(kept, ONES)
    assert isinstance(result.items[1], Poisoned)
    assert {failure.kind for failure in result.failures} == {"LimitError"}
    assert "the limit for all sessions is 10" in result.failures[0].message
    assert result.items[1].failure in {failure.identity for failure in result.failures}

    big = torch.zeros(2**20 // 4 + 1)
    with pytest.raises(RefusedError, match=rf"\[DJ312\] A message brings {-(-big.nbytes // 64) * 64} bytes; the limit "
                                           "is 1048576"):
        second.request(Batch([Upload(1, header_of(big))], synchronize=True), [big])

    free = session(server, large)
    result, data = free.request(Batch([Upload(n, header_of(big)) for n in range(1, 20)], fetch=(19,)), [big] * 19)
    assert not result.failures
    result, _ = free.request(Batch([Define(5, long), Run(5, (1,), [], (2,))], fetch=(2,)), ())
    assert not result.failures, "the file's own limit counts for its tenant only"
    longer = Program(NEGATE.templates, tuple(Step(0, (-1 if n == 0 else n - 1,), 1) for n in range(6)), 1, (5,))
    result, _ = free.request(Batch([Define(6, longer), Run(6, (1,), [], (2,))], fetch=(2,)), ())
    assert "6 steps; the limit is 5" in result.failures[0].message
    for connection in (first, free):
        connection.close()


def test_what_a_program_writes_is_written_even_if_its_results_are_too_many(start_server: Any) -> None:
    server = start_server("--max-handles", "2")
    add = Template("aten::add_.Tensor", facts_of(torch.ops.aten.add_.Tensor).digest,
                   (TensorArgument(), TensorArgument()))
    steps = (Step(1, (-1, -1), 0), Step(0, (-1,), 1), Step(0, (-1,), 1))
    doubling = Program((*NEGATE.templates, add), steps, 1, (0, 1))
    connection = session(server)
    result, data = connection.request(Batch(
        [Upload(1, header_of(ONES)), Define(1, doubling), Run(1, (1,), [], (2, 3))], fetch=(1, 2, 3)), [ONES.clone()])
    assert torch.equal(data[0], 2 * ONES)
    assert torch.equal(data[1], -2 * ONES), "the first result still fits"
    assert isinstance(result.items[2], Poisoned)
    assert [failure.kind for failure in result.failures] == ["LimitError"]
    connection.close()


def test_those_who_do_not_say_who_they_are_do_not_keep_others_out(start_server: Any) -> None:
    server = start_server(DJINN_TOKEN="secret")
    first = session(server, "secret")
    assert computes(first), "what a server imports when it is first asked takes time of its own"
    first.close()
    silent = []
    for _ in range(MAX_WAITING + 40):
        silent.append(socket.create_connection(("127.0.0.1", server.port), timeout=20))
        silent[-1].sendall(b"DJNN")
    began = time.monotonic()
    known = session(server, "secret")
    assert computes(known)
    assert time.monotonic() - began < 3
    # The oldest were closed to make room; the others are after their five seconds.
    for sock in silent[:40]:
        assert sock.recv(1) == b""
    assert time.monotonic() - began < 4
    threads = len(list(Path(f"/proc/{server.process.pid}/task").iterdir()))
    assert threads < MAX_WAITING + 20
    for sock in silent:
        assert sock.recv(1) == b""
        sock.close()
    assert time.monotonic() - began < 8
    assert computes(known)
    known.close()


def test_values_go_from_tenant_to_tenant_through_the_gateway(start: Callable[..., Any], tokens: TokenFile) -> None:
    """A peer is led to the worker whose mailbox it names, which the gateway knows by how the key begins."""
    made = [tokens.create(name) for name in ("alice", "bob")]
    server = start()
    sending, receiving = (session(server, token) for token in made)
    sending.request(Batch([Upload(1, header_of(ONES)), Peer(7, server.address, receiving.welcome.mailbox),
                           Send(1, 7, 1)], synchronize=True), [ONES])
    result, data = receiving.request(Batch([Receive(5, 1, sending.welcome.session)], fetch=(5,)), ())
    assert not result.failures
    assert torch.equal(data[0], ONES)
    result, _ = sending.request(Batch([Peer(8, server.address, bytes(16))], synchronize=True), ())
    assert [failure.kind for failure in result.failures] == ["PeerError"]
    assert "no session here" in result.failures[0].message
    for connection in (sending, receiving):
        connection.close()

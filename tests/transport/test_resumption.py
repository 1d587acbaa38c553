"""A real server behind a network that breaks: the session goes on, and everything takes effect once."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.gpt2 import PROMPT, gpt2
from support.network.fault_proxy import FaultProxy, ResetPeer
from support.network.frames import split
from support.processes.warm import WarmPython, clean_environment, run_djinn
from support.servers.connection_options import connect_options
from support.servers.crashes import DEVICE, same, trained
from support.servers.serving import Serving
from support.servers.tcp import raw_socket

import djinn
from djinn.errors import RefusedError, RemoteTimeoutError, TransportError
from djinn.kinds.transport import ConnectOptions
from djinn.plugins import Plugins
from djinn.wire import messages
from djinn.wire.messages import Batch, Free, Hello, Upload, Welcome
from djinn.wire.tensors import header_of
from djinn_plugins.common.kinds.guard import Bounds
from djinn_plugins.common.options import ListenOptions
from djinn_plugins.common.wire.frames import encode_head
from djinn_plugins.executor.cpu.executor import CpuExecutor
from djinn_plugins.server.server import Server
from djinn_plugins.transport.tcp.client import SocketConnection, connect, connect_tls, connect_unix
from djinn_plugins.transport.tcp.listener import SocketChannel, listen

linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc and socket filters are Linux's")
LEASE_S = 4.0
SYNCHRONIZE = Batch(synchronize=True)


@pytest.fixture(scope="module")
def lenient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server that keeps sessions for `LEASE_S`, which these tests share."""
    with Serving(tmp_path_factory.mktemp("lenient") / "log", "--lease-s", str(LEASE_S)) as running:
        yield running


@pytest.fixture(autouse=True)
def _session() -> Iterator[None]:
    yield
    djinn.shutdown()


@contextmanager
def resets(proxy: FaultProxy, at_least: int, seed: int, longest_s: float) -> Iterator[threading.Event]:
    """Reset all connections at random moments while the block runs; tells when it was done often enough."""
    choose, ended, enough = random.Random(seed), threading.Event(), threading.Event()

    def work() -> None:
        count = 0
        while not ended.wait(choose.uniform(0, longest_s)):
            proxy.reset()
            count += 1
            if count >= at_least:
                enough.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield enough
    finally:
        ended.set()
        thread.join(10)


def start(address: str, **settings: Any) -> Any:
    return djinn.init(server=address, recovery="none", log_level="ERROR", **settings)


def tokens(count: int) -> torch.Tensor:
    model = gpt2(n_layer=2, n_embd=64, n_head=2, vocab_size=500, n_positions=256).to(DEVICE)
    torch.manual_seed(5)
    with torch.no_grad():
        return model.generate((PROMPT % 500).to(DEVICE), max_new_tokens=count, do_sample=True, pad_token_id=0,
                              eos_token_id=None).cpu()


def upload_and_fetch(connection: SocketConnection, value: torch.Tensor) -> torch.Tensor:
    connection.submit(Batch([Upload(1, header_of(value))]), [value])
    return connection.request(Batch(fetch=(1,)), ())[1][0]


def test_what_is_generated_is_the_same_though_connections_are_reset(server: Any) -> None:
    start(server.address)
    wanted = tokens(40)
    with FaultProxy(server.port) as proxy:
        start(proxy.address)
        with resets(proxy, 5, seed=1, longest_s=0.1) as enough:
            assert torch.equal(tokens(40), wanted)
            while not enough.is_set():
                assert torch.equal(tokens(40), wanted)
        assert djinn.stats()["reconnections"] >= 3
        djinn.shutdown()


def test_what_is_trained_is_the_same_though_connections_are_reset(server: Any) -> None:
    start(server.address)
    wanted = trained(20)
    with FaultProxy(server.port) as proxy:
        start(proxy.address)
        with resets(proxy, 5, seed=2, longest_s=0.1) as enough:
            got = trained(20, lambda step: enough.wait(0.05))
        assert all(same(got[name], wanted[name]) for name in wanted)
        assert djinn.stats()["reconnections"] >= 3
        djinn.shutdown()


@linux
def test_a_blackout_of_five_seconds_is_a_pause(start_server: Any) -> None:
    running = start_server()
    with FaultProxy(running.port) as proxy:
        start(proxy.address)
        counter = torch.zeros((), device=DEVICE)
        dark = threading.Thread(target=lambda: (time.sleep(0.3), proxy.black_out(5.0)))
        dark.start()
        longest_s, steps, until = 0.0, 0, time.monotonic() + 9.0
        while time.monotonic() < until:
            began = time.monotonic()
            counter += 1
            steps += 1
            if steps % 3 == 0:
                assert counter.item() == steps
            longest_s = max(longest_s, time.monotonic() - began)
            time.sleep(0.01)
        dark.join()
        assert counter.item() == steps
        assert 4.5 < longest_s < 8.0
        assert djinn.stats()["reconnections"] == 1
        djinn.shutdown()


@pytest.mark.parametrize("further_bytes", [120, 170, 320, 720])
def test_an_answer_that_is_lost_is_given_again(lenient: Any, further_bytes: int) -> None:
    """Each connection carries the welcome, and so much more of what the server says, and is then reset."""
    with FaultProxy(lenient.port) as proxy:
        connection = connect(proxy.address, ConnectOptions())
        after_bytes = connection.bytes_received + further_bytes
        counter = torch.zeros(1)
        connection.request(Batch([Upload(1, header_of(counter))]), [counter])
        proxy.reset()
        proxy.downstream = [ResetPeer(after_bytes)]
        add = _add_one()
        connection.submit(Batch([add[0]]), ())
        for step in range(1, 21):
            # Whatever had to be sent again to get so far, every one of them was carried out once.
            if step == 15:
                proxy.downstream = []
            result, data = connection.request(Batch([add[1]], fetch=(1,)), ())
            assert not result.failures
            assert data[0].item() == step
        assert connection.reconnections > (0 if further_bytes > 320 else 2)
        connection.close()


def _add_one() -> tuple[Any, Any]:
    """A definition of a program that adds one to its input in place, and a run of it on value 1."""
    from djinn_conformance.programs import Recording, Ref, call, pieces

    recording = Recording((torch.zeros(1),), (call("aten::add_.Scalar", Ref(-1), 1, results=0),))
    [piece] = pieces(recording, [], [])
    return messages.Define(1, piece.program), messages.Run(1, (1,), list(piece.numbers), ())


def test_a_recorded_batch_that_is_sent_again_takes_effect_once(lenient: Any) -> None:
    define, run = _add_one()
    with FaultProxy(lenient.port, records=True) as proxy:
        connection = connect(proxy.address, ConnectOptions())
        counter = torch.zeros(1)
        connection.request(Batch([Upload(1, header_of(counter)), define]), [counter])
        connection.submit(Batch([run]), ())
        connection.request(SYNCHRONIZE, ())
        recorded = split(bytes(proxy.links[0].sent))
        assert len(recorded) == 4
        for frame in recorded[1:]:
            proxy.links[0].server.sendall(frame)
        assert connection.request(Batch([run], fetch=(1,)), ())[1][0].item() == 2
        connection.close()


@pytest.mark.parametrize(("number", "says"), [
    (3, "Batch 3 comes again, and is another"), (7, "Batch 7 follows batch 3")])
def test_a_number_that_lies_ends_the_session(lenient: Any, number: int, says: str) -> None:
    with FaultProxy(lenient.port) as proxy:
        connection = connect(proxy.address, ConnectOptions())
        connection.submit(Batch([Free((1,))]), ())
        connection.request(SYNCHRONIZE, ())
        header = messages.encode(Batch([Free((2,))]))
        proxy.links[0].server.sendall(encode_head(number, len(header), 0) + header)
        with pytest.raises(RefusedError, match=f"DJ303.*{says}"):
            connection.request(SYNCHRONIZE, ())
        connection.close()


def test_a_large_upload_that_breaks_off_is_sent_again(lenient: Any) -> None:
    value = torch.randn(3 * 2**22)
    with FaultProxy(lenient.port, upstream=[ResetPeer(20 * 2**20)]) as proxy:
        connection = connect(proxy.address, ConnectOptions())
        proxy.upstream = []
        sent = value.clone()
        connection.submit(Batch([Upload(1, header_of(sent))]), [sent])
        sent.zero_()
        assert torch.equal(connection.request(Batch(fetch=(1,)), ())[1][0], value)
        assert connection.reconnections == 1
        assert connection.bytes_sent > value.nbytes + 20 * 2**20
        connection.close()


def test_many_uploads_that_are_not_asked_for_are_let_go_of(lenient: Any) -> None:
    """What is kept to be sent again has a limit, and the server says what it has."""
    value = torch.randn(2**17)
    with FaultProxy(lenient.port) as proxy:
        connection = connect(proxy.address, connect_options(resume_bytes=2**20))
        for index in range(200):
            connection.submit(Batch([Upload(1, header_of(value))]), [value])
            assert connection._end.copied_bytes < 2**23
            if index % 50 == 20:
                proxy.reset()
        assert torch.equal(connection.request(Batch(fetch=(1,)), ())[1][0], value)
        assert connection._end.kept == 0
        assert connection.reconnections >= 3
        connection.close()


@pytest.mark.parametrize("scheme", ["tcp", "tls", "unix"])
def test_every_transport_goes_on(scheme: str, start_server: Any, tmp_path: Path, certificates: Any) -> None:
    arguments = {"tcp": (), "tls": ("--tls-cert", certificates.server), "unix": ("--unix", str(tmp_path / "s"))}
    opened: dict[str, Callable[..., SocketConnection]] = {"tcp": connect, "tls": connect_tls, "unix": connect_unix}
    running = start_server(*arguments[scheme], DJINN_TOKEN="secret")
    options = connect_options(token="secret", tls_ca=certificates.authority if scheme == "tls" else "")
    connection = opened[scheme](running.address, options)
    value = torch.randn(2**19)
    for _ in range(5):
        assert torch.equal(upload_and_fetch(connection, value), value)
        raw_socket(connection).shutdown(2)
    assert torch.equal(upload_and_fetch(connection, value), value)
    assert connection.reconnections == 5
    connection.close()


def test_a_key_opens_no_session_of_another_tenant(start_server: Any, tmp_path: Path) -> None:
    tokens_file = tmp_path / "tokens.json"
    secrets = {name: run_djinn("token", "create", name, "--tokens", str(tokens_file)).stdout.strip()
               for name in ("alice", "bob")}
    running = start_server("--tokens", str(tokens_file))
    alices = connect(running.address, ConnectOptions(token=secrets["alice"], connect_timeout_s=60))
    bobs = connect(running.address, ConnectOptions(token=secrets["bob"], connect_timeout_s=60))
    bobs.close()
    assert alices._again is not None
    from djinn_plugins.transport.tcp.client import Wish, open_tcp, reach

    for token, key in ((secrets["bob"], alices.welcome.resume), (secrets["alice"], bytes(16))):
        with pytest.raises(RefusedError, match="no such session"):
            reach(running.address, open_tcp, ConnectOptions(token=token), Wish(True, key, 1))
    alices.request(SYNCHRONIZE, ())
    assert alices.reconnections == 0
    alices.close()


def load(address: str) -> tuple[int, int]:
    """How many sessions there are, and how many bytes they hold."""
    connection = connect(address, ConnectOptions())
    connection.close()
    return connection.welcome.sessions, connection.welcome.held_bytes


def wait_for_load(address: str, wanted: tuple[int, int], within_s: float) -> float:
    began = time.monotonic()
    while load(address) != wanted:
        assert time.monotonic() - began < within_s, load(address)
        time.sleep(0.1)
    return time.monotonic() - began


@linux
def test_nothing_is_left_of_a_client_that_was_killed_when_its_lease_is_over(start_server: Any, tmp_path: Path) -> None:
    running = start_server("--lease-s", "3")
    program = ("import djinn, torch, time; x = torch.ones(2**22).to('remote_accelerator:0'); y = x + 1; "
               "djinn.synchronize(); print('ready', flush=True); time.sleep(60)")
    with WarmPython(program, [], environment=clean_environment(DJINN_SERVER=running.address), log=tmp_path / "log",
                    has_djinn=True) as process:
        assert process.stdout.readline() == "ready\n"
        wait_for_load(running.address, (1, 2**25), 5)
        process.kill()
    time.sleep(2)
    assert load(running.address) == (1, 2**25)
    wait_for_load(running.address, (0, 0), 4)


def test_a_goodbye_drops_everything_at_once(lenient: Any) -> None:
    wait_for_load(lenient.address, (0, 0), LEASE_S + 2)
    connection = connect(lenient.address, ConnectOptions())
    value = torch.ones(1000)
    upload_and_fetch(connection, value)
    assert load(lenient.address) == (1, value.nbytes)
    connection.close()
    wait_for_load(lenient.address, (0, 0), 1)


def test_a_connection_that_breaks_while_nobody_uses_it_is_replaced_within_the_lease(start_server: Any) -> None:
    running, value = start_server("--lease-s", "1"), torch.ones(2)
    with FaultProxy(running.port) as proxy:
        connection = connect(proxy.address, ConnectOptions())
        connection.request(Batch([Upload(1, header_of(value))], synchronize=True), [value])
        for _ in range(2):
            proxy.reset()
            time.sleep(2)
        assert connection.reconnections == 2
        assert torch.equal(connection.request(Batch(fetch=(1,)), ())[1][0], value)
        connection.close()
        ends = time.monotonic() + 5
        while any(thread.name == "djinn-watch" for thread in threading.enumerate()):
            assert time.monotonic() < ends, "nobody watches what is over"
            time.sleep(0.01)


def test_why_a_session_was_lost_while_nobody_used_it_is_said_when_somebody_does(start_server: Any) -> None:
    running = start_server()
    connection = connect(running.address, ConnectOptions())
    running.stop()
    ends = time.monotonic() + 5
    while connection.watched_stream is not None:
        assert time.monotonic() < ends
        time.sleep(0.01)
    for says in ("the server has ended the session", "is closed: .*the server has ended the session"):
        with pytest.raises(TransportError, match=says):
            connection.submit(SYNCHRONIZE, ())


def test_an_answer_that_comes_while_much_is_unacknowledged_is_no_surprise(
    lenient: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:
    connection = connect(lenient.address, ConnectOptions())
    send = connection._outbox.send

    def sent_and_answered(*args: Any, **options: Any) -> None:
        send(*args, **options)
        while not connection._frames.stream.is_ready():
            time.sleep(0.001)

    # The client looks for acknowledgements, and finds the answer to its request.
    monkeypatch.setattr(type(connection._end), "is_filling", property(lambda _: True))
    monkeypatch.setattr(connection._outbox, "send", sent_and_answered)
    connection.request(SYNCHRONIZE, ())
    connection.close()


def test_who_was_only_just_welcomed_hears_that_the_server_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    welcomed, goes_on = threading.Event(), threading.Event()
    send = SocketChannel.send

    def held(channel: SocketChannel, sequence: int, message: Any, *rest: Any) -> None:
        send(channel, sequence, message, *rest)
        if isinstance(message, Welcome):
            welcomed.set()
            goes_on.wait(60)

    monkeypatch.setattr(SocketChannel, "send", held)
    plugins = Plugins.load()
    watch = partial(plugins.choose("guard", "core").watch, Bounds("cpu", 2**30), plugins.choose("shapes", "meta"))
    server = Server(listen("tcp://127.0.0.1:0", ListenOptions()), CpuExecutor(),
                    admit=lambda channel, hello: None, watch=watch)
    server.start()
    connection = connect(server.address, ConnectOptions())
    assert welcomed.wait(60)
    stopping = threading.Thread(target=server.stop)
    stopping.start()
    while server.is_accepting:
        time.sleep(0.01)
    goes_on.set()
    stopping.join()
    with pytest.raises(TransportError, match="the server has ended the session"):
        connection.submit(SYNCHRONIZE, ())


@linux
def test_a_network_that_stays_away_is_given_up_in_time(start_server: Any) -> None:
    running = start_server("--lease-s", "3")
    with FaultProxy(running.port) as proxy:
        connection = connect(proxy.address, ConnectOptions())
        proxy.vanish()
        proxy.reset()
        began = time.monotonic()
        with pytest.raises(TransportError, match="no connection came about in time") as caught:
            connection.request(SYNCHRONIZE, ())
        assert proxy.address in str(caught.value)
        assert "djinn.init" in caught.value.hint
        assert 2.5 < time.monotonic() - began < 4.5
        connection.close()


def test_without_resumption_a_connection_that_breaks_is_the_end(lenient: Any) -> None:
    with FaultProxy(lenient.port) as proxy:
        connection = connect(proxy.address, connect_options(resume=False))
        connection.request(SYNCHRONIZE, ())
        proxy.reset()
        with pytest.raises(TransportError, match="broke|gone"):
            connection.request(SYNCHRONIZE, ())
        assert connection.reconnections == 0


@linux
def test_a_worker_that_is_killed_is_not_waited_for(start_server: Any) -> None:
    running = start_server()
    (worker,) = running.workers
    connection = connect(running.address, ConnectOptions())
    os.kill(worker, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(TransportError, match="no such session"):
        connection.request(SYNCHRONIZE, ())
    assert time.monotonic() - began < 1.0


@linux
def test_a_server_that_ends_waits_for_no_lease_and_says_so(start_server: Any) -> None:
    running = start_server()
    idle = connect(running.address, ConnectOptions())
    with FaultProxy(running.port) as proxy:
        lost = connect(proxy.address, ConnectOptions())
        proxy.vanish()
        proxy.reset()
        time.sleep(0.3)
        began = time.monotonic()
        assert running.stop() == 0
        assert time.monotonic() - began < 5.0
    began = time.monotonic()
    with pytest.raises(TransportError, match="the server has ended the session"):
        idle.request(SYNCHRONIZE, ())
    with pytest.raises(TransportError, match="nobody listens there any more"):
        lost.request(SYNCHRONIZE, ())
    assert time.monotonic() - began < 3.0


@linux
def test_a_vanished_server_is_noticed_by_a_client_that_waits_for_its_answer(serve: Any) -> None:
    """All that the client sent was acknowledged, so nothing but the system's keepalive can find out."""
    ended = threading.Event()
    address = serve(lambda channel: (channel.receive(), ended.wait(30)))
    if address.startswith("unix:"):
        ended.set()
        pytest.skip("no machine is between the two")
    with FaultProxy(int(address.rpartition(":")[2])) as proxy:
        connection = connect(proxy.address, ConnectOptions())
        timer = threading.Timer(0.5, proxy.vanish)
        timer.start()
        began = time.monotonic()
        with pytest.raises((RemoteTimeoutError, TransportError)):
            connection.request(SYNCHRONIZE, ())
        took_s = time.monotonic() - began
        ended.set()
        assert 10 < took_s < 16.5
        connection.close()


def test_old_clients_and_those_who_do_not_want_it_are_not_waited_for(raw_client: Any, lenient: Any) -> None:
    wait_for_load(lenient.address, (0, 0), LEASE_S + 2)
    assert not Hello(1, "", "", "").resumes
    with raw_client(lenient.port):
        # The server may still be removing the session that has asked for its load.
        wait_for_load(lenient.address, (1, 0), LEASE_S)
    wait_for_load(lenient.address, (0, 0), 1)

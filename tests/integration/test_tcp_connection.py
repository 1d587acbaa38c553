"""The client's end of a TCP session: greeting, refusals, and every way in which a connection dies."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from djinn.errors import (
    ConfigurationError,
    ProtocolError,
    ProtocolVersionError,
    RefusedError,
    RemoteTimeoutError,
    TransportError,
)
from djinn.kinds.transport import ConnectOptions, ListenOptions
from djinn.protocol.frames import HEAD, MAGIC, encode_head
from djinn.protocol.messages import (
    PROTOCOL_VERSION,
    Batch,
    Failure,
    Hello,
    Plain,
    Refusal,
    Result,
    Upload,
    Welcome,
)
from djinn.protocol.tensors import header_of
from djinn_transport_tcp.client import TcpConnection, connect
from djinn_transport_tcp.listener import TcpChannel, listen
from djinn_transport_tcp.sockets import is_silent

WELCOME = Welcome(PROTOCOL_VERSION, "2.13.0", "3.11.7", sys.byteorder, "cpu", "0" * 32)
SYNCHRONIZE = Batch(synchronize=True)
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what has been acknowledged")


def raw_socket(end: TcpConnection | TcpChannel) -> socket.socket:
    return end._frames.stream._socket


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Serves one connection with a function of the test's, on a real listener, and returns the address."""
    ended: list[Callable[[], None]] = []

    def start(script: Callable[[TcpChannel], None], **options: Any) -> str:
        listener = listen("tcp://127.0.0.1:0", ListenOptions(**options))

        def run() -> None:
            channel = listener.accept()
            if channel is not None:
                try:
                    script(channel)
                finally:
                    channel.close()

        thread = threading.Thread(target=run)
        thread.start()

        def end() -> None:
            listener.close()
            thread.join(10)
            assert not thread.is_alive()

        ended.append(end)
        return listener.address

    yield start
    for end in ended:
        end()


@pytest.fixture
def open_connection() -> Iterator[Callable[..., TcpConnection]]:
    made: list[TcpConnection] = []

    def start(address: str, **options: Any) -> TcpConnection:
        made.append(connect(address, ConnectOptions(**options)))
        return made[-1]

    yield start
    for connection in made:
        connection.close()


def greet(channel: TcpChannel) -> Hello:
    received = channel.receive()
    assert received is not None
    sequence, hello, _ = received
    assert isinstance(hello, Hello)
    channel.send(sequence, WELCOME)
    channel.greeted()
    return hello


def answer(channel: TcpChannel, result: Result = Result(), tensors: Any = ()) -> Any:
    received = channel.receive()
    assert received is not None
    channel.send(received[0], result, tensors)
    return received


def expect_closed(connection: TcpConnection) -> None:
    """After any error, everything fails at once and names the address."""
    for attempt in (lambda: connection.submit(Batch(), ()), lambda: connection.request(SYNCHRONIZE, ())):
        began = time.monotonic()
        with pytest.raises(TransportError) as caught:
            attempt()
        assert time.monotonic() - began < 0.1
        assert connection.address in str(caught.value)
        assert "djinn.init" in caught.value.hint


def test_a_session(serve: Any, open_connection: Any) -> None:
    seen: list[Any] = []
    tensor = torch.arange(100_000.0)

    def script(channel: TcpChannel) -> None:
        seen.append(greet(channel))
        seen.extend(channel.receive() for _ in range(2))
        sequence, _, tensors = seen[-1]
        channel.send(sequence, Result((header_of(tensors[0]), Plain(7))), tensors)
        seen.append(channel.receive())

    connection = open_connection(serve(script), token="secret")
    assert connection.welcome == WELCOME
    sent = connection.bytes_sent
    connection.submit(Batch(fetch=()), ())
    result, data = connection.request(Batch([Upload(1, header_of(tensor))]), [tensor])
    assert result == Result((header_of(tensor), Plain(7)))
    assert torch.equal(data[0], tensor)
    assert min(connection.bytes_sent - sent, connection.bytes_received) > tensor.nbytes
    connection.close()
    connection.close()
    expect_closed(connection)
    while len(seen) < 4:
        time.sleep(0.01)
    assert seen[0] == Hello(PROTOCOL_VERSION, str(torch.__version__), sys.version.split()[0], sys.byteorder, "secret")
    assert [received[0] for received in seen[1:3]] == [2, 3]
    assert seen[3] is None


def test_a_request_is_always_answered_and_a_submit_never_waited_for(serve: Any, open_connection: Any) -> None:
    seen: list[Any] = []

    def script(channel: TcpChannel) -> None:
        greet(channel)
        seen.append(answer(channel)[1])
        seen.append(answer(channel, Result((Plain(1),), (Failure(1, "ValueError", "first"),)))[1])
        seen.append(answer(channel, Result((Plain(2),)))[1])

    connection = open_connection(serve(script))
    assert connection.request(Batch(), ()) == (Result(), [])
    connection.submit(Batch(fetch=(1,)), ())
    expected = Result((Plain(2),), (Failure(1, "ValueError", "first"),))
    assert connection.request(Batch(fetch=(2,)), ()) == (expected, [])
    assert seen == [SYNCHRONIZE, Batch(fetch=(1,)), Batch(fetch=(2,))]


def test_both_ends_send_at_once_and_notice_a_vanished_peer(serve: Any, open_connection: Any) -> None:
    ends: list[Any] = []
    done = threading.Event()

    def script(channel: TcpChannel) -> None:
        greet(channel)
        ends.append(raw_socket(channel))
        done.wait(10)

    connection = open_connection(serve(script))
    while not ends:
        time.sleep(0.01)
    ends.append(raw_socket(connection))
    for sock in ends:
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    if sys.platform == "linux":
        for sock in ends:
            assert [sock.getsockopt(socket.IPPROTO_TCP, option) for option in
                    (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)] == [10, 5, 3]
        # Linux would give up on a server that merely computes for long, so only the server's end has this.
        assert [sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for sock in ends] == [30_000, 0]
    done.set()


def test_nobody_answers(open_connection: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(TransportError, match=f"Nobody answers at tcp://127.0.0.1:{port}: ") as caught:
        open_connection(f"tcp://127.0.0.1:{port}")
    assert "djinn serve" in caught.value.hint
    with pytest.raises(ConfigurationError):
        open_connection(f"tcp://{'a' * 70}:{port}")


def test_a_host_that_answers_and_says_nothing_takes_as_long_as_is_allowed(open_connection: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(RemoteTimeoutError, match=address):
            open_connection(address, connect_timeout_s=0.4)
        assert 0.3 < time.monotonic() - began < 3


@pytest.mark.parametrize("banner", [b"HTTP/1.1 400 Bad Request\r\n\r\n" * 3, b"SSH-2.0-OpenSSH_9.6\r\n", b""])
def test_something_else_answers(open_connection: Any, banner: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"tcp://127.0.0.1:{listening.getsockname()[1]}"

        def reply() -> None:
            peer, _ = listening.accept()
            with peer:
                peer.recv(1000)
                peer.sendall(banner)

        thread = threading.Thread(target=reply)
        thread.start()
        with pytest.raises(TransportError, match=address):
            open_connection(address)
        thread.join(10)


@pytest.mark.parametrize(("refusal", "kind"), [
    (Refusal("DJ305", "The token is wrong.", "Set DJINN_TOKEN."), RefusedError),
    (Refusal("DJ304", "The client speaks protocol 1, this server 9.", "Install the same."), ProtocolVersionError),
    (Refusal("DJ303", "A header of 5000 bytes.", ""), RefusedError),
])
def test_a_refusal_is_told_in_the_servers_words(
    serve: Any, open_connection: Any, refusal: Refusal, kind: type[Exception],
) -> None:
    def script(channel: TcpChannel) -> None:
        channel.receive()
        channel.send(1, refusal)

    address = serve(script)
    with pytest.raises(kind) as caught:
        open_connection(address)
    assert type(caught.value) is kind
    for part in (address, refusal.summary, refusal.hint):
        assert part in str(caught.value)


@pytest.mark.parametrize("reply", [
    Welcome(PROTOCOL_VERSION + 1, "", "", sys.byteorder, "", ""),
    Welcome(PROTOCOL_VERSION, "", "", "big" if sys.byteorder == "little" else "little", "", ""),
])
def test_a_welcome_that_does_not_fit_is_declined(serve: Any, open_connection: Any, reply: Welcome) -> None:
    def script(channel: TcpChannel) -> None:
        channel.receive()
        channel.send(1, reply)

    with pytest.raises(ProtocolVersionError):
        open_connection(serve(script))


def test_a_server_of_another_version_is_named(open_connection: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        def reply() -> None:
            peer, _ = listening.accept()
            with peer:
                peer.recv(1000)
                peer.sendall(HEAD.pack(MAGIC, 9, 0, 1, 0, 0, 0))

        thread = threading.Thread(target=reply)
        thread.start()
        with pytest.raises(ProtocolVersionError, match="protocol 9"):
            open_connection(f"tcp://127.0.0.1:{listening.getsockname()[1]}")
        thread.join(10)


def end_orderly(channel: TcpChannel) -> None:
    raw_socket(channel).shutdown(socket.SHUT_WR)


def reset(channel: TcpChannel) -> None:
    raw_socket(channel).setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw_socket(channel).close()


def end_in_a_frame(channel: TcpChannel) -> None:
    raw_socket(channel).sendall(encode_head(2, 100, 0) + b"x" * 99)
    raw_socket(channel).shutdown(socket.SHUT_WR)


def send_nonsense(channel: TcpChannel) -> None:
    raw_socket(channel).sendall(encode_head(2, 3, 0) + b"\xc1\xc1\xc1")


def answer_another(channel: TcpChannel) -> None:
    channel.send(77, Result())


def welcome_again(channel: TcpChannel) -> None:
    channel.send(2, WELCOME)


@pytest.mark.parametrize("death", [
    end_orderly, reset, end_in_a_frame, send_nonsense, answer_another, welcome_again,
], ids=lambda death: death.__name__)
def test_whatever_ends_a_session_while_the_client_waits_is_told_at_once(
    serve: Any, open_connection: Any, death: Callable[[TcpChannel], None],
) -> None:
    told = threading.Event()

    def script(channel: TcpChannel) -> None:
        greet(channel)
        channel.receive()
        time.sleep(0.3)
        death(channel)
        told.wait(10)

    connection = open_connection(serve(script))
    began = time.monotonic()
    with pytest.raises(TransportError, match=connection.address):
        connection.request(SYNCHRONIZE, ())
    assert 0.2 < time.monotonic() - began < 1.3
    told.set()
    expect_closed(connection)


def test_a_dead_server_is_noticed_by_submit_at_the_latest_when_somebody_waits(serve: Any, open_connection: Any) -> None:
    connection = open_connection(serve(lambda channel: (greet(channel), reset(channel))))
    time.sleep(0.2)
    with pytest.raises(TransportError):
        for _ in range(3):
            connection.submit(Batch(), ())
    expect_closed(connection)


def test_a_refusal_reaches_a_client_that_is_still_sending(serve: Any, open_connection: Any) -> None:
    def script(channel: TcpChannel) -> None:
        greet(channel)
        try:
            channel.receive()
        except ProtocolError as error:
            channel.send(0, Refusal(error.code, error.summary))

    tensor = torch.zeros(2**24)
    for method in ("submit", "request"):
        connection = open_connection(serve(script, max_body_bytes=2**20))
        with pytest.raises(RefusedError, match="A body of 67108864 bytes; 1048576 is the limit"):
            for _ in range(2):
                getattr(connection, method)(Batch([Upload(1, header_of(tensor))]), [tensor])
        expect_closed(connection)


def test_an_answer_that_stands_still_is_given_up_if_the_client_says_so(serve: Any, open_connection: Any) -> None:
    told = threading.Event()
    connection = open_connection(serve(lambda channel: (greet(channel), told.wait(10))), request_timeout_s=0.4)
    began = time.monotonic()
    with pytest.raises(RemoteTimeoutError, match=r"nothing moved for 0\.4 s"):
        connection.request(SYNCHRONIZE, ())
    assert 0.3 < time.monotonic() - began < 3
    told.set()
    expect_closed(connection)


def drop_everything(sock: socket.socket) -> None:
    """Make a machine vanish: the kernel discards what comes for this socket before TCP sees it."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # return 0: keep no byte of the packet
    sock.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HxxxxxxP", 1, ctypes.addressof(program)))


@linux
@pytest.mark.parametrize("sends", ["request", "a large submit"])
def test_a_machine_that_vanishes_is_noticed(serve: Any, open_connection: Any, sends: str) -> None:
    vanished, told = threading.Event(), threading.Event()

    def script(channel: TcpChannel) -> None:
        greet(channel)
        drop_everything(raw_socket(channel))
        vanished.set()
        told.wait(20)

    connection = open_connection(serve(script))
    vanished.wait(10)
    connection._frames.stream.silence_s = 1.5
    tensor = torch.zeros(2**24)
    began = time.monotonic()
    with pytest.raises(RemoteTimeoutError, match="has not acknowledged anything"):
        if sends == "request":
            connection.request(SYNCHRONIZE, ())
        else:
            connection.submit(Batch([Upload(1, header_of(tensor))]), [tensor])
    assert 1 < time.monotonic() - began < 8
    told.set()
    expect_closed(connection)


@linux
def test_a_server_that_computes_for_long_and_reads_nothing_is_not_given_up(serve: Any, open_connection: Any) -> None:
    computed = threading.Event()

    def script(channel: TcpChannel) -> None:
        greet(channel)
        computed.wait(20)
        answer(channel)

    connection = open_connection(serve(script))
    connection._frames.stream.silence_s = 0.5
    silent: list[bool] = []

    def compute() -> None:
        for _ in range(50):
            time.sleep(0.1)
            silent.append(is_silent(raw_socket(connection), 0.5))
        computed.set()

    thread = threading.Thread(target=compute)
    thread.start()
    tensor = torch.zeros(2**24)
    connection.request(Batch([Upload(1, header_of(tensor))]), [tensor])
    thread.join(10)
    assert not any(silent)


def interrupt_soon(number: int = signal.SIGINT, delay_s: float = 0.4) -> None:
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(delay_s, signal.pthread_kill, (main, number)).start()


needs_signals = pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="interrupts a thread by signal")


@needs_signals
def test_an_interrupt_while_waiting_leaves_a_session_that_works(serve: Any, open_connection: Any) -> None:
    interrupted = threading.Event()
    first = Failure(1, "ValueError", "of the interrupted request")
    second = Failure(2, "ValueError", "of the next")
    seen: list[Any] = []

    def script(channel: TcpChannel) -> None:
        greet(channel)
        received = channel.receive()
        interrupted.wait(10)
        channel.send(received[0], Result((header_of(torch.ones(3)),), (first,)), [torch.ones(3)])
        seen.append(channel.receive())
        seen.append(answer(channel, Result((Plain(5),), (second,))))
        answer(channel, Result())

    connection = open_connection(serve(script))
    interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        connection.request(Batch(fetch=(1,)), ())
    interrupted.set()
    connection.submit(Batch(), ())
    assert connection.request(SYNCHRONIZE, ()) == (Result((Plain(5),), (first, second)), [])
    assert connection.request(SYNCHRONIZE, ()) == (Result(), [])
    assert [received[1] for received in seen] == [Batch(), SYNCHRONIZE]


@needs_signals
@pytest.mark.parametrize("direction", ["sending", "receiving"])
def test_an_interrupt_in_the_middle_of_a_frame_ends_the_session(
    serve: Any, open_connection: Any, direction: str,
) -> None:
    told = threading.Event()
    tensor = torch.zeros(2**24)

    def script(channel: TcpChannel) -> None:
        greet(channel)
        if direction == "receiving":
            channel.receive()
            raw_socket(channel).sendall(encode_head(2, 100, 0) + b"x" * 50)
        told.wait(10)

    connection = open_connection(serve(script))
    interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        if direction == "sending":
            connection.submit(Batch([Upload(1, header_of(tensor))]), [tensor])
        else:
            connection.request(SYNCHRONIZE, ())
    told.set()
    expect_closed(connection)


@needs_signals
def test_the_users_own_time_limit_is_not_taken_for_the_connections(serve: Any, open_connection: Any) -> None:
    def give_up(number: int, frame: Any) -> None:
        raise TimeoutError("my own limit")

    told = threading.Event()
    connection = open_connection(serve(lambda channel: (greet(channel), told.wait(10))))
    before = signal.signal(signal.SIGALRM, give_up)
    try:
        interrupt_soon(signal.SIGALRM)
        with pytest.raises(TimeoutError, match="my own limit"):
            connection.request(SYNCHRONIZE, ())
    finally:
        signal.signal(signal.SIGALRM, before)
        told.set()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork here")
def test_a_forked_child_cannot_disturb_its_parents_session(serve: Any, open_connection: Any) -> None:
    def script(channel: TcpChannel) -> None:
        greet(channel)
        answer(channel)
        answer(channel)

    connection = open_connection(serve(script))
    connection.request(SYNCHRONIZE, ())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forking with threads
        child = os.fork()
    if child == 0:
        status = 1
        try:
            connection.submit(Batch(), ())
        except TransportError as error:
            status = 0 if "forked" in str(error) else 2
        finally:
            connection.close()
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert connection.request(SYNCHRONIZE, ()) == (Result(), [])


def test_ipv6() -> None:
    try:
        listener = listen("tcp://[::1]:0", ListenOptions())
    except TransportError:
        pytest.skip("this machine has no IPv6")

    def greet_one() -> None:
        channel = listener.accept()
        assert channel is not None
        assert channel.peer.startswith("tcp://[::1]:")
        greet(channel)
        channel.close()

    thread = threading.Thread(target=greet_one)
    thread.start()
    connection = connect(listener.address, ConnectOptions())
    assert listener.address.startswith("tcp://[::1]:")
    assert connection.welcome == WELCOME
    thread.join(10)
    connection.close()
    listener.close()


def test_a_port_that_is_taken() -> None:
    listener = listen("tcp://127.0.0.1:0", ListenOptions())
    with pytest.raises(TransportError, match=f"Cannot listen on {listener.address}"):
        listen(listener.address, ListenOptions())
    listener.close()
    with pytest.raises(ConfigurationError):
        listen("tcp://127.0.0.1", ListenOptions())

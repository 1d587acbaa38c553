"""Every way in which a TCP session ends before its time, and how soon the client learns of it."""

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
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.servers.tcp import SYNCHRONIZE, WELCOME, answer, expect_closed, raw_socket, tcp_only

from djinn.errors import ProtocolError, RefusedError, RemoteTimeoutError, TransportError
from djinn.wire.messages import (
    Batch,
    Failure,
    Plain,
    Refusal,
    Result,
    Upload,
)
from djinn.wire.tensors import header_of
from djinn_plugins.common.wire.frames import encode_head
from djinn_plugins.transport.tcp.listener import SocketChannel
from djinn_plugins.transport.tcp.sockets import is_silent

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what has been acknowledged")


def end_orderly(channel: SocketChannel) -> None:
    raw_socket(channel).shutdown(socket.SHUT_WR)


def reset(channel: SocketChannel) -> None:
    raw_socket(channel).setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw_socket(channel).close()


def end_in_a_frame(channel: SocketChannel) -> None:
    raw_socket(channel).sendall(encode_head(2, 100, 0) + b"x" * 99)
    raw_socket(channel).shutdown(socket.SHUT_WR)


def send_nonsense(channel: SocketChannel) -> None:
    raw_socket(channel).sendall(encode_head(2, 3, 0) + b"\xc1\xc1\xc1")


def answer_another(channel: SocketChannel) -> None:
    channel.send(77, Result())


def welcome_again(channel: SocketChannel) -> None:
    channel.send(2, WELCOME)


@pytest.mark.parametrize("death", [
    end_orderly, reset, end_in_a_frame, send_nonsense, answer_another, welcome_again,
], ids=lambda death: death.__name__)
def test_whatever_ends_a_session_while_the_client_waits_is_told_at_once(
    serve: Any, open_connection: Any, death: Callable[[SocketChannel], None],
) -> None:
    told = threading.Event()

    def script(channel: SocketChannel) -> None:
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
    connection = open_connection(serve(reset))
    time.sleep(0.2)

    def submit_some() -> None:
        for _ in range(3):
            connection.submit(Batch(), ())

    with pytest.raises(TransportError):
        submit_some()
    expect_closed(connection)


def test_a_refusal_reaches_a_client_that_is_still_sending(serve: Any, open_connection: Any) -> None:
    def script(channel: SocketChannel) -> None:
        try:
            channel.receive()
        except ProtocolError as error:
            channel.send(0, Refusal(error.code, error.summary))

    tensor = torch.zeros(2**24)
    for method in ("submit", "request"):
        connection = open_connection(serve(script, max_body_bytes=2**20))
        with pytest.raises(RefusedError, match="A body of 67108864 bytes; 1048576 is the limit"):
            getattr(connection, method)(Batch([Upload(1, header_of(tensor))]), [tensor])
        expect_closed(connection)


def test_an_answer_that_stands_still_is_given_up_if_the_client_says_so(serve: Any, open_connection: Any) -> None:
    told = threading.Event()
    connection = open_connection(serve(lambda channel: told.wait(10)), request_timeout_s=0.4)
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
@tcp_only
@pytest.mark.parametrize("sends", ["request", "submit"])
def test_a_machine_that_vanishes_is_noticed(serve: Any, open_connection: Any, sends: str) -> None:
    vanished, told = threading.Event(), threading.Event()

    def script(channel: SocketChannel) -> None:
        drop_everything(raw_socket(channel))
        vanished.set()
        told.wait(20)

    connection = open_connection(serve(script))
    vanished.wait(10)
    connection._frames.stream.silence_s = 1.5
    tensor = torch.zeros(2**24)
    began = time.monotonic()
    batch, tensors = (SYNCHRONIZE, []) if sends == "request" else (Batch([Upload(1, header_of(tensor))]), [tensor])
    with pytest.raises(RemoteTimeoutError, match="has not acknowledged anything"):
        getattr(connection, sends)(batch, tensors)
    assert 1 < time.monotonic() - began < 8
    told.set()
    expect_closed(connection)


class _Told:
    """A socket of which the system says this."""

    family, type = socket.AF_INET, socket.SOCK_STREAM

    def __init__(self, probes: int, unacknowledged: int, sent_ms: int, acknowledged_ms: int) -> None:
        self._info = struct.pack("=3xB20xI16xI8xI", probes, unacknowledged, sent_ms, acknowledged_ms)

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option, size) == (socket.IPPROTO_TCP, socket.TCP_INFO, len(self._info))
        return self._info


@linux
@pytest.mark.parametrize(("told", "silent"), [
    (_Told(0, 1, 900, 1700), True), (_Told(0, 1, 900, 1400), False), (_Told(2, 0, 9000, 1700), True),
    # What it did not take was sent again 1.7 s ago, and acknowledged; the next time is yet to come.
    (_Told(0, 1, 1700, 1700), False), (_Told(0, 1, 100, 1700), False), (_Told(0, 0, 900, 1700), False),
])
def test_silent_is_who_does_not_acknowledge_what_was_sent_since(told: Any, silent: bool) -> None:
    assert is_silent(told, 1.5) == silent


@linux
@tcp_only
def test_a_server_that_computes_for_long_and_reads_nothing_is_not_given_up(serve: Any, open_connection: Any) -> None:
    computed = threading.Event()

    def script(channel: SocketChannel) -> None:
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
@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_while_waiting_leaves_a_session_that_works(serve: Any, open_connection: Any) -> None:
    interrupted = threading.Event()
    first = Failure(1, "ValueError", "of the interrupted request")
    second = Failure(2, "ValueError", "of the next")
    seen: list[Any] = []

    def script(channel: SocketChannel) -> None:
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
    assert connection.request(Batch(fetch=(2,)), ()) == (Result((Plain(5),), (first, second)), [])
    assert connection.request(SYNCHRONIZE, ()) == (Result(), [])
    assert [received[1] for received in seen] == [Batch(), Batch(fetch=(2,))]


@needs_signals
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("direction", ["sending", "receiving"])
def test_an_interrupt_in_the_middle_of_a_frame_ends_the_session(
    serve: Any, open_connection: Any, direction: str,
) -> None:
    told = threading.Event()
    tensor = torch.zeros(2**24)

    def script(channel: SocketChannel) -> None:
        if direction == "receiving":
            channel.receive()
            raw_socket(channel).sendall(encode_head(2, 100, 0) + b"x" * 50)
        told.wait(10)

    connection = open_connection(serve(script))
    interrupt_soon()
    large = Batch([Upload(1, header_of(tensor))], synchronize=True), [tensor]
    batch, tensors = large if direction == "sending" else (SYNCHRONIZE, [])
    with pytest.raises(KeyboardInterrupt):
        connection.request(batch, tensors)
    told.set()
    expect_closed(connection)


@needs_signals
def test_the_users_own_time_limit_is_not_taken_for_the_connections(serve: Any, open_connection: Any) -> None:
    def give_up(number: int, frame: Any) -> None:
        raise TimeoutError("my own limit")

    told = threading.Event()
    connection = open_connection(serve(lambda channel: told.wait(10)))
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
    def script(channel: SocketChannel) -> None:
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



"""Servers in processes of their own, and scripted ends of single connections."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, Self

import attrs
import pytest
import trustme
from support.processes.warm import WarmPython, clean_environment
from support.servers.connection_options import connect_options
from support.servers.serving import PROGRAM, workers_of

import djinn
from djinn.wire import messages
from djinn.wire.messages import PROTOCOL_VERSION, Hello, Refusal, Starting, Welcome
from djinn_plugins.common.options import ListenOptions
from djinn_plugins.common.wire.frames import encode_head
from djinn_plugins.transport.tcp.address import parse_address
from djinn_plugins.transport.tcp.client import SocketConnection, connect, connect_unix
from djinn_plugins.transport.tcp.listener import SocketChannel, SocketListener, listen, listen_unix
from djinn_plugins.transport.tcp.sockets import ByteStream
from djinn_plugins.transport.tcp.stream import FrameStream

__all__ = ("certificates", "connect_raw", "frugal_server", "interruptible", "on_a_server", "open_connection",
           "raw_client", "second_server", "serve", "server", "session", "start_server", "start_server_of_module",
           "tls_server", "without_collection")

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 15.0


@attrs.frozen
class ServerProcess:
    """A running ``djinn serve``."""

    address: str
    process: WarmPython
    log: Path

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def workers(self) -> list[int]:
        """The processes that run operations, on Linux."""
        return workers_of(self.process.pid)

    def kill(self) -> None:
        """Kill all of it at once, as when the power fails."""
        workers = self.workers if sys.platform == "linux" else []
        for process in (self.process.pid, *workers):
            os.kill(process, signal.SIGKILL)
        self.process.wait(STOP_TIMEOUT_S)

    def stop(self) -> int:
        """Stop it as an operator would, and return its exit status."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            self.process.stdout.close()


class StartServer(Protocol):
    def __call__(self, *arguments: str, **environment: str) -> ServerProcess: ...


def _start(log: Path, arguments: tuple[str, ...], environment: dict[str, str]) -> ServerProcess:
    process = WarmPython(PROGRAM, ["serve", "--device", "cpu", "--threads", "1", "--drain-s", "0", *arguments],
                         environment=clean_environment(**environment), log=log, has_djinn=True)
    patience = threading.Timer(START_TIMEOUT_S, process.kill)
    patience.start()
    line = process.stdout.readline()
    patience.cancel()
    started, _, address = line.strip().partition("djinn serving ")
    server = ServerProcess(address, process, log)
    if started or not address:
        status = server.stop()
        pytest.fail(f"djinn serve ended with {status} and said {line!r}:\n{log.read_text()}")
    return server


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises, here and in processes started here, also where whoever runs the tests has it ignored.

    A shell without job control has it ignored by whatever it starts in the background.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that all tests share. A test that harms it fails, and so do others.

    Programs that tests start are other owners; with one worker for all of them, a test can see that it lives.
    """
    running = _start(tmp_path_factory.mktemp("server") / "log", ("--isolate", "tenant"), {})
    yield running
    assert running.stop() == 0, running.log.read_text()


@pytest.fixture
def session(server: ServerProcess) -> Iterator[ServerProcess]:
    """Lets a test have a session on the server that tests share, whose worker it must not end."""
    [worker] = server.workers
    djinn.init(server=server.address)
    yield server
    assert server.workers == [worker], "the process that runs operations died"
    djinn.init()


@pytest.fixture
def without_collection() -> Iterator[None]:
    """Lets a test count handles of a session that others have used: collects their garbage before, not meanwhile."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def on_a_server(server: ServerProcess) -> Iterator[None]:
    """Lets all sessions that a module starts without an address be sessions on the server that tests share."""
    with pytest.MonkeyPatch.context() as patch:
        djinn.shutdown()
        patch.setenv("DJINN_SERVER", server.address)
        yield
        djinn.shutdown()


@pytest.fixture(scope="session")
def second_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Another server that tests share, for those of values that go from server to server."""
    running = _start(tmp_path_factory.mktemp("second-server") / "log", (), {})
    yield running
    assert running.stop() == 0, running.log.read_text()


@pytest.fixture(scope="session")
def frugal_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that lets programs have little memory, which tests share."""
    running = _start(tmp_path_factory.mktemp("frugal-server") / "log", ("--program-mib", "1"), {})
    yield running
    assert running.stop() == 0, running.log.read_text()


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Starts servers of a test's own: ``start_server("--port", "7070", DJINN_TOKEN="secret")``."""
    yield from _starting(tmp_path)


@pytest.fixture(scope="module")
def start_server_of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """Starts servers that the tests of a module share."""
    yield from _starting(tmp_path_factory.mktemp("servers"))


def _starting(folder: Path) -> Iterator[StartServer]:
    started: list[ServerProcess] = []

    def start(*arguments: str, **environment: str) -> ServerProcess:
        started.append(_start(folder / f"server-{len(started)}.log", arguments, environment))
        return started[-1]

    yield start
    for running in started:
        running.stop()


@attrs.frozen
class Certificates:
    """Files with certificates that a test's own authority has made, and another's."""

    authority: str
    server: str
    client: str
    other_authority: str
    other_client: str
    elsewhere: str
    """A server's certificate for another name."""


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates with their keys, made for this run."""
    folder = tmp_path_factory.mktemp("certificates")
    made = {}
    for who in ("", "other_"):
        authority = trustme.CA()
        made[f"{who}authority"] = str(folder / f"{who}authority.pem")
        authority.cert_pem.write_to_path(made[f"{who}authority"])
        for name, identity in (("server", ["127.0.0.1", "::1", "localhost"]), ("client", ["client@example.org"]),
                               ("elsewhere", ["elsewhere.example.org"])):
            made[f"{who}{name}"] = str(folder / f"{who}{name}.pem")
            authority.issue_cert(*identity).private_key_and_cert_chain_pem.write_to_path(made[f"{who}{name}"])
    return Certificates(**{name: made[name] for name in (field.name for field in attrs.fields(Certificates))})


@pytest.fixture(scope="session")
def tls_server(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[ServerProcess]:
    """A server with TLS, for tests that share it."""
    running = _start(tmp_path_factory.mktemp("tls-server") / "log",
                     ("--tls-cert", certificates.server, "--isolate", "tenant"), {})
    yield running
    assert running.stop() == 0, running.log.read_text()


HELLO = Hello(PROTOCOL_VERSION, "2.13.0", "3.11.7", sys.byteorder)
WELCOME = Welcome(PROTOCOL_VERSION, "2.13.0", "3.11.7", sys.byteorder, "cpu", "0" * 32)


def greet(channel: SocketChannel) -> None:
    received = channel.receive()
    assert received is not None
    assert isinstance(received[1], Hello)
    channel.send(received[0], WELCOME)
    channel.greeted()


@pytest.fixture(params=["tcp", "unix"])
def serve(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Serves one connection with a function of the test's, on a real listener, and returns the address."""
    ended: list[Callable[[], None]] = []

    def start(script: Callable[[SocketChannel], object], *, greets: bool = True, **options: Any) -> str:
        if request.param == "tcp":
            listener = listen("tcp://127.0.0.1:0", ListenOptions(**options))
        else:
            listener = listen_unix(f"unix://{tmp_path}/{len(ended)}.sock", ListenOptions(**options))

        def run() -> None:
            channel = listener.accept()
            if channel is None:
                return
            try:
                if greets:
                    greet(channel)
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
def open_connection() -> Iterator[Callable[..., SocketConnection]]:
    """Connects to an address with `ConnectOptions` of the test's, and closes in the end."""
    made: list[SocketConnection] = []

    def start(address: str, **options: Any) -> SocketConnection:
        opened = connect_unix if address.startswith("unix:") else connect
        made.append(opened(address, connect_options(**options)))
        return made[-1]

    yield start
    for connection in made:
        connection.close()


@attrs.frozen
class Pair:
    """A raw client socket and the channel that serves it."""

    client: socket.socket
    channel: SocketChannel
    listener: SocketListener


@pytest.fixture
def connect_raw() -> Iterator[Callable[..., Pair]]:
    """Connects a raw socket to a real listener, greeted unless told otherwise."""
    made: list[Pair] = []

    def pair(*, greeted: bool = True, **options: Any) -> Pair:
        listener = listen("tcp://127.0.0.1:0", ListenOptions(**options))
        client = socket.create_connection(parse_address(listener.address), timeout=10)
        channel = listener.accept()
        assert channel is not None
        if greeted:
            channel.greeted()
        made.append(Pair(client, channel, listener))
        return made[-1]

    yield pair
    for one in made:
        one.client.close()
        one.channel.close()
        one.listener.close()


class RawClient:
    """A client that may say anything."""

    def __init__(self, port: int, *, greets: bool = True) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self._frames = FrameStream(ByteStream(self.socket))
        self._frames.stream.stall_timeout_s = 30
        if greets:
            header = messages.encode(HELLO)
            self.send(encode_head(1, len(header), 0) + header)
            answer = self._frames.read()
            while answer is not None and isinstance(answer[1], Starting):
                answer = self._frames.read()
            assert answer is not None
            assert isinstance(answer[1], Welcome)

    def send(self, data: bytes) -> None:
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            # The server has closed the connection already, which `outcome` tells.
            return

    def end(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)

    def outcome(self) -> str:
        """What the server did: the code of its refusal, ``closed``, or the type of another answer."""
        try:
            received = self._frames.read()
        except ConnectionError:
            return "closed"
        if received is None:
            return "closed"
        return received[1].code if isinstance(received[1], Refusal) else type(received[1]).__name__

    def close(self) -> None:
        self._frames.stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


@pytest.fixture
def raw_client() -> type[RawClient]:
    """Connects to a port as a client that may say anything: ``raw_client(port, greets=True)``."""
    return RawClient

"""The other side of a transport: a server, or an executor for transports without a server."""

from __future__ import annotations

import os
import platform
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import msgspec
import torch

from djinn.errors import DjinnError, ProtocolError, TransportError
from djinn.kinds import Connection, ConnectOptions, Transport
from djinn.session.session import Session
from djinn.wire.messages import PROTOCOL_VERSION, Batch, Hello, PeerHello, Welcome
from djinn_conformance.capabilities import connect_options, listen_options, listening_address, listens
from djinn_conformance.subjects import Subject, default_plugins, installed_plugins, select
from djinn_plugins.common.kinds.executor import Executor
from djinn_plugins.common.kinds.guard import Bounds, ProgramChecker
from djinn_plugins.common.kinds.transport import Channel, Listener, PeerConnection, SupportsPeers
from djinn_plugins.executor.mailbox import InboxRegistry
from djinn_plugins.executor.peer_exchange import PeerExchange, deliver
from djinn_plugins.executor.service import SessionService
from djinn_plugins.transport.resumable_channel import ResumableChannel, ResumableSessions

__all__ = ("InProcessServer", "open_executor", "other_connections", "served", "watch_over")

_PATIENCE_S = 2.0
_PROGRAM_BYTES = 2**33
LEASE_S = 10.0


def open_executor() -> Executor:
    """Open the default executor of a session, on the CPU if it supports that."""
    factory = default_plugins().find_executor("cpu").value
    devices = factory.devices()
    opened: Executor = factory.open("cpu" if "cpu" in devices else devices[0])
    return opened


@contextmanager
def other_connections(session: Session, open_connections: Callable[[], Sequence[Connection]], **settings: Any
                      ) -> Iterator[None]:
    """Give a running session other connections, without recovery, for the length of a block.

    Tensors created in the block belong to them, and must be gone at its end.

    Args:
        session: The session.
        open_connections: Opens them.
        **settings: Settings that differ in the block.
    """
    with session.lock:
        session.flush()
        before = session.backend
        opens = session.backend_opener(session.plugins.settings.changed(recovery="none", **settings))
        session.backend = opens(open_connections(), session.tape, session.released)
    try:
        yield
    finally:
        with session.lock:
            session.flush()
            session.backend.close()
            session.backend = before


class InProcessServer:
    """A server in this process that a transport can connect to.

    Args:
        subject: The transport.
        change: Replaces each accepted channel, to inject events.

    Attributes:
        address: The address to connect to.
        faults: Errors in serving threads, except for clients that left.
    """

    def __init__(self, subject: Subject, change: Callable[[Channel], Channel] = lambda channel: channel) -> None:
        self._subject = subject
        self._change = change
        self._resumable = ResumableSessions()
        self._transport: Transport = subject.registered.value
        self._listener: Listener | None = None
        self._executor: Executor | None = None
        self._channels: list[Channel] = []
        self._threads: list[threading.Thread] = []
        self._room = InboxRegistry()
        self.faults: list[BaseException] = []
        self.address = f"{self._transport.scheme}://"
        if listens(subject):
            self._listener = self._transport.listen(listening_address(subject), listen_options(subject))
            self._executor = open_executor()
            self.address = self._listener.address
            self._start(self._accept, self._listener)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.vanish()

    @property
    def listens(self) -> bool:
        """Whether sessions are transmitted, rather than staying within this process."""
        return self._listener is not None

    def connect(self) -> Connection:
        """Open a session."""
        opener = None if self._listener is not None else open_executor
        return self._transport.connect(self.address, connect_options(self._subject, open_executor=opener))

    def vanish(self) -> None:
        """Close everything on this side and wait for the serving threads."""
        if self._listener is not None:
            self._listener.close()
        self._room.close()
        for channel in list(self._channels):
            channel.close()
        for thread in list(self._threads):
            thread.join(_PATIENCE_S)
        if self._executor is not None:
            self._executor.close()
            self._executor = None

    def _start(self, target: object, argument: object) -> None:
        thread = threading.Thread(target=target, args=(argument,), daemon=True)  # type: ignore[arg-type]  # two signatures
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: Listener) -> None:
        while (accepted := listener.accept()) is not None:
            channel = self._change(accepted)
            self._channels.append(channel)
            self._start(self._serve, channel)

    def _serve(self, channel: Channel) -> None:
        is_taken_over = False
        try:
            is_taken_over = self._converse(channel)
        except TransportError:
            # A client that left, or `vanish`; only the client's side is tested.
            pass
        except DjinnError as error:
            self.faults.append(error)
        finally:
            if not is_taken_over:
                channel.close()

    def _converse(self, channel: Channel) -> bool:
        """Serve a connection; return whether an existing session has taken it over."""
        received = channel.receive()
        if received is None or self._executor is None:
            return False
        sequence, hello, _ = received
        session = secrets.token_hex(8)
        welcome = Welcome(PROTOCOL_VERSION, str(torch.__version__), platform.python_version(), sys.byteorder,
                          self._executor.device, session)
        if isinstance(hello, PeerHello):
            deliver(channel, sequence, hello, self._room, welcome)
            return False
        if not isinstance(hello, Hello):
            raise ProtocolError(f"The first message is a {type(hello).__name__}.")
        if hello.resume:
            self._resumable.find(hello.resume).take_up(channel, hello.answered, lambda received: _welcome_again(
                channel, sequence, msgspec.structs.replace(
                    welcome, resume=hello.resume, lease_s=LEASE_S, received=received)))
            return True
        mailbox = self._room.open()
        steady = ResumableChannel(channel, sequence, LEASE_S if hello.resumes else 0.0)
        key = self._resumable.add(steady)
        channel.send(sequence, msgspec.structs.replace(
            welcome, mailbox=mailbox.key, resume=key if hello.resumes else b"", lease_s=steady.lease_s,
            received=sequence))
        channel.greeted()
        self._channels.append(steady)
        post = PeerExchange(session, mailbox, self._carry)
        try:
            self._answer_all(steady, SessionService(self._executor, travels=True, post=post,
                                                     watch=watch_over(self._executor)))
        finally:
            self._resumable.remove(key)
            steady.close()
            post.close(_PATIENCE_S)
            self._room.remove(mailbox)
        return False

    def _carry(self, address: str, peer: PeerHello) -> PeerConnection:
        if not isinstance(self._transport, SupportsPeers):
            raise ProtocolError(f"{self._transport.name} carries nothing to {address}.")
        return self._transport.connect_peer(address, peer, ConnectOptions())

    def _answer_all(self, channel: Channel, service: SessionService) -> None:
        while (received := channel.receive()) is not None:
            sequence, batch, tensors = received
            if not isinstance(batch, Batch):
                raise ProtocolError(f"A {type(batch).__name__} instead of a batch.")
            result, data = service.handle(batch, tensors)
            if batch.wants_reply:
                channel.send(sequence, result, data)


def _welcome_again(channel: Channel, sequence: int, welcome: Welcome) -> None:
    channel.send(sequence, welcome)
    channel.greeted()


def watch_over(executor: Executor) -> ProgramChecker:
    """Create the watch of a server's default guard: everything that eager does must pass it."""
    plugins = default_plugins()
    shapes = plugins.choose("shapes", "meta")
    watch: ProgramChecker = plugins.choose("guard", "core").watch(Bounds(executor.device, _PROGRAM_BYTES), shapes)
    return watch


@contextmanager
def served(subject: Subject) -> Iterator[str]:
    """Serve a transport, from a separate process if it has a listening side; yield the address.

    Random operators draw from the default generator of their process, and programs sent over a transport run while the
    caller continues. In the caller's process, the two would take numbers from each other.
    """
    if not listens(subject):
        yield f"{subject.registered.value.scheme}://"
        return
    with subprocess.Popen(  # noqa: S603  # this interpreter, this module, and the name of a plugin
        [sys.executable, "-m", "djinn_conformance.harness", f"transport:{subject.registered.name}"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, sys.path)))},
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address, f"the server of {subject} ended with {process.wait()}"
        yield address
        # Closing its standard input ends the process.
        process.communicate()
    assert process.returncode == 0, f"the server of {subject} ended with {process.returncode}"


def _serve_until_input_ends(name: str) -> None:
    torch.set_num_threads(1)
    with InProcessServer(select(name, *installed_plugins())[0]) as place:
        print(place.address, flush=True)  # noqa: T201  # `served` reads it
        sys.stdin.read()
    if place.faults:
        sys.exit(f"The server's end met {place.faults}.")


if __name__ == "__main__":
    _serve_until_input_ends(sys.argv[1])

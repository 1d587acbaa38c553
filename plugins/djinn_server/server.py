"""The server: sessions over any transport, each with a thread and values of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from djinn.errors import DjinnError, ProtocolError, RefusedError, TransportError
from djinn.kinds.executor import Executor
from djinn.kinds.guard import Watch
from djinn.kinds.transport import Channel, Listener
from djinn.protocol.contents import ContentStore
from djinn.protocol.messages import Batch, Refusal
from djinn.protocol.service import SessionService
from djinn_server.greeting import greet
from djinn_server.memory import return_memory

__all__ = ("Server",)

_log = logging.getLogger("djinn.server")


@runtime_checkable
class _Pollable(Protocol):
    """What a channel may have beside the methods of `Channel`."""

    def is_ready(self) -> bool:
        """Whether `receive` would not wait."""


class Server:
    """Serves an executor to every connection that a listener accepts.

    What one connection sends, however malformed, ends at most that connection.

    Args:
        listener: Where clients connect; closed by `stop`.
        executor: Runs the programs of all sessions; closed by `stop`.
        token: What clients have to know; empty to let in everyone who can connect.
        keep_bytes: Room for uploads that are kept, so that their owners need not send them again; 0 keeps none.
        looks_ahead: Whether to run what a session will most likely ask for next while it asks for nothing.
        watch: Takes up a guard's watch at a new session.

    Concurrency:
        `start` and `stop` are called by one thread; every connection is served on its own.
    """

    def __init__(
        self, listener: Listener, executor: Executor, *, token: str = "", keep_bytes: int = 0,
        looks_ahead: bool = True, watch: Callable[[], Watch],
    ) -> None:
        self._listener = listener
        self._executor = executor
        self._token = token
        self._store = ContentStore(keep_bytes)
        self._looks_ahead = looks_ahead
        self._watch = watch
        self._lock = threading.Lock()
        self._connections: dict[threading.Thread, Channel] = {}
        self._count = 0
        self._stopping = False
        self._acceptor = threading.Thread(target=self._accept, name="djinn-accept", daemon=True)

    @property
    def address(self) -> str:
        """Address that clients connect to."""
        return self._listener.address

    @property
    def connections(self) -> int:
        """Number of connections that are being served."""
        return len(self._connections)

    @property
    def is_accepting(self) -> bool:
        """Whether new connections are accepted; ``False`` before `start`, after `stop`, and if the listener failed."""
        return self._acceptor.is_alive()

    def start(self) -> None:
        """Begin to accept connections."""
        self._acceptor.start()
        _log.info("serving %s on %s", self._executor.device, self.address)

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Stop accepting, end all sessions, and wait for their threads.

        Args:
            timeout_s: How long to wait for programs that are running; they cannot be interrupted.

        Returns:
            Whether every thread has ended.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._stopping = True
            serving = dict(self._connections)
        self._listener.close()
        for channel in serving.values():
            channel.close()
        threads = [thread for thread in (self._acceptor, *serving) if thread.ident is not None]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        busy = [thread.name for thread in threads if thread.is_alive()]
        if busy:
            _log.warning("still running after %g s: %s", timeout_s, ", ".join(busy))
            return False
        self._executor.close()
        _log.info("stopped")
        return True

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self.stop()

    def _accept(self) -> None:
        while (channel := self._listener.accept()) is not None:
            self._count += 1
            thread = threading.Thread(target=self._serve, args=(channel,), name=f"djinn-session-{self._count}",
                                      daemon=True)
            with self._lock:
                if self._stopping:
                    channel.close()
                    return
                self._connections[thread] = channel
            try:
                thread.start()
            except RuntimeError as error:
                _log.error("%s: no thread could be started: %s", channel.peer, error)
                channel.close()
                self._forget(thread)

    def _forget(self, thread: threading.Thread) -> None:
        with self._lock:
            self._connections.pop(thread, None)

    def _serve(self, channel: Channel) -> None:
        try:
            self._converse(channel)
        except DjinnError as error:
            if isinstance(error, TransportError) and not isinstance(error, RefusedError):
                _log.info("%s: %s", channel.peer, _printable(error))
            else:
                _log.warning("%s: refused: %s", channel.peer, _printable(error))
                self._refuse(channel, Refusal(error.code, error.summary[:4000], error.hint[:4000]))
        except Exception:  # noqa: BLE001  # logged whole; it must end neither the server nor another session
            _log.exception("%s: the session failed", channel.peer)
            self._refuse(channel, Refusal(DjinnError.code, "The session failed inside the server.",
                                          "See the server's log; report it if it happens again."))
        finally:
            channel.close()
            self._forget(threading.current_thread())

    def _refuse(self, channel: Channel, refusal: Refusal) -> None:
        try:
            channel.send(0, refusal)
        except TransportError as error:
            _log.info("%s: left before it could be told: %s", channel.peer, error)

    def _converse(self, channel: Channel) -> None:
        greeted = greet(channel, self._executor, self._token, self._store)
        if greeted is None:
            return
        session, contents = greeted
        _log.info("%s: session %s begins", channel.peer, session)
        service = SessionService(self._executor, travels=True, contents=contents, watch=self._watch())
        polled = channel if self._looks_ahead and isinstance(channel, _Pollable) else None
        try:
            while _answer_next(channel, service):
                while polled and service.can_look_ahead and not polled.is_ready() and service.look_ahead():
                    pass
        finally:
            held = service.live_handles
            service.close()
            del service, contents, greeted
            return_memory()
            _log.info("%s: session %s ends, %d values dropped", channel.peer, session, held)


def _answer_next(channel: Channel, service: SessionService) -> bool:
    """Carry out one batch. Its tensors live in this call only, not while the next one is awaited."""
    received = channel.receive()
    if received is None:
        return False
    sequence, message, tensors = received
    if not isinstance(message, Batch):
        raise ProtocolError(f"A {type(message).__name__} where a Batch was expected.")
    result, data = service.handle(message, tensors)
    if message.wants_reply:
        channel.send(sequence, result, data)
    return True


def _printable(error: DjinnError) -> str:
    """Text of an error, which may repeat what a client sent: no control characters get into the log."""
    return "".join(character if character.isprintable() else "?" for character in str(error))

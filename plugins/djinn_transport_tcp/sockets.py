"""Bytes in order over a connected socket, and how long to wait for them."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

__all__ = ("KEEPALIVE", "MAX_CALL_BYTES", "MAX_CALL_VIEWS", "SILENCE_S", "ByteStream", "configure")

P = ParamSpec("P")
T = TypeVar("T")

KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPALIVE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds and counts; an idle connection whose other end has vanished ends after 25 s. Names differ per platform."""
SILENCE_S = 20.0
"""How long sent bytes may stay unacknowledged by the other machine."""
TICK_S = 1.0
"""How often a waiting call looks at the clock and at the state of the connection."""
MAX_CALL_BYTES = 2**30
"""Largest transfer asked of one system call; some systems refuse more than ``INT_MAX``."""
JOINED_BYTES = 2**16
"""Where the system cannot gather, neighbours up to this size are sent as one piece."""


def _max_views() -> int:
    try:
        limit = os.sysconf("SC_IOV_MAX")
    except (AttributeError, ValueError, OSError):
        limit = -1
    return min(limit, 1024) if limit > 0 else 16


MAX_CALL_VIEWS = _max_views()


def configure(sock: socket.socket, *, user_timeout_s: float | None = None) -> None:
    """Send small frames at once, and notice an end that has vanished.

    Args:
        sock: A connected TCP socket.
        user_timeout_s: Have the system give up when sent bytes make no way for this long. Only for an end whose other
            side always reads: Linux also gives up on a living side whose receive window stays closed that long.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wanted = dict(KEEPALIVE)
    if user_timeout_s is not None:
        wanted["TCP_USER_TIMEOUT"] = max(1, int(user_timeout_s * 1000))
    for name, value in wanted.items():
        option = getattr(socket, name, None)
        if option is not None:
            # A system may know the name and not the option; the connection works without, only slower to give up.
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, option, value)


def is_silent(sock: socket.socket, silence_s: float) -> bool:
    """Whether the other machine has stopped to acknowledge what was sent; ``False`` where the system cannot tell.

    A side that is alive and merely does not read acknowledges everything in flight and every window probe.

    Source:
        ``struct tcp_info`` of Linux: ``tcpi_probes`` at 3, ``tcpi_unacked`` at 24, ``tcpi_last_ack_recv`` (ms) at 56.
    """
    if not sys.platform.startswith("linux"):
        return False
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
    if len(info) < 60:
        return False
    (unacknowledged,) = struct.unpack_from("=I", info, 24)
    (last_acknowledged_ms,) = struct.unpack_from("=I", info, 56)
    return (unacknowledged > 0 or info[3] > 1) and last_acknowledged_ms >= silence_s * 1000


class ByteStream:
    """A connected TCP socket.

    Attributes:
        bytes_sent: Bytes handed to the system.
        bytes_received: Bytes taken from it.
        stall_timeout_s: How long a transfer may stand still; ``None`` for as long as the connection lives.
        deadline: Time on the monotonic clock at which all transfers end, or ``None``.
        silence_s: How long sent bytes may stay unacknowledged.

    Concurrency:
        One thread at a time, except `close`.
    """

    def __init__(self, sock: socket.socket, *, gathers: bool | None = None) -> None:
        self._socket = sock
        self._owner = os.getpid()
        self._busy = threading.Lock()
        self._closed = False
        self._timeout_s = -1.0
        self._gathers = hasattr(sock, "sendmsg") if gathers is None else gathers
        self._scatters = hasattr(sock, "recvmsg_into") if gathers is None else gathers
        self.bytes_sent = 0
        self.bytes_received = 0
        self.stall_timeout_s: float | None = None
        self.deadline: float | None = None
        self.silence_s = SILENCE_S

    def wait(self) -> bool:
        """Wait until there is something to read, and read nothing: an interrupt here loses no byte.

        Returns:
            ``False`` at the end of the stream.

        Raises:
            TimeoutError: Nothing came in time.
            OSError: The connection broke.
        """
        return bool(self._run(self._socket.recv, 1, socket.MSG_PEEK))

    def receive(self, views: Sequence[memoryview]) -> int:
        """Fill the views in order.

        Returns:
            Bytes received: less than asked for only at the end of the stream.

        Raises:
            TimeoutError: The transfer stood still for too long.
            OSError: The connection broke.
        """
        pending = _Pending(views)
        before = self.bytes_received
        while chunk := pending.next():
            if len(chunk) > 1 and self._scatters:
                count = self._run(self._socket.recvmsg_into, chunk)[0]
            else:
                count = self._run(self._socket.recv_into, chunk[0])
            if count == 0:
                break
            self.bytes_received += count
            pending.advance(count)
        return self.bytes_received - before

    def send(self, views: Sequence[memoryview]) -> None:
        """Send the views in order.

        Raises:
            TimeoutError: The transfer stood still for too long.
            OSError: The connection broke.
        """
        pending = _Pending(views)
        while chunk := pending.next():
            if self._gathers:
                count = self._run(self._socket.sendmsg, chunk)
            else:
                count = self._run(self._socket.send, _joined(chunk))
            self.bytes_sent += count
            pending.advance(count)

    def end_sending(self) -> None:
        """Tell the other side that nothing more will come."""
        self._run(self._socket.shutdown, socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection and wake a thread that waits in it. Never raises, may be called from another thread."""
        self._closed = True
        if os.getpid() == self._owner:
            # A forked child shares the connection: it may let go of its copy, and must not end the parent's.
            with contextlib.suppress(OSError):  # already disconnected, which is what is wanted
                self._socket.shutdown(socket.SHUT_RDWR)
        if self._busy.acquire(blocking=False):
            try:
                self._socket.close()
            finally:
                self._busy.release()

    def _run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make a system call as soon as it can do something."""
        if os.getpid() != self._owner:
            raise OSError("it belongs to the process that this one was forked from")
        waited_s = 0.0
        try:
            with self._busy:
                if self._closed:
                    raise OSError("it was closed")
                while True:
                    self._set_timeout()
                    try:
                        return call(*args, **kwargs)
                    except TimeoutError as error:
                        # The system's own ETIMEDOUT, or one that a signal handler of the user raises, is no tick.
                        if error.errno is not None or error.args != ("timed out",):
                            raise
                    waited_s += self._timeout_s
                    self._check_patience(waited_s)
        finally:
            if self._closed:
                # `close` found the socket in use and left it to this thread.
                self._socket.close()

    def _set_timeout(self) -> None:
        tick = TICK_S if self.stall_timeout_s is None else min(TICK_S, self.stall_timeout_s)
        if self.deadline is not None:
            tick = max(0.001, min(tick, self.deadline - time.monotonic()))
        if tick != self._timeout_s:
            self._socket.settimeout(tick)
            self._timeout_s = tick

    def _check_patience(self, waited_s: float) -> None:
        if self.deadline is not None and time.monotonic() >= self.deadline:
            raise TimeoutError("it took too long")
        if self.stall_timeout_s is not None and waited_s >= self.stall_timeout_s:
            raise TimeoutError(f"nothing moved for {self.stall_timeout_s:g} s")
        if waited_s >= self.silence_s and is_silent(self._socket, self.silence_s):
            raise TimeoutError(f"the other machine has not acknowledged anything for {self.silence_s:g} s")


class _Pending:
    """Views that are still to be transferred, handed out in portions that one system call takes."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = [view for view in views if len(view)]
        self._first = 0

    def next(self) -> list[memoryview]:
        if self._first + 1 >= len(self._views):
            return [view[:MAX_CALL_BYTES] for view in self._views[self._first:]]
        chunk: list[memoryview] = []
        room = MAX_CALL_BYTES
        for view in self._views[self._first:self._first + MAX_CALL_VIEWS]:
            chunk.append(view[:room])
            room -= len(chunk[-1])
            if not room:
                break
        return chunk

    def advance(self, count: int) -> None:
        while count:
            view = self._views[self._first]
            if count < len(view):
                self._views[self._first] = view[count:]
                return
            count -= len(view)
            self._first += 1


def _joined(chunk: Sequence[memoryview]) -> memoryview | bytes:
    """Take what one packet should carry together: the first view, with its neighbours if they are small."""
    length = 0
    for index, view in enumerate(chunk):
        length += len(view)
        if length > JOINED_BYTES:
            return b"".join(chunk[:index]) if index else view
    return b"".join(chunk)

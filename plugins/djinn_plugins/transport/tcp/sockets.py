"""Byte streams over connected sockets, with timeouts."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from time import monotonic, perf_counter, sleep
from typing import Any, TypeAlias, TypeVar

from djinn_plugins.transport.tcp.tls import TlsSocket

__all__ = ("AHEAD_BYTES", "KEEPALIVE", "MAX_CALL_BYTES", "MAX_CALL_VIEWS", "SILENCE_S", "ByteStream", "StalledError",
           "StreamSocket", "configure")

T = TypeVar("T")
StreamSocket: TypeAlias = socket.socket | TlsSocket

KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPALIVE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 2}
"""Seconds and counts; an idle connection whose other end has vanished ends after 15 s. Names differ per platform.

``TCP_USER_TIMEOUT`` is not set: Linux would use it instead of the count, and would drop a living peer whose receive
window stays closed for that long. `SILENCE_S` serves that purpose instead.
"""
SILENCE_S = 15.0
"""How long sent bytes may stay unacknowledged by the other machine."""
ANSWER_MS = 500
"""How long an acknowledgement may be on its way."""
_TCP_INFO = struct.Struct("=3xB20xI16xI8xI")
TICK_S = 1.0
"""How often a waiting call checks the clock and the state of the connection."""
MAX_CALL_BYTES = 2**30
"""Largest transfer of one system call; some systems refuse more than ``INT_MAX``."""
JOINED_BYTES = 2**16
"""Where the system cannot gather, neighbouring views up to this size are joined before sending."""
AHEAD_BYTES = 2**16
"""Data is read ahead in portions up to this size, so that a small frame takes one call."""
PEEK_BYTES = 2**20
DIRECT_BYTES = 2**14
"""From this size on, bytes are received directly into their destination."""
UNIX_BUFFER_BYTES = 2**20
"""Socket buffers of a connection on one machine; with the system's default, the two ends wait for each other."""
PACE_BYTES_PER_S = 1024
"""Slower than any network that is usable for a session."""
PACE_PART = 0.75
"""Part of the stall timeout after which the rate is checked, so that a trickle of bytes gets no more time."""
KEEPS_UP_S = 0.001
"""A connection that accepts nothing for this long does not keep up with large transfers."""


def _max_views() -> int:
    try:
        limit = os.sysconf("SC_IOV_MAX")
    except (AttributeError, ValueError, OSError):
        limit = -1
    return min(limit, 1024) if limit > 0 else 16


MAX_CALL_VIEWS = _max_views()


def configure(sock: socket.socket) -> None:
    """Configure a connected socket to send small frames at once, and to detect a vanished peer."""
    if not is_tcp(sock):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER_BYTES)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        option = getattr(socket, name, None)
        if option is not None:
            # A system may know the name but not the option; the connection works without it, but gives up later.
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, option, value)


def is_tcp(sock: StreamSocket) -> bool:
    """Whether the other end may be on another machine."""
    return sock.family in {socket.AF_INET, socket.AF_INET6}


SPIN_S = 50e-6
"""How long `ByteStream.wait` polls before it sleeps; being woken by the system takes as long."""


def _is_ready(sock: StreamSocket, *, to_write: bool, timeout_s: float = 0) -> bool:
    """Whether a socket can be read or written. Uses `poll` if available, because `select` is limited to few sockets."""
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(sock, select.POLLOUT if to_write else select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))
    return any(select.select([] if to_write else [sock], [sock] if to_write else [], [], timeout_s))


def _is_half_closed(sock: StreamSocket) -> bool:
    """Whether the other end has stopped sending. Where the system does not report that, unread bytes hide it."""
    if hasattr(select, "POLLRDHUP"):
        poll = select.poll()
        poll.register(sock, select.POLLRDHUP)
        return bool(poll.poll(0))
    if not _is_ready(sock, to_write=False):
        return False
    return not (sock.peek() if isinstance(sock, TlsSocket) else sock.recv(1, socket.MSG_PEEK))


def is_silent(sock: StreamSocket, silence_s: float) -> bool:
    """Whether the other machine has stopped acknowledging sent data; ``False`` where the system cannot tell.

    A peer that is alive but does not read acknowledges data, though it may discard it. The system then sends the data
    again, less and less often. So only data that was sent after the last acknowledgement can be unanswered.

    Source:
        ``struct tcp_info`` of Linux: ``tcpi_probes`` at 3, ``tcpi_unacked`` at 24, ``tcpi_last_data_sent`` (ms) at 44,
        ``tcpi_last_ack_recv`` (ms) at 56.
    """
    if not sys.platform.startswith("linux") or not is_tcp(sock):
        return False
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    if len(info) < _TCP_INFO.size:
        return False
    probes: int
    probes, unacknowledged, sent_ms, acknowledged_ms = _TCP_INFO.unpack(info)
    if acknowledged_ms < silence_s * 1000:
        return False
    return probes > 1 or (unacknowledged > 0 and ANSWER_MS <= sent_ms < acknowledged_ms)


class _Direction:
    """One direction of a connection: the thread that uses it, and the system's timeout of its calls."""

    def __init__(self, sock: StreamSocket, option: int) -> None:
        self.busy = threading.Lock()
        self.timeout_s = -1.0
        self._socket = sock
        self._option = option

    def set_timeout(self, timeout_s: float) -> None:
        """Set the socket's own timeout, which saves a call of `select` before each other call."""
        self.timeout_s = timeout_s
        if isinstance(self._socket, TlsSocket):
            self._socket.set_wait(self._option, timeout_s)
            return
        value = (int(timeout_s * 1000) if sys.platform == "win32"
                 else struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6)))
        self._socket.setsockopt(socket.SOL_SOCKET, self._option, value)


class ByteStream:
    """A connected stream socket.

    Args:
        sock: The socket.
        gathers: Whether several views are sent by one call; by default, if the socket can.
        received: Bytes that were read from it earlier, elsewhere.

    Attributes:
        bytes_sent: Bytes handed to the system.
        bytes_received: Bytes taken from it.
        stall_timeout_s: How long a transfer may stall; ``None`` for as long as the connection lives.
        deadline: Time on the monotonic clock at which all transfers end, or ``None``.
        keeps_pace: Whether an average rate below `PACE_BYTES_PER_S` for that long also counts as a stall.
        silence_s: How long sent bytes may stay unacknowledged.
        is_unwanted: Whether the transfers are no longer needed; called while one stalls.
        is_torn: Bytes were lost in an interrupted `wait`; the connection cannot be used any more.

    Concurrency:
        One thread at a time may send and one receive; `close` may be called by any.
    """

    def __init__(self, sock: StreamSocket, *, gathers: bool | None = None, received: bytes = b"") -> None:
        if not isinstance(sock, TlsSocket):
            sock.settimeout(None)
        self._socket = sock
        self._owner = os.getpid()
        self._sending = _Direction(sock, socket.SO_SNDTIMEO)
        self._receiving = _Direction(sock, socket.SO_RCVTIMEO)
        self._closed = False
        self._gathers = hasattr(sock, "sendmsg") if gathers is None else gathers
        self._ahead = memoryview(bytearray(max(AHEAD_BYTES, len(received))))
        self._ahead[:len(received)] = received
        self._first = 0
        self._last = len(received)
        self.bytes_sent = 0
        self.bytes_received = 0
        self.stall_timeout_s: float | None = None
        self.deadline: float | None = None
        self.keeps_pace = False
        self._paced_from = (0.0, 0)
        self.silence_s = SILENCE_S
        self.is_unwanted: Callable[[], bool] | None = None
        self.is_torn = False

    def wait(self) -> bool:
        """Wait until there is something to read, and read it ahead. An interrupt during the wait loses no byte.

        Returns:
            ``False`` at the end of the stream.

        Raises:
            TimeoutError: Nothing arrived in time.
            OSError: The connection broke.
        """
        if self._first < self._last:
            return True
        self._first = self._last = 0
        self._ahead[0] = 0
        until = perf_counter() + SPIN_S
        while not self.is_ready() and perf_counter() < until:
            pass
        try:
            return self._read_ahead() > 0
        except BaseException:
            # No frame begins with zero. So bytes arrived, and their number is unknown if an interrupt came right after.
            self.is_torn = self._ahead[0] != 0
            raise

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._socket.fileno()

    def read_now(self) -> int:
        """Read the bytes that have arrived ahead, at least one; 0 at the end of the stream.

        Raises:
            BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError: It would have to wait.
            OSError: The connection broke.
        """
        self._check_usable()
        view = self._room()
        count = (self._socket.recv_into_now(view) if isinstance(self._socket, TlsSocket)
                 else self._socket.recv_into(view, 0, socket.MSG_DONTWAIT))
        return self._arrived(count)

    def send_now(self, data: bytes) -> int:
        """Send what fits, at least a byte. Raises as `read_now` does."""
        self._check_usable()
        count = (self._socket.send_now(data) if isinstance(self._socket, TlsSocket)
                 else self._socket.send(data, socket.MSG_DONTWAIT))
        self.bytes_sent += count
        return count

    def skip_now(self) -> int:
        """Drop the bytes that have arrived, at least one; 0 at the end of the stream. Raises as `read_now` does."""
        self._check_usable()
        return (self._socket.skip_now(AHEAD_BYTES) if isinstance(self._socket, TlsSocket)
                else len(self._socket.recv(AHEAD_BYTES, socket.MSG_DONTWAIT)))

    def end_sending_now(self) -> None:
        """Signal to the other side that no more data follows."""
        self._check_usable()
        self._socket.shutdown(socket.SHUT_WR)

    @property
    def ahead(self) -> memoryview:
        """The bytes that were read ahead."""
        return self._ahead[self._first:self._last]

    @property
    def unread_bytes(self) -> int:
        """Bytes that were received and not taken yet."""
        return self._last - self._first

    def begin_pace(self) -> None:
        """Start measuring the rate of a transfer that begins now."""
        self._paced_from = monotonic(), self.bytes_received

    def check_pace(self) -> None:
        """Check the rate: a peer that sends a byte now and then never stalls, but its transfer would never end."""
        if not self.keeps_pace or self.stall_timeout_s is None:
            return
        now, (since, count) = monotonic(), self._paced_from
        if now - since < PACE_PART * self.stall_timeout_s:
            return
        if self.bytes_received - count < PACE_BYTES_PER_S * (now - since):
            raise TimeoutError(f"it came at less than {PACE_BYTES_PER_S} bytes a second")
        self._paced_from = now, self.bytes_received

    def is_ready(self) -> bool:
        """Whether a read would not wait: there are bytes, or the stream has ended."""
        if self._first < self._last or self._closed:
            return True
        try:
            if isinstance(self._socket, TlsSocket) and self._socket.pending():
                return True
            return _is_ready(self._socket, to_write=False)
        except (OSError, ValueError):
            # The next read shows the error.
            return True

    def wait_with(self, descriptor: int, timeout_s: float) -> bool:
        """Wait until there are bytes, until a descriptor is readable, or for some time.

        Returns:
            Whether the descriptor is readable.
        """
        if self.is_ready():
            return False
        # The next read shows the error of the connection.
        with contextlib.suppress(OSError, ValueError):
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            poll.register(descriptor, select.POLLIN)
            return any(ready == descriptor for ready, _ in poll.poll(timeout_s * 1000))
        return False

    def is_writable(self) -> bool:
        """Whether a small message can be sent without waiting."""
        try:
            return not self._closed and _is_ready(self._socket, to_write=True)
        except (OSError, ValueError):
            # The next message shows the error.
            return False

    def is_gone(self) -> bool:
        """Whether the other side sends nothing more; earlier data may still be unread."""
        if self._closed:
            return True
        try:
            return _is_half_closed(self._socket)
        except (OSError, ValueError):
            # The next read shows the error of the connection.
            return True

    def wait_until_gone(self, timeout_s: float) -> None:
        """Wait until `is_gone`, or about ``timeout_s``, while other threads can use the stream."""
        if self._closed:
            return
        if not hasattr(select, "POLLRDHUP"):
            sleep(timeout_s)
            return
        # A socket that was closed meanwhile is gone, too.
        with contextlib.suppress(OSError, ValueError):
            poll = select.poll()
            poll.register(self._socket, select.POLLRDHUP)
            poll.poll(timeout_s * 1000)

    def ends_with(self, tail: bytes) -> bool:
        """Whether the unread data ends with these bytes; ``False`` if that cannot be determined."""
        if self._closed or isinstance(self._socket, TlsSocket):
            return False
        try:
            coming = self._socket.recv(PEEK_BYTES, socket.MSG_PEEK)
        except (OSError, ValueError):
            # The next read shows the error of the connection.
            coming = b""
        return (bytes(self._ahead[self._first:self._last]) + coming).endswith(tail)

    def take(self, length: int) -> memoryview:
        """Receive at most `AHEAD_BYTES`.

        Returns:
            ``length`` bytes, less only at the end of the stream. The next receive overwrites them.

        Raises:
            TimeoutError: The transfer stalled for too long.
            OSError: The connection broke.
        """
        while self._last - self._first < length:
            if not self._read_ahead():
                length = self._last - self._first
            self.check_pace()
        first = self._first
        self._first = end = first + length
        return self._ahead[first:end]

    def receive(self, views: Sequence[memoryview]) -> int:
        """Fill the views in order.

        Returns:
            Bytes received: less than asked for only at the end of the stream.

        Raises:
            TimeoutError: The transfer stalled for too long.
            OSError: The connection broke.
        """
        received = 0
        for view in views:
            filled = 0
            while missing := len(view) - filled:
                if held := min(missing, self._last - self._first):
                    view[filled:filled + held] = self.take(held)
                    count = held
                elif missing < DIRECT_BYTES:
                    if not self._read_ahead():
                        return received
                    self.check_pace()
                    continue
                else:
                    count = self._run(self._receiving, self._socket.recv_into, view[filled:filled + MAX_CALL_BYTES], 0,
                                      socket.MSG_WAITALL)
                    self.bytes_received += count
                    self.check_pace()
                if count == 0:
                    return received
                filled += count
                received += count
        return received

    def send(self, views: Sequence[memoryview]) -> None:
        """Send the views in order.

        Raises:
            TimeoutError: The transfer stalled for too long.
            OSError: The connection broke.
        """
        if len(views) == 1:
            # The case of most frames, handled without a list of parts.
            view = views[0]
            count = self._run(self._sending, self._socket.send, view if len(view) <= MAX_CALL_BYTES
                              else view[:MAX_CALL_BYTES])
            self.bytes_sent += count
            if count == len(view):
                return
            views = [view[count:]]
        pending = _Pending(views)
        while chunk := pending.next():
            if self._gathers:
                count = self._run(self._sending, self._socket.sendmsg, chunk)
            else:
                count = self._run(self._sending, self._socket.send, _joined(chunk))
            self.bytes_sent += count
            pending.advance(count)

    def send_ready(self, views: Sequence[memoryview]) -> list[memoryview]:
        """Send as much as the connection takes while it keeps up.

        Returns:
            The rest.

        Raises:
            OSError: The connection broke.
        """
        pending = _Pending(views)
        if not self._gathers or not hasattr(socket, "MSG_DONTWAIT"):
            self.send(views)
            return []
        while chunk := pending.next():
            try:
                count = self._run(self._sending, self._send_at_once, chunk)
            except _FullError:
                if sum(map(len, chunk)) < DIRECT_BYTES or not _is_ready(
                    self._socket, to_write=True, timeout_s=KEEPS_UP_S
                ):
                    break
                continue
            self.bytes_sent += count
            pending.advance(count)
        return pending.rest()

    @property
    def is_ours(self) -> bool:
        """Whether this process may use the connection; ``False`` in a process forked from its owner."""
        return os.getpid() == self._owner

    def detach(self) -> tuple[int, bytes]:
        """Release the connection without closing it.

        Returns:
            Its descriptor, and the bytes that were read ahead.

        Raises:
            OSError: It was closed, or cannot be given away.
        """
        if self._closed or isinstance(self._socket, TlsSocket):
            raise OSError("it was closed" if self._closed else "it is encrypted")
        self._closed = True
        return self._socket.detach(), bytes(self._ahead[self._first:self._last])

    @property
    def certificate_expires_s(self) -> float | None:
        """When the other end's certificate expires, in seconds since 1970; ``None`` if it has presented none."""
        return self._socket.certificate_expires_s() if isinstance(self._socket, TlsSocket) else None

    def go_on_plain(self) -> None:
        """Continue without TLS, before any of its handshake."""
        if isinstance(self._socket, TlsSocket):
            self._socket = sock = self._socket.detach_plain()
            sock.settimeout(None)
            self._sending, self._receiving = _Direction(sock, socket.SO_SNDTIMEO), _Direction(sock, socket.SO_RCVTIMEO)

    def end_sending(self) -> None:
        """Signal to the other side that no more data follows."""
        self._run(self._sending, self._socket.shutdown, socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection and wake threads that wait in it. Never raises; may be called from another thread."""
        self._closed = True
        if self.is_ours:
            # A forked child shares the connection: it may close its copy, but must not end the parent's.
            with contextlib.suppress(OSError):  # already disconnected
                self._socket.shutdown(socket.SHUT_RDWR)
        self._let_go()

    def _let_go(self) -> None:
        """Release the socket, unless a thread still uses it: then that thread releases it."""
        for direction in (self._sending, self._receiving):
            if not direction.busy.acquire(blocking=False):
                return
            direction.busy.release()
        self._socket.close()

    def _read_ahead(self) -> int:
        """Read the available data, at least one byte; 0 at the end of the stream."""
        if self._first == self._last:
            self._first = 0
            self._last = count = self._run(self._receiving, self._socket.recv_into, self._ahead)
            self.bytes_received += count
            return count
        return self._arrived(self._run(self._receiving, self._socket.recv_into, self._room()))

    def _room(self) -> memoryview:
        """Return the free space for reading ahead."""
        held = self._last - self._first
        self._ahead[:held] = bytes(self._ahead[self._first:self._last])
        self._first, self._last = 0, held
        return self._ahead[held:]

    def _arrived(self, count: int) -> int:
        self._last += count
        self.bytes_received += count
        return count

    def _check_usable(self) -> None:
        if self._closed:
            raise OSError("it was closed")

    def _send_at_once(self, chunk: Sequence[memoryview]) -> int:
        try:
            return self._socket.sendmsg(chunk, (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            raise _FullError from None

    def _run(self, direction: _Direction, call: Callable[..., T], *args: Any) -> T:
        """Make a system call as soon as the socket is ready for it."""
        if os.getpid() != self._owner:
            raise OSError("it belongs to the process that this one was forked from")
        waited_s = 0.0
        try:
            with direction.busy:
                if self._closed:
                    raise OSError("it was closed")
                while True:
                    tick_s = TICK_S if self.stall_timeout_s is None and self.deadline is None else self._tick_s()
                    if tick_s != direction.timeout_s:
                        direction.set_timeout(tick_s)
                    try:
                        return call(*args)
                    except (BlockingIOError, TimeoutError) as error:
                        # The system's own ETIMEDOUT, or one raised by a user's signal handler, is not the end of a
                        # tick.
                        if not isinstance(error, BlockingIOError) and getattr(error, "winerror", 0) != 10060:
                            raise
                    waited_s += tick_s
                    self._check_patience(waited_s)
        finally:
            if self._closed:
                # `close` found the socket in use and left its release to this thread.
                self._let_go()

    def _tick_s(self) -> float:
        tick = TICK_S if self.stall_timeout_s is None else min(TICK_S, self.stall_timeout_s)
        return tick if self.deadline is None else max(0.001, min(tick, self.deadline - monotonic()))

    def _check_patience(self, waited_s: float) -> None:
        if self.deadline is not None and monotonic() >= self.deadline:
            raise TimeoutError("it took too long")
        if self.stall_timeout_s is not None and waited_s >= self.stall_timeout_s:
            raise StalledError(f"nothing moved for {self.stall_timeout_s:g} s")
        if self.is_unwanted is not None and self.is_unwanted():
            raise TimeoutError("nobody waits for it any more")
        if waited_s >= self.silence_s and is_silent(self._socket, self.silence_s):
            raise TimeoutError(f"the other machine has not acknowledged anything for {self.silence_s:g} s")


class StalledError(TimeoutError):
    """Nothing moved for the whole stall timeout; the connection may be alive."""


class _FullError(Exception):
    """The system accepts no more bytes at the moment."""


class _Pending:
    """Views that remain to be transferred, split into portions for one system call each."""

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

    def rest(self) -> list[memoryview]:
        return self._views[self._first:]


def _joined(chunk: Sequence[memoryview]) -> memoryview | bytes:
    """Join the data that one packet should carry: the first view, with its neighbours if they are small."""
    length = 0
    for index, view in enumerate(chunk):
        length += len(view)
        if length > JOINED_BYTES:
            return b"".join(chunk[:index]) if index else view
    return b"".join(chunk)

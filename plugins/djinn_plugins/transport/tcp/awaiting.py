"""Handshakes in an event loop: those of many clients occupy no threads."""

from __future__ import annotations

import contextlib
import math
import ssl
from collections.abc import Callable
from time import monotonic
from typing import TypeVar

import anyio
import anyio.lowlevel

from djinn_plugins.transport.tcp.sockets import ByteStream, StalledError
from djinn_plugins.transport.tcp.stream import FrameStream

__all__ = ("await_frame", "linger", "send_all")

T = TypeVar("T")


async def await_frame(frames: FrameStream) -> None:
    """Wait until a frame without a body can be read without waiting, or the stream has ended.

    The stream's time limits apply, as to blocking reads.

    Raises:
        TimeoutError: It stalled, or took too long.
        OSError: The connection broke.
    """
    await anyio.lowlevel.checkpoint()
    stream = frames.stream
    while not frames.is_whole():
        count = await _within_limits(stream, stream.read_now, to_write=False)
        if count == 0:
            break
        stream.check_pace()


async def send_all(stream: ByteStream, data: bytes) -> None:
    """Send bytes.

    Raises:
        TimeoutError: It stalled, or took too long.
        OSError: The connection broke.
    """
    await anyio.lowlevel.checkpoint()
    sent = 0
    while sent < len(data):
        sent += await _within_limits(stream, lambda: stream.send_now(data[sent:]), to_write=True)  # noqa: B023  # called at once


async def linger(stream: ByteStream, most_s: float, most_bytes: int) -> None:
    """Let the other side read what was sent last: closing with unread bytes would discard it in transit."""
    # Its further errors do not matter.
    with contextlib.suppress(OSError), anyio.move_on_after(most_s):
        stream.end_sending_now()
        while most_bytes > 0 and (count := await _when_ready(stream, stream.skip_now, to_write=False)):
            most_bytes -= count


async def _within_limits(stream: ByteStream, call: Callable[[], T], *, to_write: bool) -> T:
    left_s = math.inf if stream.deadline is None else max(0.0, stream.deadline - monotonic())
    stall_s = math.inf if stream.stall_timeout_s is None else stream.stall_timeout_s
    with anyio.move_on_after(min(left_s, stall_s)):
        return await _when_ready(stream, call, to_write=to_write)
    raise TimeoutError("it took too long") if left_s <= stall_s else StalledError(f"nothing moved for {stall_s:g} s")


async def _when_ready(stream: ByteStream, call: Callable[[], T], *, to_write: bool) -> T:
    """Make a call that does not wait, again each time the socket has become ready for it."""
    while True:
        try:
            return call()
        except ssl.SSLWantReadError:
            writes = False
        except ssl.SSLWantWriteError:
            writes = True
        except BlockingIOError:
            writes = to_write
        await (anyio.wait_writable(stream) if writes else anyio.wait_readable(stream))

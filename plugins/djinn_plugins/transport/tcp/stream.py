"""Frames over a byte stream, used by both ends of a connection."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from djinn.errors import ProtocolError
from djinn.wire.messages import Message, TensorHeader
from djinn_plugins.common.memory.tensor_bytes import buffer_of, size_bytes
from djinn_plugins.common.wire.frames import (
    MAX_BODY_BYTES,
    MAX_HEADER_BYTES,
    SHORT_HEAD,
    body_length,
    decode_head,
    decode_header,
    head_bytes,
    head_for,
    padding,
    tensor_headers,
)
from djinn_plugins.common.wire.short_messages import encode
from djinn_plugins.transport.tcp.memory import Reserve
from djinn_plugins.transport.tcp.sockets import AHEAD_BYTES, ByteStream

__all__ = ("FrameStream", "views_of")

CHUNK_BYTES = 2**18
"""Initial allocation for a header, before any of it has arrived."""
GROUP_BYTES = 2**20
GROUP_TENSORS = 64
"""Tensors are allocated in groups, each when it is received: a group ends when it has this many, or this many bytes."""
_ZEROS = memoryview(bytes(64))


class FrameStream:
    """Reads and writes whole frames.

    Attributes:
        stream: The byte stream.
        max_header_bytes: Largest header accepted.
        max_body_bytes: Largest body accepted.
        admit_body: Called before a body is read, if set; see
        `djinn_plugins.common.kinds.transport.SupportsReceiveLimit`. frame_end_bytes: Value of the stream's
        ``bytes_received`` when the last frame with tensors is complete. digests: Whether to compute digests of received
        frames. digest: Digest of the last received header and the length of its body. It is meaningless outside this
        process,
            and other processes cannot construct a header with the same digest.

    Concurrency:
        One thread at a time.
    """

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self.max_header_bytes = MAX_HEADER_BYTES
        self.max_body_bytes = MAX_BODY_BYTES
        self.admit_body: Callable[[int], None] | None = None
        self.digests = False
        self.digest = 0
        self.frame_end_bytes = 0
        self._padding = memoryview(bytearray(64))
        self._reserve = Reserve()

    def close(self) -> None:
        """Close the connection. Never raises; may be called from another thread."""
        self.stream.close()
        if self.stream.is_ours:
            # In a forked child, another thread of the parent may have held its lock for ever.
            self._reserve.close()

    def write(self, sequence: int, message: Message, tensors: Sequence[torch.Tensor]) -> None:
        """Send one frame; see `views_of`.

        Raises:
            ProtocolError: The tensors do not match the message, or the frame is too large; nothing was sent.
            OSError: The connection broke or stalled.
        """
        self.stream.send(views_of(sequence, message, tensors))

    def read(self) -> tuple[int, Message, list[torch.Tensor]] | None:
        """Receive one frame, with the tensors' bytes directly into their memory.

        Returns:
            Its sequence number, message and tensors; ``None`` if the stream ends before it.

        Raises:
            ProtocolError: The data is no frame, or exceeds a limit.
            EOFError: The stream ends within the frame.
            OSError: The connection broke or stalled.
        """
        data: bytes | memoryview = self.stream.take(SHORT_HEAD.size)
        if not data:
            return None
        length = head_bytes(data[0])
        if length > len(data):
            data = bytes(data)
            data += self.stream.take(length - len(data))
        if len(data) < length:
            raise _cut_short()
        head = decode_head(data, max_header_bytes=self.max_header_bytes, max_body_bytes=self.max_body_bytes)
        header = self._read_header(head.header_bytes)
        if self.digests:
            self.digest = hash((bytes(header), head.body_bytes))
        message = decode_header(header, head.body_bytes)
        if head.body_bytes:
            self.frame_end_bytes = self.stream.bytes_received - self.stream.unread_bytes + head.body_bytes
            if self.admit_body is not None:
                self.admit_body(head.body_bytes)
        return head.sequence, message, self._read_tensors(tensor_headers(message))

    def is_whole(self) -> bool:
        """Whether `read` needs no further bytes: a frame without a body has arrived, or something that is no frame."""
        held = self.stream.ahead
        length = head_bytes(held[0]) if held else 1
        if len(held) < length:
            return False
        try:
            head = decode_head(held[:length], max_header_bytes=self.max_header_bytes,
                               max_body_bytes=self.max_body_bytes)
        except ProtocolError:
            return True
        return bool(head.body_bytes) or len(held) >= min(length + head.header_bytes, AHEAD_BYTES)

    def _read_header(self, length: int) -> bytearray | memoryview:
        if length <= AHEAD_BYTES:
            taken = self.stream.take(length)
            if len(taken) < length:
                raise _cut_short()
            return taken
        header = bytearray(min(length, CHUNK_BYTES))
        self._fill([memoryview(header)])
        if length > CHUNK_BYTES:
            chunk = memoryview(bytearray(CHUNK_BYTES))
            while missing := length - len(header):
                part = chunk[:missing]
                self._fill([part])
                header += part
        return header

    def _read_tensors(self, described: Sequence[TensorHeader]) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = []
        for group in _groups(described):
            made = [self._allocate(header) for header in group]
            views: list[memoryview] = []
            for tensor in made:
                data = buffer_of(tensor)
                views += (data, self._padding[: padding(len(data))])
            self._fill(views)
            tensors += made
        return tensors

    def _allocate(self, header: TensorHeader) -> torch.Tensor:
        try:
            return self._reserve.empty(header)
        except (RuntimeError, MemoryError, OverflowError, TypeError, ValueError) as error:
            # PyTorch's errors for too much memory, and for sizes that its own integers cannot hold.
            reason = str(error).partition("\n")[0]
            raise ProtocolError(f"A tensor of {size_bytes(header)} bytes cannot be allocated: {reason}",
                                hint="Send less at once, or use a machine with more memory.") from None

    def _fill(self, views: Sequence[memoryview]) -> None:
        if self.stream.receive(views) < sum(map(len, views)):
            raise _cut_short()


def views_of(sequence: int, message: Message, tensors: Sequence[torch.Tensor]) -> list[memoryview]:
    """Serialize one frame.

    Args:
        sequence: Number of the frame.
        message: Its header.
        tensors: One dense CPU tensor per tensor header in the message.

    Raises:
        ProtocolError: The tensors do not match the message, or the frame is too large.

    Ownership:
        The views do not keep the tensors alive.
    """
    header = encode(message)
    described = tensor_headers(message)
    body_bytes = 0
    if described or tensors:
        _check_tensors(described, tensors)
        body_bytes = body_length(described)
    if len(header) > MAX_HEADER_BYTES or body_bytes > MAX_BODY_BYTES:
        raise ProtocolError(f"A frame of {len(header)} + {body_bytes} bytes is too large to be sent.")
    views = [memoryview(head_for(message, sequence, len(header), body_bytes) + header)]
    for tensor in tensors:
        data = buffer_of(tensor)
        views += (data, _ZEROS[: padding(len(data))])
    return views


def _check_tensors(described: Sequence[TensorHeader], tensors: Sequence[torch.Tensor]) -> None:
    """Check that the tensors match the header exactly: one wrong byte would corrupt the rest of the stream."""
    if len(described) != len(tensors):
        raise ProtocolError(f"The message describes {len(described)} tensors, {len(tensors)} are to be sent.")
    for header, tensor in zip(described, tensors, strict=True):
        length = tensor.numel() * tensor.element_size()
        if tensor.device.type != "cpu" or length != size_bytes(header):
            raise ProtocolError(f"The message describes a tensor of {size_bytes(header)} bytes, the one to be sent has "
                                f"{length} on {tensor.device}.")


def _groups(described: Sequence[TensorHeader]) -> Iterator[list[TensorHeader]]:
    """Split into groups, so that a false header makes this side allocate little more than the data that arrives."""
    group: list[TensorHeader] = []
    length = 0
    for header in described:
        group.append(header)
        length += size_bytes(header)
        if length >= GROUP_BYTES or len(group) >= GROUP_TENSORS:
            yield group
            group, length = [], 0
    if group:
        yield group


def _cut_short() -> EOFError:
    return EOFError("it ended in the middle of a frame")

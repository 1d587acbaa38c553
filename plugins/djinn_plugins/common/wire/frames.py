"""Frames: a head, a msgpack header, and raw tensor bytes, each tensor aligned to 64 bytes.

The long head, and the short one of small frames after the greeting::

    magic "DJNN" | version u16 | flags u16 | sequence u64 | header length u32 | reserved u32 | body length u64
    mark "d" | body length u8, in units of 64 bytes | header length u16 | sequence u32
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

from djinn.errors import ProtocolError, ProtocolVersionError
from djinn.wire.messages import PROTOCOL_VERSION, Ack, Batch, Message, Result, TensorHeader, Upload, ValueTransfer
from djinn_plugins.common.memory.tensor_bytes import check_header, size_bytes
from djinn_plugins.common.wire import short_messages

MAGIC = b"DJNN"
HEAD = struct.Struct("<4sHHQIIQ")
SHORT_MARK = ord("d")
"""First byte of a short head."""
SHORT_HEAD = struct.Struct("<BBHI")
ALIGNMENT = 64
_MAX_SHORT_BODY, _MAX_SHORT_HEADER, _MAX_SHORT_SEQUENCE = 255 * ALIGNMENT, 2**16 - 1, 2**32 - 1
MAX_HEADER_BYTES = 64 * 2**20
MAX_BODY_BYTES = 64 * 2**30
MAX_GREETING_BYTES = 4096
"""Largest header before the other side has identified itself; such a frame has no body."""


class FrameHeader(msgspec.Struct, frozen=True):
    """The decoded head of a frame."""

    sequence: int
    header_bytes: int
    body_bytes: int


def encode_head(sequence: int, header_bytes: int, body_bytes: int) -> bytes:
    """Encode a long head."""
    return HEAD.pack(MAGIC, PROTOCOL_VERSION, 0, sequence, header_bytes, 0, body_bytes)


def head_for(message: Message, sequence: int, header_bytes: int, body_bytes: int) -> bytes:
    """Encode the head of a message: a short one if it is part of a session, and nothing is too large."""
    if isinstance(message, (Batch, Result, Ack)) and sequence <= _MAX_SHORT_SEQUENCE and (
            header_bytes <= _MAX_SHORT_HEADER and body_bytes <= _MAX_SHORT_BODY):
        return SHORT_HEAD.pack(SHORT_MARK, body_bytes // ALIGNMENT, header_bytes, sequence)
    return encode_head(sequence, header_bytes, body_bytes)


def head_bytes(first: int) -> int:
    """Return the length of a head whose first byte is given."""
    return SHORT_HEAD.size if first == SHORT_MARK else HEAD.size


def decode_head(
    data: bytes | bytearray | memoryview,
    *,
    max_header_bytes: int = MAX_HEADER_BYTES,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> FrameHeader:
    """Decode a head and check its lengths against the limits.

    Raises:
        ProtocolVersionError: The magic is right, but the version is different.
        ProtocolError: Anything else is wrong. The stream cannot be used any further.
    """
    if len(data) == SHORT_HEAD.size and data[0] == SHORT_MARK:
        _, units, header_bytes, sequence = SHORT_HEAD.unpack(data)
        body_bytes = units * ALIGNMENT
    else:
        sequence, header_bytes, body_bytes = _decode_long(data)
    if header_bytes > max_header_bytes:
        raise ProtocolError(f"A header of {header_bytes} bytes; {max_header_bytes} is the limit.")
    if body_bytes > max_body_bytes:
        raise ProtocolError(f"A body of {body_bytes} bytes; {max_body_bytes} is the limit.")
    return FrameHeader(sequence, header_bytes, body_bytes)


def _decode_long(data: bytes | bytearray | memoryview) -> tuple[int, int, int]:
    """Return the sequence, the header's length and the body's."""
    if len(data) != HEAD.size:
        raise ProtocolError(f"A frame head has {HEAD.size} bytes, not {len(data)}.")
    magic, version, flags, sequence, header_bytes, reserved, body_bytes = HEAD.unpack(data)
    if magic != MAGIC:
        raise ProtocolError("This is not a djinn frame.", hint="Check that both ends of the connection are djinn's.")
    if version != PROTOCOL_VERSION:
        raise ProtocolVersionError(f"The other side speaks protocol {version}, this one {PROTOCOL_VERSION}.",
                                   hint="Install the same djinn release on both.")
    if flags or reserved:
        raise ProtocolError("Reserved bits of the frame head are set.")
    return sequence, header_bytes, body_bytes


def decode_header(data: bytes | bytearray | memoryview, body_bytes: int) -> Message:
    """Decode a frame's message and check it against the announced body length.

    Raises:
        ProtocolError: The header is not a message, or its tensors do not add up to the body.
    """
    try:
        message = short_messages.decode(data)
    except (msgspec.DecodeError, RecursionError, ValueError, OverflowError) as error:
        raise ProtocolError(f"The header is not a message: {error}.") from None
    expected = body_length(tensor_headers(message))
    if expected != body_bytes:
        raise ProtocolError(f"The header announces {expected} bytes of tensors, the frame {body_bytes}.")
    return message


def tensor_headers(message: Message) -> list[TensorHeader]:
    """List the tensors that a message's body carries, in order."""
    if isinstance(message, Batch):
        return [command.tensor for command in message.commands if isinstance(command, Upload)]
    if isinstance(message, Result):
        return [item for item in message.items if isinstance(item, TensorHeader)]
    if isinstance(message, ValueTransfer) and isinstance(message.item, TensorHeader):
        return [message.item]
    return []


def padding(length: int) -> int:
    """Number of zero bytes that follow ``length`` bytes of a tensor."""
    return -length % ALIGNMENT


def body_length(headers: Sequence[TensorHeader]) -> int:
    """Length of a body, in bytes, with every tensor padded.

    Raises:
        ProtocolError: A header is not a dense tensor of a known dtype.
    """
    total = 0
    for header in headers:
        check_header(header)
        length = size_bytes(header)
        total += length + padding(length)
    return total

"""Short forms of the two messages that a loop repeats: a batch of predicted runs, and an early answer.

Each is a msgpack array, where every other message is a map. The decoded message is the same in both forms. A batch that
has a short form is always sent in it, because its digest is that of its encoded form.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from djinn.wire import messages
from djinn.wire.messages import DIGEST_BYTES, Batch, Handle, Item, Message, Result, RunDelta, Size

__all__ = ("decode", "encode")

_ARRAY, _ARRAY_BITS = 0x90, 0xF0
"""First byte of a msgpack array of at most 15 items, and the bits of it that say so."""


class _Predicted(msgspec.Struct, frozen=True, array_like=True, tag="b"):
    """A `Batch` of runs that are as predicted.

    Attributes:
        programs: Their programs.
        fetch: As in a batch.
    """

    programs: tuple[Handle, ...]
    fetch: tuple[Handle, ...]


class _Early(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """A `Result` that was sent before its batch, with the attributes that such a result may have."""

    items: tuple[Item, ...]
    assumes: Annotated[bytes, Meta(min_length=1, max_length=DIGEST_BYTES)]
    since: Size
    run_ns: Size


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Predicted | _Early)


def encode(message: Message) -> bytes:
    """Encode a message, in its short form if it has one."""
    short: _Predicted | _Early | None = None
    if type(message) is Batch:
        short = _short_batch(message)
    elif type(message) is Result and message.assumes:
        short = _short_result(message)
    return messages.encode(message) if short is None else _encoder.encode(short)


def decode(data: bytes | bytearray | memoryview) -> Message:
    """Decode and check a message of either form; raises as `djinn.wire.messages.decode` does."""
    if not data or data[0] & _ARRAY_BITS != _ARRAY:
        return messages.decode(data)
    short = _decoder.decode(data)
    if isinstance(short, _Predicted):
        return Batch([RunDelta(program) for program in short.programs], fetch=short.fetch)
    return Result(short.items, run_ns=short.run_ns, assumes=short.assumes, since=short.since)


def _short_batch(batch: Batch) -> _Predicted | None:
    programs = []
    for command in batch.commands:
        if type(command) is not RunDelta or (
                command.inputs or command.numbers or command.outputs or command.released):
            return None
        programs.append(command.program)
    if not programs or batch != Batch(batch.commands, fetch=batch.fetch):
        return None
    return _Predicted(tuple(programs), batch.fetch)


def _short_result(result: Result) -> _Early | None:
    short = _Early(result.items, result.assumes, result.since, result.run_ns)
    same = Result(result.items, run_ns=result.run_ns, assumes=result.assumes, since=result.since)
    return short if result == same else None

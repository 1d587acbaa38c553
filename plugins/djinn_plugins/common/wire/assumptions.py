"""What a value that was computed ahead of requests assumes of the sessions that it depends on.

A session that runs ahead may send a value to another session before its client has requested that. The value is the
right one only if the client will send the batches that were predicted. So it travels with the digest of these batches.
All that is computed from it assumes the same, and the client, which knows its messages to each of its sessions,
compares. See `djinn_plugins.executor.early_answers`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from djinn.errors import ProtocolError
from djinn.wire.messages import DIGEST_BYTES, Item, Plain, Size, Text, ValueTransfer

__all__ = ("MAX_ASSUMED", "MAX_BATCH_BYTES", "MAX_EARLY", "MAX_EARLY_BYTES", "MAX_SENT", "AheadNote", "Assumed",
           "decode_assumed", "digest_of_batches", "encode_assumed", "merged", "note_of", "noted", "plain_bytes")

MAX_ASSUMED = 8
"""Most sessions and epochs that one value may depend on."""
MAX_EARLY = 64
"""Most answers that may be early at once."""
MAX_EARLY_BYTES = 64 * 1024
"""Most bytes of values in early answers that the client has not asked for yet."""
MAX_BATCH_BYTES = 2048
"""Batches longer than this are never predicted."""
MAX_SENT = 512
"""Batches that the client remembers to compare them."""
_DIGEST_BYTES = 16


class Assumed(msgspec.Struct, frozen=True, array_like=True):
    """Batches of a session that were predicted.

    Attributes:
        session: Name of the session.
        epoch: How often it had withdrawn values before.
        since: Number of the last batch that it had received.
        upto: Number of the last batch that was predicted.
        digest: Digest of the batches after ``since``, up to ``upto``.
    """

    session: Text
    epoch: Size
    since: Size
    upto: Size
    digest: Annotated[bytes, Meta(max_length=DIGEST_BYTES)]


_Assumptions = Annotated[tuple[Assumed, ...], Meta(max_length=MAX_ASSUMED)]


class AheadNote(msgspec.Struct, frozen=True, array_like=True):
    """Says that a transfer was not requested yet, or what became of such transfers.

    Attributes:
        stage: ``value``: here is a value that was not requested yet. ``requested``: the value that was sent under this
            number is requested now. ``void``: all values sent ahead and not requested yet are void.
        assumes: What the value assumes.
    """

    stage: Literal["value", "requested", "void"]
    assumes: _Assumptions = ()


_encoder = msgspec.msgpack.Encoder()
_note_decoder = msgspec.msgpack.Decoder(AheadNote)
_assumed_decoder = msgspec.msgpack.Decoder(_Assumptions)


def noted(transfer: ValueTransfer, note: AheadNote) -> ValueTransfer:
    """Return a transfer with a note."""
    return msgspec.structs.replace(transfer, ahead=_encoder.encode(note))


def note_of(transfer: ValueTransfer) -> AheadNote | None:
    """Return the note of a transfer; ``None`` if it was requested.

    Raises:
        ProtocolError: The note is invalid.
    """
    if not transfer.ahead:
        return None
    try:
        return _note_decoder.decode(transfer.ahead)
    except (msgspec.DecodeError, ValueError) as error:
        raise ProtocolError(f"A value that was sent ahead has an invalid note: {error}.") from None


def encode_assumed(assumed: Sequence[Assumed]) -> bytes:
    """Encode assumptions for an answer; empty if there are none."""
    return _encoder.encode(tuple(assumed)) if assumed else b""


def decode_assumed(data: bytes) -> tuple[Assumed, ...]:
    """Decode the assumptions of an answer.

    Raises:
        ProtocolError: They are invalid.
    """
    try:
        return _assumed_decoder.decode(data) if data else ()
    except (msgspec.DecodeError, ValueError) as error:
        raise ProtocolError(f"An early answer has invalid assumptions: {error}.") from None


def merged(assumed: Iterable[Assumed]) -> tuple[Assumed, ...]:
    """Drop what follows from something later.

    Within an epoch, a session has received all that it had predicted before, as predicted. So of its assumptions in one
    epoch, the last one contains the others.
    """
    latest: dict[tuple[str, int], Assumed] = {}
    for one in assumed:
        known = latest.get((one.session, one.epoch))
        if known is None or (one.since, one.upto) > (known.since, known.upto):
            latest[one.session, one.epoch] = one
    return tuple(latest.values())


def digest_of_batches(encoded: Iterable[bytes | memoryview]) -> bytes:
    """Return the digest of encoded batches, in order."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for one in encoded:
        digest.update(len(one).to_bytes(4, "little"))
        digest.update(one)
    return digest.digest()


def plain_bytes(item: Item) -> int:
    """Return how long a value is that is no tensor; a number is not long."""
    value = item.value if isinstance(item, Plain) else None
    return 0 if value is None or isinstance(value, (bool, int, float)) else len(msgspec.msgpack.encode(value))

"""Digests of uploads, and which uploads have one; both ends compute them alike."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor

import msgspec
import torch

from djinn.wire.messages import DIGEST_BYTES, TensorHeader
from djinn_plugins.common.memory.tensor_bytes import buffer_of, size_bytes

__all__ = ("MIN_KEPT_BYTES", "digest_of", "is_worth_keeping")

MIN_KEPT_BYTES = 64 * 1024
"""Smaller uploads are always sent: identifying them takes as long as sending them."""
CHUNK_BYTES = 2**22
"""Size of the pieces that are digested in parallel."""
_THREADS = min(4, os.cpu_count() or 1)


def is_worth_keeping(header: TensorHeader) -> bool:
    """Whether a tensor is large enough for a lookup to pay off."""
    return size_bytes(header) >= MIN_KEPT_BYTES


def digest_of(header: TensorHeader, tensor: torch.Tensor) -> bytes:
    """Digest the form of a dense CPU tensor and all of its bytes: SHA-256 of the SHA-256 of each piece."""
    data = buffer_of(tensor)
    pieces = [data[begin:begin + CHUNK_BYTES] for begin in range(0, len(data), CHUNK_BYTES)]
    if len(pieces) > 1 and _THREADS > 1:
        with ThreadPoolExecutor(min(_THREADS, len(pieces))) as pool:
            digests = list(pool.map(_sha256, pieces))
    else:
        digests = [_sha256(piece) for piece in pieces]
    made = _sha256(b"".join((_sha256(msgspec.msgpack.encode(header)), *digests)))
    assert len(made) == DIGEST_BYTES
    return made


def _sha256(data: bytes | memoryview) -> bytes:
    return hashlib.sha256(data).digest()

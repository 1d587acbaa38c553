"""Tensors that the client keeps, and how it checks that they have not changed since they were sent."""

from __future__ import annotations

import hashlib

import attrs
import torch

from djinn.wire.tensors import header_of
from djinn_plugins.common.memory.fingerprint import mark_of
from djinn_plugins.common.memory.tensor_bytes import buffer_of

MAX_COPIED_BYTES = 2**20
"""Uploads up to this size are copied. Larger ones remain the user's tensors, and are checked before they are sent
again.
"""
_CHUNK = 2**16


@attrs.frozen(eq=False)
class Kept:
    """A tensor kept for sending it again.

    Attributes:
        tensor: Dense and on the CPU.
        version: Its version counter when it was sent; ``None`` if its memory is not shared.
        fingerprint: Fingerprint of its bytes when it was sent.
    """

    tensor: torch.Tensor
    version: int | None = None
    fingerprint: bytes = b""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Kept:
        """Keep a user's tensor: a copy, or the tensor itself with the data that shows whether it has changed."""
        if size_of(tensor) <= MAX_COPIED_BYTES or tensor.is_inference():
            with torch.inference_mode(mode=False):
                return cls(tensor.clone())
        return cls(tensor, tensor._version, fingerprint_of(tensor))

    @classmethod
    def nothing(cls) -> Kept:
        """Create a placeholder for a tensor that will not be sent."""
        return cls(torch.empty(0))

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor's elements."""
        return size_of(self.tensor)

    @property
    def is_unchanged(self) -> bool:
        """Whether the tensor is unchanged since it was sent."""
        return self.version is None or (
            self.tensor._version == self.version and fingerprint_of(self.tensor) == self.fingerprint)


def size_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def fingerprint_of(tensor: torch.Tensor) -> bytes:
    """Digest sums over pieces of a dense CPU tensor's bytes and a few samples of them.

    A tensor's version counter misses writes by NumPy or through ``.data``. This fingerprint detects them, at memory
    bandwidth.
    """
    state = hashlib.blake2b(mark_of(header_of(tensor), tensor), digest_size=16)
    data = buffer_of(tensor)
    words = torch.frombuffer(data, dtype=torch.int64, count=len(data) // 8) if len(data) >= 8 else torch.zeros(0)
    whole = words[: words.numel() // _CHUNK * _CHUNK].view(-1, _CHUNK).sum(dim=1) if words.numel() else words
    rest = bytes(data[whole.numel() * _CHUNK * 8:])
    state.update(bytes(buffer_of(whole)))
    state.update(rest)
    return state.digest()

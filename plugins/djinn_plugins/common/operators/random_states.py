"""States of random number generators: opaque bytes of which PyTorch checks each field, and not that they fit."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping

import torch

__all__ = ("checked_state",)

_WORDS = 624
"""Numbers that PyTorch's generator for the CPU makes at a time (aten/src/ATen/core/MT19937RNGEngine.h)."""
_HEAD = struct.Struct("=QiiQ")
"""Seed, numbers left, whether it is seeded, and the position of the next number; the numbers follow."""
_FLAGS_AT = (_HEAD.size + 8 * _WORDS + 24, _HEAD.size + 8 * _WORDS + 36)
"""Where it says whether a number of a normal distribution is kept, in double and in single precision."""
_SIZE_BYTES = _HEAD.size + 8 * _WORDS + 40


def _check_cpu(state: memoryview) -> None:
    if len(state) != _SIZE_BYTES:
        raise RuntimeError(f"A state of a CPU's random numbers has the size {_SIZE_BYTES}, not {len(state)}.")
    _, left, seeded, following = _HEAD.unpack_from(state)
    # Numbers are left to the end, except right after seeding, when the next draw makes them.
    are_counted = (left > 0 and left + following == _WORDS + 1) or (left, following) == (1, 0)
    if seeded != 1 or not are_counted or any(state[at] > 1 for at in _FLAGS_AT):
        raise RuntimeError("The fields of a state of a CPU's random numbers do not fit each other: it is the state of "
                           "no generator.")


_CHECKS: Mapping[str, Callable[[memoryview], None]] = {"cpu": _check_cpu}
"""By kind of device. A state of CUDA has a seed and an offset only, and PyTorch checks the offset."""


def checked_state(kind: str, state: torch.Tensor) -> torch.Tensor:
    """Return a copy of a state for a kind of device, after checking it as a whole.

    Raises:
        RuntimeError, TypeError: It is no state of a generator of this kind of device.
    """
    if state.dtype is not torch.uint8 or state.layout is not torch.strided:
        raise TypeError(f"RNG state must be a torch.ByteTensor, not of {state.dtype}")
    # A copy, because others may write to the original between check and use.
    own = state.detach().to("cpu", copy=True).contiguous()
    check = _CHECKS.get(kind)
    if check is not None:
        check(own.numpy().reshape(-1).data)
    return own

"""Changes of elements: alone, together with an integer of the call, and whole words of an opaque state."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

REAL_NUMBERS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e-30, 1e30, 3.4e38, 1e308, math.inf, -math.inf, math.nan,
                2.0**40 + 0.5, -(2.0**40) - 0.5)
FAR = (-1, 0, 1, 17, 1000, 2**20, 2**31, 2**40, 2**62)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements of a tensor's storage."""
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())


def _near(choose: random.Random, extents: Sequence[int]) -> int:
    """Choose an integer that is just within, or just beyond, an extent."""
    near = choose.choice(extents or (1,))
    return choose.choice((near, near + 1, near - 1, 2 * near, -near, -near - 1))


def make_wild(tensor: torch.Tensor, choose: random.Random, extents: Sequence[int]) -> None:
    """Change elements; integers preferably to what is just within, or just beyond, an extent."""
    whole = _whole(tensor)
    if not whole.numel():
        return
    if whole.dtype is torch.bool:
        whole.view(torch.uint8)[choose.randrange(whole.numel())] = choose.choice((0, 1, 2, 255))
        return
    if whole.dtype.is_floating_point or whole.dtype.is_complex:
        value: Any = choose.choice(REAL_NUMBERS)
    else:
        limits = torch.iinfo(whole.dtype)
        value = choose.choice((_near(choose, extents), choose.choice((*FAR, limits.max, limits.min))))
    _put(whole, value, choose)


def _put(whole: torch.Tensor, value: Any, choose: random.Random) -> None:
    """Set one element, or all, to a value as near to the given one as the dtype has it."""
    if not whole.dtype.is_floating_point and not whole.dtype.is_complex and whole.dtype is not torch.bool:
        limits = torch.iinfo(whole.dtype)
        value = min(max(value, limits.min), limits.max)
    if choose.random() < 0.5:
        whole.fill_(value)
    else:
        whole[choose.randrange(whole.numel())] = value


def change_words(tensor: torch.Tensor, choose: random.Random) -> None:
    """Change fields of an opaque state, each to what another one might be: small numbers, extents, another field."""
    data = _whole(tensor).view(torch.uint8)
    dtype = choose.choice((torch.int32, torch.int64))
    words = data[:data.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    if not words.numel():
        return
    for _ in range(choose.choice((1, 1, 2))):
        # Counters and positions are at the beginning or at the end.
        at = choose.choice((choose.randrange(min(4, words.numel())), -1 - choose.randrange(min(4, words.numel())),
                            choose.randrange(words.numel())))
        other = int(words[choose.randrange(words.numel())])
        words[at] = choose.choice((0, 1, -1, 2, words.numel(), words.numel() - 1, 624, 625, other,
                                   torch.iinfo(dtype).max))


def change_together(
    made: dict[str, Any], tensor: torch.Tensor, integers: Mapping[str, str], choose: random.Random,
    extents: Sequence[int],
) -> None:
    """Change an integer of a call together with elements of a tensor: what exempts, scales or offsets an index.

    Args:
        made: The arguments, of which one is replaced.
        tensor: Some integers that may be indices.
        integers: Names of the arguments that are integers, or lists of them, with their types.
        choose: Makes all choices.
        extents: Those of the call's tensors.
    """
    whole = _whole(tensor)
    if not whole.numel() or whole.dtype is torch.bool or not integers:
        return
    name = choose.choice(sorted(integers))
    value = _near(choose, extents) if choose.random() < 0.75 else choose.choice(FAR)
    old = made.get(name)
    if "List" in integers[name]:
        items = list(old) if isinstance(old, (list, tuple)) and old else [1]
        items[choose.randrange(len(items))] = value
        made[name] = items
    else:
        made[name] = value
    # The same number; its neighbours; what leads beyond an extent if the integer is added.
    near = choose.choice(extents or (1,))
    others = value - 1, value + 1, near - value, near, -value
    _put(whole, value if choose.random() < 0.5 else choose.choice(others), choose)

"""Weak references to storages, as ``torch.multiprocessing.reductions.StorageWeakRef`` makes them.

PyTorch's are addresses. Those of this device are the numbers that stand for addresses (see `saving`), which no address
equals, and PyTorch's functions are extended to know them: the originals would dereference them. Their lower bits tell
sessions apart, because each session numbers its storages from the beginning.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from djinn.record.tensor import LazyTensor

MARK = "_storage_mark"
"""Name of the attribute with a mark, in the tensors that were referred to."""
OWN_ATTRIBUTES = ("_value", "_is_param", MARK, "__tensor_flatten__", "__tensor_unflatten__")
"""Attributes that a tensor has because it is lazy; all others are attached by the program."""
_ADDRESS_BITS = 64
_marks: dict[int, weakref.ref[Any]] = {}
_references: Counter[int] = Counter()
_sessions: dict[int, Callable[[int], None]] = {}
"""Of each reference, what belongs to its session alone; held, so that its identity cannot pass to another."""


class _Mark:
    """Lives as long as the tensor that has it. PyTorch does not swap tensors with weak references."""


def reference(tensor: LazyTensor) -> int:
    """Refer weakly to the storage of a tensor; equal storages have equal references."""
    number = number_of(tensor)
    _references[number] += 1
    _sessions[number] = tensor._value.released
    _watch(number, tensor)
    return number


def number_of(tensor: LazyTensor) -> int:
    """Return a number for the storage of a tensor, which no living storage of another session has."""
    value = tensor._value
    return value.slot.storage << _ADDRESS_BITS | id(value.released)


def living() -> set[int]:
    """Return the numbers of all storages that tensors have. This looks at all objects."""
    return {number_of(item) for item in gc.get_objects() if isinstance(item, LazyTensor) and "_value" in vars(item)}


def _watch(number: int, tensor: LazyTensor) -> None:
    mark = vars(tensor).setdefault(MARK, _Mark())
    _marks[number] = weakref.ref(mark)


def _has_expired(number: int) -> bool:
    mark = _marks.get(number)
    if mark is None:
        return True
    if mark() is not None:
        return False
    # The tensor is gone, but a view may live on: another one is looked for, once for each that goes.
    for item in gc.get_objects():
        if type(item) is LazyTensor and number_of(item) == number:
            _watch(number, item)
            return False
    del _marks[number]
    return True


def _release(number: int) -> None:
    _references[number] -= 1
    if not _references[number]:
        del _references[number], _sessions[number]
        _marks.pop(number, None)


def _extended(original: Any, own: Any, bits: int = _ADDRESS_BITS) -> Any:
    # Storages are freed until the process has ended, when names of modules are gone already.
    is_ending = sys.is_finalizing

    def function(number: Any) -> Any:
        if not (isinstance(number, int) and number >> bits):
            return original(number)
        return None if is_ending() else own(number)

    return staticmethod(function)


def install() -> None:
    """Extend the functions of `torch.UntypedStorage` that take such references."""
    storages: Any = torch.UntypedStorage
    storages._expired = _extended(storages._expired, _has_expired)
    storages._free_weak_ref = _extended(storages._free_weak_ref, _release)

"""Finds out, from the code that asks for a tensor, which tensors it will ask for next.

A program that copies many tensors to the CPU asks for one after the other. Python's own stack shows the reason: PyTorch
moves a module (`Module._apply`), a library writes a checkpoint, or a loop runs over a collection. The stack is read
only where the program waits for the executor anyway.
"""

from __future__ import annotations

import copy
import dis
import sys
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from inspect import CO_OPTIMIZED
from itertools import takewhile
from types import CodeType, FrameType
from typing import Any
from weakref import ref

import attrs
import torch

from djinn.ir.value import Slot
from djinn.record.tensor import LazyTensor
from djinn_plugins.client.prefetch.continuations import Place
from djinn_plugins.client.prefetch.fetched import Key, key_of

__all__ = ("ReadAhead", "read_ahead")

MAX_FRAMES = 60
"""Callers that are looked at."""
MAX_LEAVES = 20_000
"""Items of a collection that are looked at."""
MAX_DEPTH = 8
"""Collections within collections that are looked at."""
_WHOLE = ("torch.serialization", "torch.distributed.checkpoint", "torch.utils._pytree", "safetensors")
"""Packages that go through all of a collection once they begin with it."""
_TABLES = (dict, UserDict)
"""Other mappings may compute their values when these are looked at, or fetch them, as `djinn.kept` does."""
_COLLECTIONS = (*_TABLES, list, tuple, torch.nn.Module, torch.optim.Optimizer)
_APPLY = torch.nn.Module._apply.__code__
_NONE: dict[str, Any] = {}
_ITERATORS: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(_NONE.values())), type(iter(_NONE.items())),
              type(iter(OrderedDict(_NONE).items())))
_KEEPS_LOCALS = sys.version_info < (3, 13)
"""Whether looking at a caller's variables keeps their values alive until it returns."""


@attrs.frozen(eq=False)
class ReadAhead:
    """Facts about a caller that asks for a tensor.

    Attributes:
        key: The value that is asked for.
        place: Where the caller is.
        tensors: What the caller will ask for next, in order.
        is_certain: Whether it goes through all of them, once begun.
    """

    key: Key
    place: Place
    tensors: tuple[LazyTensor, ...]
    is_certain: bool


def read_ahead(slot: Slot, caller: FrameType, place: Place, last: tuple[Place, Key] | None,
               is_dull: Callable[[Place], bool]) -> ReadAhead | None:
    """Look at the callers of this function.

    Args:
        slot: The value that is asked for.
        caller: The innermost of them outside djinn.
        place: Where that is.
        last: The value that was asked for before, and where.
        is_dull: Says of a place whether looking at its callers has been in vain.

    Returns:
        What they will ask for; ``None`` if that is unknown.
    """
    if is_dull(place):
        return None
    own = takewhile(lambda frame: frame is not caller, _callers(sys._getframe(1)))
    asked = next((tensor for frame in own if (tensor := _find(frame, slot)) is not None), None)
    if asked is None:
        return None
    key = key_of(asked)
    before = last[1] if last is not None and last[0] == place else None
    certain: list[LazyTensor] = []
    iterated: list[LazyTensor] = []
    following: Sequence[LazyTensor] = ()
    loops = False
    for each in _callers(caller):
        loops = loops or _is_looping(each.f_code, each.f_lasti)
        if each.f_code is _APPLY or _name(each).startswith(_WHOLE):
            certain = next(_with(key, each, applies=each.f_code is _APPLY), certain)
        elif loops:
            iterated += _iterated(key, each)
            following = _longest(following, _following(key, before, each))
    if certain:
        position = [key_of(tensor) for tensor in certain].index(key)
        return ReadAhead(key, place, (*certain[position + 1:], *certain[:position]), is_certain=True)
    return ReadAhead(key, place, tuple(_longest(iterated, following)), is_certain=False)


def _longest(one: Sequence[LazyTensor], other: Sequence[LazyTensor]) -> Sequence[LazyTensor]:
    return one if len(one) >= len(other) else other


def _callers(innermost: FrameType) -> Iterator[FrameType]:
    frame: FrameType | None = innermost
    for _ in range(MAX_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _name(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _locals(frame: FrameType) -> list[Any]:
    """Return the values of a frame's variables, without keeping them alive longer than the frame does."""
    found = frame.f_locals
    values = list(found.values())
    if _KEEPS_LOCALS and frame.f_code.co_flags & CO_OPTIMIZED and frame.f_trace is None:
        # A snapshot, which the frame would keep.
        found.clear()
    return values


def _find(frame: FrameType, slot: Slot) -> LazyTensor | None:
    for value in _locals(frame):
        for item in value[:1] if isinstance(value, (list, tuple)) else (value,):
            if type(item) is LazyTensor and item._value.slot is slot:
                return item
    return None


def _with(key: Key, frame: FrameType, *, applies: bool = False) -> Iterator[list[LazyTensor]]:
    """Give the tensors of each collection among a frame's variables that holds the value, the largest first."""
    found = []
    for value in _locals(frame):
        if isinstance(value, _COLLECTIONS):
            leaves = list(_leaves(_moved(value) if applies and isinstance(value, torch.nn.Module) else value))
            if len(leaves) > 1 and any(key_of(leaf) == key for leaf in leaves):
                found.append(leaves)
    yield from sorted(found, key=len, reverse=True)


def _following(key: Key, before: Key | None, frame: FrameType) -> Sequence[LazyTensor]:
    """Return what follows in a collection that a loop goes through, by its being at the first tensor or after one."""
    for leaves in _with(key, frame):
        keys = [key_of(leaf) for leaf in leaves]
        position = keys.index(key)
        if position == 0 or before in keys[:position]:
            return leaves[position + 1:]
    return ()


def _iterated(key: Key, frame: FrameType) -> Sequence[LazyTensor]:
    """Return what the iterator of a comprehension still has, if the comprehension is at the value asked for."""
    if ".0" not in frame.f_code.co_varnames:
        return ()
    values = _locals(frame)
    iterator = next((value for value in values if type(value) in _ITERATORS), None)
    if iterator is None or not any(key_of(leaf) == key for value in values if value is not iterator
                                   for leaf in _leaves(value)):
        return ()
    return list(_leaves(list(copy.copy(iterator))))


def _leaves(item: Any) -> Iterator[LazyTensor]:
    """Give the remote tensors of nested collections, in order."""
    budget = MAX_LEAVES
    stack: list[Iterator[Any]] = [iter((item,))]
    while stack:
        for member in stack[-1]:
            budget -= 1
            if budget < 0:
                return
            if isinstance(member, LazyTensor):
                if hasattr(member, "_value"):
                    yield member
            elif len(stack) <= MAX_DEPTH and (inner := _members(member)) is not None:
                stack.append(iter(inner))
                break
        else:
            stack.pop()


def _members(item: Any) -> Iterable[Any] | None:
    if isinstance(item, _TABLES):
        return list(item.values())
    if isinstance(item, (list, tuple)):
        return item
    if isinstance(item, torch.nn.Module):
        return _tensors_of(item)
    if isinstance(item, torch.optim.Optimizer):
        return list(item.state.values())
    return None


def _tensors_of(module: torch.nn.Module) -> Iterator[Any]:
    """Give the tensors of a module in the order of its state; none while its constructor has not called PyTorch's."""
    for part in module.modules() if hasattr(module, "_modules") else ():
        yield from part._parameters.values()
        yield from part._buffers.values()


def _moved(module: torch.nn.Module) -> list[Any]:
    """List the tensors of a module in the order in which `Module._apply` goes through them."""
    if not hasattr(module, "_modules"):
        return []
    moved: list[Any] = []
    for child in module.children():
        moved += _moved(child)
    for parameter in module._parameters.values():
        moved += [] if parameter is None else [parameter, parameter.grad]
    return moved + list(module._buffers.values())


@lru_cache(512)
def _loops(alive: ref[CodeType]) -> tuple[tuple[int, int], ...]:
    """List where loops begin and end. The cache keeps no code alive."""
    code = alive()
    instructions = () if code is None else dis.get_instructions(code)
    return tuple((jump.argval, jump.offset) for jump in instructions
                 if "JUMP_BACKWARD" in jump.opname and not jump.opname.endswith("NO_INTERRUPT"))


def _is_looping(code: CodeType, position: int) -> bool:
    return any(begin <= position <= end for begin, end in _loops(ref(code)))

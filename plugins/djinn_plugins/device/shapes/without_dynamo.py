"""Meta kernels without an import of ``torch._dynamo``, which takes more than a second.

Some of PyTorch's meta kernels in Python are functions that Dynamo must not trace. PyTorch imports Dynamo when one of
them is called for the first time, in order to mark it, and keeps the marked function on the plain one. Until a
program imports Dynamo, nothing is traced; so the plain function is called, and it is marked once Dynamo is there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch._compile

_MARKED = "__dynamo_disable"
"""Attribute by which `torch._compile` finds the marked function again."""


def spare() -> int:
    """Let PyTorch's meta kernels run unmarked until Dynamo is imported, and return how many it has not seen before.

    If Dynamo has been imported, as by transformers, marking costs nothing, and there is nothing to do.
    """
    if hasattr(sys.modules.get("torch._dynamo"), "disable"):
        return 0
    table = torch._decomp.global_decomposition_table
    return _spare(tuple(_modules()), tuple(map(len, table.values())))


@cache
def _spare(*_: object) -> int:
    """Do it once for what there is: looking at thousands of functions is a third of the time to begin a session."""
    count = 0
    for plain in unmarked(_kernels()):
        setattr(plain, _MARKED, _marked_later(plain))
        count += 1
    return count


def unmarked(functions: Iterable[Any]) -> Iterator[Any]:
    """Find, among functions and those that they wrap, the ones that PyTorch marks when they are called first."""
    marks = torch._compile._disable_dynamo(spare).__code__
    pending, seen = list(functions), set()
    while pending:
        function = pending.pop()
        if not isinstance(function, FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        held = dict(zip(function.__code__.co_freevars, map(_content, function.__closure__ or ()), strict=True))
        if function.__code__ is marks and not hasattr(held["fn"], _MARKED):
            yield held["fn"]
        pending += [*held.values(), getattr(function, "__wrapped__", None)]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # Nothing has been assigned to it yet.
        return None


def _modules() -> Iterator[str]:
    return (name for name in list(sys.modules)
            if name.startswith(("torch._refs", "torch._decomp", "torch._meta_registrations")))


def _kernels() -> Iterator[Any]:
    for name in _modules():
        yield from list(vars(sys.modules[name]).values())
    for table in torch._decomp.global_decomposition_table.values():
        yield from list(table.values())


def _marked_later(plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        dynamo: Any = sys.modules.get("torch._dynamo")
        if not hasattr(dynamo, "disable"):
            return plain(*args, **kwargs)
        marked = dynamo.disable(plain, True, wrapping=False)
        setattr(plain, _MARKED, marked)
        return marked(*args, **kwargs)

    return call

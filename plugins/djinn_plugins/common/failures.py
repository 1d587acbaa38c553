"""Reporting an exception to the other side."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import torch

from djinn import errors
from djinn.wire.failures import EXCEPTIONS

__all__ = ("is_out_of_memory", "name_of", "text_of", "with_relief")


_NAMES = {kind: name for name, kind in EXCEPTIONS.items()}
_T = TypeVar("_T")
_NO_MEMORY = re.compile(r"DefaultCPUAllocator: |CUDA error: out of memory|\bCU[A-Z]+_(STATUS_)?ALLOC(ATION)?_FAILED\b")
"""On the CPU, in CUDA's runtime and in its libraries, only the message says so."""


def name_of(error: BaseException) -> str:
    """Name the most specific known class of an exception."""
    return next((_NAMES[kind] for kind in type(error).__mro__ if kind in _NAMES), RuntimeError.__name__)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether PyTorch, or a library that it uses, ran out of memory."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None)


def with_relief(action: Callable[[], _T], relieve: Callable[[], bool]) -> _T:
    """Call a function that allocates; if there is no memory and some can be freed, call it again."""
    try:
        return action()
    except Exception as error:
        if not (is_out_of_memory(error) and relieve()):
            raise
        return action()


def text_of(error: BaseException) -> str:
    """Return the text of an exception, without the code that `to_exception` adds again."""
    return f"{error.summary} {error.hint}".rstrip() if isinstance(error, errors.DjinnError) else str(error)

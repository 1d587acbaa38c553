"""Reporting an exception to the other side."""

from __future__ import annotations

import torch

from djinn import errors
from djinn.wire.failures import EXCEPTIONS

__all__ = ("is_out_of_memory", "name_of", "text_of")


def name_of(error: BaseException) -> str:
    """Name the most specific known class of an exception."""
    for kind in type(error).__mro__:
        if EXCEPTIONS.get(kind.__name__) is kind:
            return kind.__name__
    return RuntimeError.__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether PyTorch ran out of memory. On the CPU, only the message says so."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator: " in str(error))


def text_of(error: BaseException) -> str:
    """Return the text of an exception, without the code that `to_exception` adds again."""
    return f"{error.summary} {error.hint}".rstrip() if isinstance(error, errors.DjinnError) else str(error)

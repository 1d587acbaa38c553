"""Exceptions across the wire: a closed table of names, never a class path."""

from __future__ import annotations

import torch

from djinn import errors
from djinn.wire.messages import Failure

_OPERATION_ERRORS: tuple[type[BaseException], ...] = (
    RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, AssertionError, ArithmeticError,
    ZeroDivisionError, OverflowError, MemoryError, LookupError, KeyError, torch.AcceleratorError,
    getattr(torch.linalg, "LinAlgError"),  # noqa: B009  # its stub does not export it
)
EXCEPTIONS: dict[str, type[BaseException]] = {kind.__name__: kind for kind in _OPERATION_ERRORS} | {
    name: getattr(errors, name) for name in errors.__all__
} | {"torch.OutOfMemoryError": torch.OutOfMemoryError}

WARNINGS: dict[str, type[Warning]] = {kind.__name__: kind for kind in (
    UserWarning, DeprecationWarning, FutureWarning, RuntimeWarning)}


def to_exception(failure: Failure, origin: str = "") -> BaseException:
    """Make the exception that a failure stands for.

    Args:
        failure: What the other side reported.
        origin: The line of user code that recorded the operation, if known.
    """
    error = EXCEPTIONS.get(failure.kind, RuntimeError)(failure.message)
    if failure.operator:
        error.add_note(f"djinn: raised by {failure.operator} on the remote accelerator")
    if origin:
        error.add_note(f"djinn: recorded at {origin}")
    elif failure.operator:
        error.add_note("djinn: set DJINN_DEBUG=1 to learn which line recorded it")
    return error

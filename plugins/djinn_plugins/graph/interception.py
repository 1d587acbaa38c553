"""Whether a thread's factories go to the remote device, and a block in which they do not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from enum import StrEnum
from typing import Any

import torch

from djinn.record import devices

__all__ = ("InterceptionContext", "disable_interception", "get_current_context", "is_disabled", "should_intercept")


class InterceptionContext(StrEnum):
    """The reason why a block keeps its factories local, for code that the block calls."""

    NONE = "none"
    """It does not: the usual case."""
    CAPTURING = "capturing"
    """Something within a `djinn.capture` block does not belong to what is captured."""
    CONSTRUCTION = "construction"
    """Tensors are prepared that the program will move itself."""
    MATERIALIZATION = "materialization"
    """Values that have been fetched are worked on."""


_contexts: ContextVar[tuple[InterceptionContext, ...]] = ContextVar("djinn_interception", default=())


def get_current_context() -> InterceptionContext:
    """Return the context of this task's innermost `disable_interception` block; outside any, ``NONE``."""
    return (_contexts.get() or (InterceptionContext.NONE,))[-1]


def is_disabled() -> bool:
    """Whether this thread or task is in a `disable_interception` block."""
    return bool(_contexts.get())


@contextlib.contextmanager
def disable_interception(
    context: InterceptionContext | str = InterceptionContext.CAPTURING
) -> Iterator[InterceptionContext]:
    """Keep the factories of this thread or task local for the length of a block, also within `djinn.capture`.

    A tensor that names the remote device is remote nevertheless, and so are results computed from remote tensors.

    Args:
        context: The reason.
    """
    before = _contexts.get()
    _contexts.set((*before, InterceptionContext(context)))
    try:
        yield get_current_context()
    finally:
        _contexts.set(before)


def set_disabled(*, disabled: bool) -> None:
    """Keep the factories of this thread or task local from here on, or let them be remote again."""
    _contexts.set((InterceptionContext.CAPTURING,) if disabled else ())


def should_intercept(operation: str = "", device: Any = None, context: InterceptionContext | str | None = None) -> bool:
    """Return whether a factory would make a remote tensor in this thread now.

    Args:
        operation: The name of the factory; it makes no difference.
        device: The device that is named in the call.
        context: What `get_current_context` returned, if it was another block that asks.
    """
    from djinn_plugins.graph.capture import is_capturing

    if device is not None:
        return torch.device(device).type == devices.logical_device().type
    if (get_current_context() if context is None else InterceptionContext(context)) is not InterceptionContext.NONE:
        return False
    return is_capturing()

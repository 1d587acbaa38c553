"""Defers exceptions of signal handlers while a session submits something. Without this, they may raise anywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from djinn.hookspecs import hookimpl
from djinn_plugins.common.interrupts import SessionLock, interrupt_handler, use_pythons_handler

__all__ = ("djinn_open_session_lock", "djinn_session_closed")


@hookimpl
def djinn_open_session_lock(
    interrupted: Callable[[], object], hurry: Callable[[], object]
) -> AbstractContextManager[object]:
    """Make a lock that defers interrupts while it is held."""
    interrupt_handler().use(hurry)
    return SessionLock(interrupted)


@hookimpl
def djinn_session_closed(stats: Mapping[str, int]) -> None:
    """Give Ctrl-C back to Python."""
    use_pythons_handler()

"""Logging by component, switched while a session runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from djinn.session import runtime

if TYPE_CHECKING:
    from djinn.ir.tape import Node
    from djinn.session.session import Session

__all__ = ("EXECUTION", "INTERCEPTION", "SHAPE_INFERENCE", "follow", "set_debug_level", "show")

INTERCEPTION = logging.getLogger("djinn.interception")
SHAPE_INFERENCE = logging.getLogger("djinn.shape_inference")
EXECUTION = logging.getLogger("djinn.execution")
_followed: WeakKeyDictionary[Session, Callable[[], None]] = WeakKeyDictionary()
"""What ends the log of a session's operations."""


def set_debug_level(component: str = "", level: str = "DEBUG") -> None:
    """Show the debug messages of a component, for example ``interception``; without a component, of all.

    Raises:
        ValueError: There is no such level.
    """
    logging.getLogger(_name(component)).setLevel(level)
    show(component)
    if runtime._session is not None:
        follow(runtime._session)


def show(component: str = "") -> None:
    """Print a component's messages to standard error, unless the application has set up a handler."""
    if not logging.getLogger(_name(component)).hasHandlers():
        logging.getLogger("djinn").addHandler(logging.StreamHandler())


def follow(session: Session) -> None:
    """Log the operations of a session as they are recorded, if ``interception`` shows debug messages.

    Otherwise, nothing is called per operation.
    """
    stop = _followed.get(session)
    if INTERCEPTION.isEnabledFor(logging.DEBUG):
        if stop is None:
            _followed[session] = session.capture(_recorded)
    elif stop is not None:
        stop()
        del _followed[session]


def _recorded(node: Node) -> None:
    made = ", ".join("absent" if spec is None else f"{spec.dtype}{list(spec.size)}" for spec in node.signature.results)
    INTERCEPTION.debug("recorded %s -> %s", node.signature.template.operator, made)


def _name(component: str) -> str:
    return f"djinn.{component}" if component else "djinn"

"""Values that come when they come: a program that only logs its losses waits for none of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    from djinn.kinds import BackendContext, OpenBackend

__all__ = ("djinn_wrap_backend",)


@hookimpl
def djinn_wrap_backend(context: BackendContext) -> Callable[[OpenBackend], OpenBackend]:
    """Wrap the backend and its connections; outside of recovery, which opens backends again."""
    from djinn_later.backend import open_later

    return lambda opens: partial(open_later, opens)

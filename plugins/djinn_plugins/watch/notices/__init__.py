"""Warns of waits in loops, of models that leave the accelerator, and of devices and sessions that are not used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    from djinn.kinds import BackendContext, OpenBackend
    from djinn.session.session import Session

__all__ = ("djinn_session_closed", "djinn_session_started", "djinn_wrap_backend")


@hookimpl
def djinn_wrap_backend(context: BackendContext) -> Callable[[OpenBackend], OpenBackend]:
    """Count the waits of the program."""
    from djinn_plugins.common.tracing.waits import WaitLedger
    from djinn_plugins.watch.notices.backend import open_watched

    return lambda opens: partial(open_watched, opens, context.shared(WaitLedger))


@hookimpl
def djinn_session_started(session: Session) -> None:
    """Refuse a device that the server does not use, look at choices, and watch whether the program uses the session."""
    from djinn_plugins.watch.notices.sessions import check_device, look_at_choices, watch

    check_device(session)
    look_at_choices(session)
    watch(session)


@hookimpl
def djinn_session_closed(stats: Mapping[str, int]) -> None:
    """Note whether the session was used."""
    from djinn_plugins.watch.notices.sessions import ended

    ended(stats)

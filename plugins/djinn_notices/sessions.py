"""Sessions that are not what the program asked for, or that it does not use."""

from __future__ import annotations

import atexit
import os
import warnings
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

from djinn_lib_trace.waits import DjinnWarning

from djinn.errors import ConfigurationError
from djinn.settings import Config

if TYPE_CHECKING:
    from djinn.session.session import Session

__all__ = ("check_device", "ended", "watch")

_watched: weakref.ref[Session] | None = None
_process: int | None = None
_has_run = False
"""Whether the process has used a session that has ended: then it knows how, as a run of many tests does."""


def check_device(session: Session) -> None:
    """Compare the device that the settings name with those that the servers use.

    Raises:
        ConfigurationError: A server uses another device.
    """
    config = session.plugins.settings(Config)
    wanted = config.device
    if not wanted or not any(config.addresses):
        return
    for executor in session.backend.executors:
        used = executor.welcome.device
        if used != wanted and used.partition(":")[0] != wanted and f"{used}:0" != wanted:
            raise ConfigurationError(
                f"The setting device is {wanted!r}, but the server at {executor.address} uses {used}.",
                hint=f"Leave the setting out, which chooses the device of an executor in this process, or start the "
                     f"server with djinn serve --device {wanted}.")


def watch(session: Session) -> None:
    """Look at the end of the process whether the session was used."""
    global _watched, _process
    if _process != os.getpid():
        _process = os.getpid()
        # After the kernel's own function was registered, so it is called before that one ends the session.
        atexit.register(_look)
    _watched = weakref.ref(session)


def ended(stats: Mapping[str, int]) -> None:
    """Note whether a session was used, from its counters."""
    global _has_run
    _has_run = _has_run or _is_used(stats)


def _is_used(stats: Mapping[str, int]) -> bool:
    return any(stats[name] for name in ("operations", "materializations", "live_handles"))


def _look() -> None:
    session = _watched() if _watched is not None and _process == os.getpid() else None
    if session is None or session.closed or _has_run or os.environ.get("DJINN_RUN_AS"):
        # `djinn run` reports on its own.
        return
    if not _is_used(session.stats()):
        address = session.backend.address
        where = "an executor in this process" if address.startswith("local:") else address
        warnings.warn(
            f"The session with {where} ran nothing: no tensor was on {session.device}. Move the model and its inputs "
            f'there, for example with model.to("{session.device}"), or start the program with `djinn run`.',
            DjinnWarning, stacklevel=1)

"""Sessions that are not what the program asked for, or that it does not use."""

from __future__ import annotations

import atexit
import logging
import os
import warnings
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

from djinn.errors import ConfigurationError
from djinn.settings import Config
from djinn.settings.core import CacheSettings
from djinn.settings.selection import PluginSelection
from djinn_plugins.common.choices import check_choices
from djinn_plugins.common.tracing.waits import DjinnWarning

if TYPE_CHECKING:
    from djinn.session.session import Session

__all__ = ("check_device", "ended", "look_at_choices", "watch")

_log = logging.getLogger("djinn.plugins")
_OF_SERVERS = ("memory", "guard", "authenticator", "admission", "metrics", "store")

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


def look_at_choices(session: Session) -> None:
    """Look whether the objects that the configuration chooses exist, and have an effect on the session.

    Raises:
        PluginError: A chosen object does not exist.
    """
    plugins = session.plugins
    chosen = plugins.selection.chosen
    if not chosen:
        return
    schemes = {executor.address.partition("://")[0] for executor in session.backend.executors}
    idle = dict.fromkeys(_OF_SERVERS, "a server uses it, see djinn serve --plugins")
    installed = PluginSelection.parse(os.environ.get("DJINN_PLUGINS", "")).chosen.get("interceptor", "device")
    if chosen.get("interceptor", installed) != installed:
        _log.warning(
            "the setting plugins chooses interceptor=%s, of which only the handlers are used: %s was installed when "
            "djinn was imported, and only DJINN_PLUGINS chooses another", chosen["interceptor"], installed)
    idle["engine"] = "djinn cluster up uses it"
    if not os.environ.get("DJINN_RUN_AS"):
        idle["mode"] = "djinn run uses it"
    if not plugins.settings(CacheSettings).result_cache_bytes:
        idle["cache"] = "no results are kept, see the setting result_cache_bytes"
    if "local" not in schemes:
        idle["executor"] = "the server has an executor of its own"
    if "transport" in chosen and (scheme := plugins.choose("transport").scheme) not in schemes:
        idle["transport"] = f"it carries {scheme}://, and the session uses {', '.join(sorted(schemes))}"
    check_choices(plugins, idle)


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

"""The kernel's own settings of a session."""

from __future__ import annotations

import re
from typing import Any, Literal

import attrs

from djinn.errors import ConfigurationError
from djinn.settings.declared import setting
from djinn.settings.selection import PluginSelection

__all__ = ("LOG_LEVELS", "CacheSettings", "Config")

LOG_LEVELS = ("NOTSET", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def _address(value: Any) -> str:
    if re.fullmatch(r"\s*([a-z][a-z0-9+.-]*://\S*)?\s*", value) is None:
        raise ValueError
    return str(value).strip()


def _addresses(value: Any) -> tuple[str, ...]:
    found = tuple(_address(item) for item in (value.split(",") if isinstance(value, str) else value))
    if not all(found):
        raise ValueError
    return found


def _level(value: Any) -> str:
    if str(value).upper() not in LOG_LEVELS:
        raise ValueError
    return str(value).upper()


def _count(value: Any) -> Any:
    if value not in (None, "auto") and (isinstance(value, bool) or int(value) != float(value) or int(value) < 1):
        raise ValueError
    return value if value in (None, "auto") else int(value)


@attrs.frozen
class Config:
    """The settings of a session that the kernel itself reads."""

    server: str = setting(
        "", help="address of the executor, `tcp://host:port`, `tls://host:port` or `unix:///path`; empty for one in "
                 "this process",
        reads=_address, allowed="an address such as tcp://host:port, or nothing for an executor in this process")
    servers: tuple[str, ...] = setting(
        (), help="addresses of several executors, instead of `server`; in the variable, separated by commas",
        reads=_addresses, allowed="a list of addresses such as tcp://host:port")
    token: str = setting("", help="the token that the server requires", secret=True)
    device: str = setting(
        "", help="device of an executor in this process, such as `cpu` or `cuda:0`; empty for the best available",
        allowed="a device of PyTorch's such as cpu or cuda:0")
    plugins: PluginSelection = setting(
        attrs.Factory(PluginSelection), help="plugins to use and to leave out", reads=PluginSelection.parse,
        allowed="items kind=name and -plugin, separated by commas")
    flush_every: int | Literal["auto"] | None = setting(
        "auto", help="number of pending operations that are sent without waiting for a result; `auto`: a number that "
                     "suits the connection; `None`: never before a value is needed, and then only the operations that "
                     "it needs",
        reads=_count, allowed="a whole number from 1, or None, or 'auto'")
    debug: bool = setting(
        False, help="record the user's source line for every operation, and name it when the operation fails")
    log_level: str = setting(
        "NOTSET", help="least severe message that is logged", reads=_level, allowed=f"one of {', '.join(LOG_LEVELS)}")
    log_component: str = setting(
        "", help="components to which `log_level` applies, separated by commas; empty for all",
        allowed="names of components separated by commas")
    connect_timeout_s: float = setting(10.0, help="seconds that connecting may take", above=0)
    request_timeout_s: float | None = setting(
        7200.0, help="seconds that an answer may take; `None`: no limit while the server lives", above=0)

    def __attrs_post_init__(self) -> None:
        if self.server and self.servers:
            raise ConfigurationError("Both server and servers are set.", hint="Set one of them.")

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the executors; an empty address stands for one in this process."""
        return self.servers or (self.server,)


@attrs.frozen
class CacheSettings:
    """The setting of caches. A plugin with a cache declares it: ``settings.add(CacheSettings)``."""

    result_cache_bytes: int = setting(
        0, help="bytes that the executor may use for results that the program no longer references, so that the same "
                "work on the same values is done once; `0`: none", minimum=0)

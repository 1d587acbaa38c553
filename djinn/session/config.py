"""The configuration of a session: arguments override the environment, which overrides defaults."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NoReturn

import attrs

from djinn.errors import ConfigurationError
from djinn.plugins.selection import PluginSelection

__all__ = ("ENVIRONMENT", "LOG_LEVELS", "Config")

ENVIRONMENT: Mapping[str, str] = MappingProxyType({
    "DJINN_SERVER": "server",
    "DJINN_SERVERS": "servers",
    "DJINN_PLACEMENT": "placement",
    "DJINN_TOKEN": "token",
    "DJINN_OWNER": "owner",
    "DJINN_TLS_CA": "tls_ca",
    "DJINN_TLS_CERT": "tls_cert",
    "DJINN_TLS_KEY": "tls_key",
    "DJINN_PLUGINS": "plugins",
    "DJINN_LOG_LEVEL": "log_level",
    "DJINN_LOG_COMPONENT": "log_component",
    "DJINN_DEBUG": "debug",
    "DJINN_RESUME": "resume",
    "DJINN_RECOVERY": "recovery",
    "DJINN_LOCAL_FALLBACK": "local_fallback",
    "DJINN_RESULT_CACHE_BYTES": "result_cache_bytes",
})
"""Environment variables and the settings that they set."""

PLACEMENTS = ("explicit", "automatic")
RECOVERIES = ("none", "replay")
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@attrs.frozen
class Config:
    """All settings of a session."""

    server: str = ""
    """Address of the executor, ``tcp://host:port``, ``tls://host:port`` or ``unix:///path``; empty for an executor in
    this process."""
    servers: tuple[str, ...] = ()
    """Addresses of several executors, instead of ``server``; in ``DJINN_SERVERS``, separated by commas."""
    placement: Literal["explicit", "automatic"] = "explicit"
    """With several executors. ``explicit``: each is a device, ``remote_accelerator:0``, ``:1``, ..., and the user
    chooses the device. ``automatic``: all form one device, ``remote_accelerator:0``, and the scheduler chooses the
    executor.
    """
    token: str = attrs.field(default="", repr=False)
    """The token that the server requires from clients."""
    owner: str = attrs.field(default="auto", repr=False)
    """A secret chosen by the user: the server keeps uploads of sessions with the same secret, and they are not sent
    again. ``auto``: only for this process, and only if the server is another machine. Empty: the server keeps nothing.
    """
    tls_ca: str = ""
    """File with the certificate authorities trusted for a ``tls://`` server; empty for the system's."""
    tls_cert: str = ""
    """File with this client's certificate, for servers that require one."""
    tls_key: str = ""
    """File with its key; empty if the certificate file contains it."""
    device: str = ""
    """Device of an executor in this process, for example ``cuda:0``; empty for the best available one."""
    selection: PluginSelection = attrs.field(factory=PluginSelection)
    """Which plugins to use; the setting is called ``plugins``."""
    flush_every: int | Literal["auto"] | None = "auto"
    """Number of pending operations that are sent without waiting for a request. ``auto``: a number that suits the
    connection. ``None``: operations are sent only when a value is needed, and then only those that it needs.
    """
    strict: bool = False
    """Whether combining an ordinary tensor with a lazy one is an error, as with CUDA, instead of an upload."""
    debug: bool = False
    """Whether the line of user code is kept for every recorded operation."""
    result_cache_bytes: int = 0
    """Bytes of unreferenced results that the executor may keep for reuse; 0: none, and results are not looked up."""
    log_level: str = "WARNING"
    """Lowest severity that is logged, one of `LOG_LEVELS`."""
    log_component: str = ""
    """Components that are logged, separated by commas; empty for all."""
    connect_timeout_s: float = 10.0
    """How long establishing a connection may take."""
    request_timeout_s: float | None = None
    """How long an answer may take; ``None``: no limit while the server is alive."""
    resume: bool = True
    """Whether a session continues on a new connection when its connection breaks but the server is alive."""
    resume_timeout_s: float = 30.0
    """How long to try to reconnect."""
    resume_bytes: int = 64 * 2**20
    """How many sent bytes may be kept here for that."""
    recovery: Literal["none", "replay"] = "none"
    """What happens when a server dies: ``none``: its values are lost; ``replay``: they are recomputed, and the program
    continues.
    """
    recovery_bytes: int = 2**30
    """How many bytes of tensors may be kept here for that."""
    recovery_budget_s: float = 5.0
    """How many seconds of work a recovery may have to repeat."""
    recovery_timeout_s: float = 30.0
    """How long servers may take to come back."""
    local_fallback: bool = False
    """Whether operations run in this process if no server comes back."""

    @classmethod
    def resolve(cls, overrides: Mapping[str, Any], environ: Mapping[str, str]) -> Config:
        """Resolve a configuration.

        Args:
            overrides: Settings by name; they take precedence over the environment. ``plugins`` (or ``selection``) adds
                to ``DJINN_PLUGINS`` and takes precedence where both choose. ``None`` means "not given" where a setting
                cannot be ``None``.
            environ: Environment variables; empty ones count as absent.

        Raises:
            ConfigurationError: A setting is unknown or has an invalid value. The error names all such settings, their
                origins and the allowed values.
        """
        origins = {setting: variable for variable, setting in ENVIRONMENT.items() if environ.get(variable)}
        given: dict[str, Any] = {setting: environ[variable] for setting, variable in origins.items()}
        plugins = PluginSelection.parse(given.pop("plugins", None))
        for setting, value in overrides.items():
            if setting in ("plugins", "selection"):
                plugins = plugins.merged(PluginSelection.parse(value))
            elif value is not None or setting in _OPTIONAL or setting not in _RULES:
                given[setting], origins[setting] = value, setting
        if overrides.get("server") or overrides.get("servers"):
            # A server named in the program takes precedence over the environment.
            given = {k: v for k, v in given.items() if k not in ("server", "servers") or overrides.get(k)}
        made = _structure(cls, given | {"selection": plugins}, origins)
        if made.server and made.servers:
            raise ConfigurationError("Both server and servers are set.", hint="Set one of them.")
        return made

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the executors; an empty address stands for one in this process."""
        return self.servers or (self.server,)


@attrs.frozen
class _Rule:
    """How a setting is parsed, and its allowed values."""

    read: Callable[[Any], Any]
    allowed: str


def _refuse() -> NoReturn:
    raise ValueError


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _refuse()


def _address(value: Any) -> str:
    text = _text(value).strip()
    return text if not text or re.fullmatch(r"[a-z][a-z0-9+.-]*://\S*", text) else _refuse()


def _addresses(value: Any) -> tuple[str, ...]:
    listed = value.split(",") if isinstance(value, str) else list(value)
    addresses = tuple(_address(item) for item in listed)
    return addresses if all(addresses) else _refuse()


def _path(value: Any) -> str:
    return os.fspath(value) if isinstance(value, Path) else _text(value)


def _level(value: Any) -> str:
    level = _text(value).upper()
    return level if level in LOG_LEVELS else _refuse()


_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    return True if text in _TRUE else False if text in _FALSE else _refuse()


def _count(value: Any) -> int | Literal["auto"] | None:
    if value is None or value == "auto":
        return None if value is None else "auto"
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        _refuse()
    return value


def _one_of(choices: Sequence[str]) -> Callable[[Any], str]:
    return lambda value: _text(value) if value in choices else _refuse()


def _bytes(value: Any) -> int:
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        _refuse()
    return value


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        _refuse()
    return float(value)


def _optional_seconds(value: Any) -> float | None:
    return None if value is None else _seconds(value)


_OPTIONAL = frozenset({"flush_every", "request_timeout_s"})
_RULES: Mapping[str, _Rule] = MappingProxyType({
    "server": _Rule(_address, "an address such as tcp://host:port, or nothing for an executor in this process"),
    "servers": _Rule(_addresses, "a list of addresses such as tcp://host:port"),
    "placement": _Rule(_one_of(PLACEMENTS), f"one of {', '.join(PLACEMENTS)}"),
    "token": _Rule(_text, "text"),
    "owner": _Rule(_text, "text"),
    "tls_ca": _Rule(_path, "the path of a file"),
    "tls_cert": _Rule(_path, "the path of a file"),
    "tls_key": _Rule(_path, "the path of a file"),
    "device": _Rule(_text, "a device of PyTorch's such as cpu or cuda:0"),
    "flush_every": _Rule(_count, "a whole number from 1, or None, or 'auto'"),
    "log_level": _Rule(_level, f"one of {', '.join(LOG_LEVELS)}"),
    "log_component": _Rule(_text, "names of components separated by commas"),
    "request_timeout_s": _Rule(_optional_seconds, "a number of seconds above 0, or None"),
    "recovery": _Rule(_one_of(RECOVERIES), f"one of {', '.join(RECOVERIES)}"),
    **dict.fromkeys(("strict", "debug", "resume", "local_fallback"),
                    _Rule(_flag, f"one of True, False, {', '.join(_TRUE + _FALSE)}")),
    **dict.fromkeys(("connect_timeout_s", "resume_timeout_s", "recovery_budget_s", "recovery_timeout_s"),
                    _Rule(_seconds, "a number of seconds above 0")),
    **dict.fromkeys(("result_cache_bytes", "resume_bytes", "recovery_bytes"),
                    _Rule(_bytes, "a whole number of bytes from 0")),
})


def _structure(cls: type[Config], given: Mapping[str, Any], origins: Mapping[str, str]) -> Config:
    # Imported late: `import djinn` resolves no configuration, and must stay fast.
    import cattrs
    from cattrs.gen import make_dict_structure_fn, override

    def by_rule(rule: _Rule) -> Any:
        return override(struct_hook=lambda value, _: rule.read(value))

    fields: dict[str, Any] = {setting: by_rule(rule) for setting, rule in _RULES.items()}
    fields["selection"] = override(struct_hook=lambda value, _: value)
    structure = make_dict_structure_fn(cls, cattrs.Converter(), _cattrs_forbid_extra_keys=True, **fields)
    try:
        return structure(given, cls)
    except cattrs.ClassValidationError as group:
        raise _mistakes(group, given, origins) from None


def _mistakes(group: Any, given: Mapping[str, Any], origins: Mapping[str, str]) -> ConfigurationError:
    """Convert all errors that cattrs found to one error. Values of secrets are not repeated."""
    import cattrs

    told: list[str] = []
    allowed: list[str] = []
    for error in group.exceptions:
        if isinstance(error, cattrs.ForbiddenExtraKeysError):
            unknown = ", ".join(sorted(map(repr, error.extra_fields)))
            told.append(f"There is no setting {unknown}")
            allowed.append(f"Settings are {', '.join(sorted([*_RULES, 'plugins']))}")
    for _, note in group.group_exceptions()[0]:
        setting, origin = note.name, origins.get(note.name, note.name)
        source = f"{setting} (from {origin})" if origin != setting else setting
        value = "something that is not text" if setting in ("token", "owner") else repr(given[setting])
        told.append(f"The setting {source} is {value}")
        allowed.append(f"{setting} may be {_RULES[setting].allowed}")
    return ConfigurationError("; ".join(told) + ".", hint="; ".join(allowed) + ".")

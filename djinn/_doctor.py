"""What is checked when djinn does not work as it should."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version

import attrs
import torch

from djinn.config import Config
from djinn.errors import DjinnError
from djinn.kinds import Connection, ConnectOptions
from djinn.plugins import DEFAULTS, Plugins
from djinn.protocol.messages import Batch

ROUND_TRIPS = 5


@attrs.frozen
class Check:
    """One thing that was looked at."""

    name: str
    ok: bool
    found: str
    remedy: str = ""


def djinn_version() -> str:
    """Version of the installed distribution."""
    try:
        return version("djinn-torch")
    except PackageNotFoundError:
        return "unknown, because djinn-torch is not installed"


def examine(plugins: Plugins, config: Config, problems: Sequence[DjinnError]) -> list[Check]:
    """Look at everything that a session needs. Opens a connection if the configuration names a server.

    Args:
        plugins: Loaded as far as they can be.
        config: The configuration, as far as it makes sense.
        problems: What went wrong with either.
    """
    checks = [
        Check("djinn", ok=True, found=djinn_version()),
        Check("python", ok=True, found=f"{platform.python_version()} on {platform.platform(terse=True)}"),
        Check("torch", ok=True, found=str(torch.__version__)),
    ]
    checks += [_failed("configuration or plugin", problem) for problem in problems]
    checks += [_attempt(kind, lambda kind=kind: _chosen(plugins, kind)) for kind in DEFAULTS]  # type: ignore[misc]  # default binds the loop variable
    checks.append(Check("spare device", ok=True, found=_spare_device()))
    checks.append(_attempt("logical device", lambda: _device(plugins)))
    checks.append(_attempt("executor devices here", lambda: _executor_devices(plugins)))
    if config.server:
        checks.append(_attempt("server", lambda: _server(plugins, config)))
    else:
        checks.append(Check("server", ok=True, found="none; operations run in this process",
                            remedy="To use one, set DJINN_SERVER=tcp://HOST:PORT or give --server."))
    return checks


def _failed(name: str, error: DjinnError) -> Check:
    return Check(name, ok=False, found=f"[{error.code}] {error.summary}", remedy=error.hint)


def _attempt(name: str, look: Callable[[], str]) -> Check:
    try:
        return Check(name, ok=True, found=look())
    except DjinnError as error:
        return _failed(name, error)
    except Exception as error:  # noqa: BLE001  # a plugin may fail in any way; a doctor who dies of it helps nobody
        return Check(name, ok=False, found=f"{type(error).__name__}: {error}",
                     remedy="Report this to the plugin's author; DJINN_PLUGINS=-NAME switches the plugin off.")


def _chosen(plugins: Plugins, kind: str) -> str:
    found = plugins.find(kind, DEFAULTS[kind])
    return f"{found.name} ({found.plugin}, {found.distribution})"


def _device(plugins: Plugins) -> str:
    return str(plugins.choose("interceptor", DEFAULTS["interceptor"]).install())


def _spare_device() -> str:
    """Say who has taken the one device that PyTorch lets other packages name."""
    name = torch._C._get_privateuse1_backend_name()
    module = getattr(torch, name, None)
    if module is None:
        return f"{name!r}, taken by nobody"
    owner = getattr(module, "__name__", "") or type(module).__module__
    return f"{name!r}, taken by {owner}"


def _executor_devices(plugins: Plugins) -> str:
    devices = plugins.choose("executor", DEFAULTS["executor"]).devices()
    return ", ".join(devices) or "none"


def _server(plugins: Plugins, config: Config) -> str:
    scheme = config.server.partition("://")[0]
    options = ConnectOptions(token=config.token, connect_timeout_s=config.connect_timeout_s, tls_ca=config.tls_ca,
                             tls_cert=config.tls_cert, tls_key=config.tls_key)
    begun = time.perf_counter()
    connection = plugins.transport_for(scheme).connect(config.server, options)
    connected_s = time.perf_counter() - begun
    try:
        round_trip_s = statistics.median(_round_trip_s(connection) for _ in range(ROUND_TRIPS))
        welcome = connection.welcome
    finally:
        connection.close()
    return (f"{config.server} answers: device {welcome.device}, torch {welcome.torch}, python {welcome.python}; "
            f"connected in {connected_s * 1e3:.1f} ms, round trip {round_trip_s * 1e3:.3f} ms")


def _round_trip_s(connection: Connection) -> float:
    begun = time.perf_counter()
    connection.request(Batch(synchronize=True), [])
    return time.perf_counter() - begun

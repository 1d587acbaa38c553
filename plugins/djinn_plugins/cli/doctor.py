"""The checks of ``djinn doctor``."""

from __future__ import annotations

import contextlib
import datetime
import difflib
import ipaddress
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from urllib.parse import urlsplit

import attrs
import torch

from djinn.errors import DjinnError, LimitError, PluginError, RefusedError
from djinn.kinds import Connection, ConnectOptions
from djinn.plugins import DEFAULTS, Plugins
from djinn.settings import Config, Settings
from djinn.wire.messages import Batch, Free, Upload
from djinn.wire.tensors import header_of
from djinn_plugins.cli.listing import executors, why_without_devices
from djinn_plugins.cli.versions import djinn_version
from djinn_plugins.common.device_report import device_of, summary_of
from djinn_plugins.common.kinds.transport import SupportsCertificate
from djinn_plugins.common.net.server_address import server_address
from djinn_plugins.common.settings.connection import TlsSettings, UploadSettings

ROUND_TRIPS = 5
FIRST_BYTES, MAX_BYTES = 2**20, 2**26
"""Bytes sent to measure throughput: first the smaller amount, then as much as takes about `TRANSFER_S`."""
TRANSFER_S = 0.3
EXPIRY_WARNING_DAYS = 14
MIN_FILES = 1024
"""Connections, libraries and shared memory need file descriptors."""
MIN_LOCKED_BYTES = 2**26
"""Page-locked memory for copies to and from a CUDA device; see `docs/server.md`."""


@attrs.frozen
class CheckResult:
    """The result of one check."""

    name: str
    ok: bool
    found: str
    remedy: str = ""
    group: str = ""
    """The heading that it stands under."""


def examine(plugins: Plugins, problems: Sequence[DjinnError]) -> list[CheckResult]:
    """Check everything that a session needs. Opens a connection if the configuration names a server.

    Args:
        plugins: The plugins that could be loaded, with the settings that are valid.
        problems: Errors from loading either.
    """
    config = plugins.settings(Config)
    checks = _under("This installation", [
        CheckResult("djinn", ok=True, found=djinn_version()),
        CheckResult("python", ok=True, found=f"{platform.python_version()} on {platform.platform(terse=True)}"),
        CheckResult("torch", ok=True, found=str(torch.__version__)),
        *(_failed("configuration or plugin", problem) for problem in problems),
        *_variables(plugins, os.environ),
    ])
    checks += _under("Plugins", [_attempt(kind, lambda kind=kind: _chosen(plugins, kind)) for kind in DEFAULTS])  # type: ignore[misc]  # default binds the loop variable
    checks += _under("Devices", [
        CheckResult("spare device", ok=True, found=_spare_device()),
        _attempt("logical device", lambda: _device(plugins)),
        _attempt("executor", lambda: _executor(plugins, config)),
        _attempt("executor devices here", lambda: _executor_devices(plugins)),
    ])
    checks += _under("This system", [*_limits(), *_systems(plugins)])
    return checks + _under("The server", _server(plugins, config))


def _under(group: str, checks: Iterable[CheckResult]) -> list[CheckResult]:
    return [attrs.evolve(check, group=group) for check in checks]


def _variables(plugins: Plugins, environ: Mapping[str, str]) -> Iterator[CheckResult]:
    """Find environment variables that are almost the name of a setting: such a variable has no effect."""
    known = {one.variable for one in plugins.declared.by_name.values()}
    for name in sorted(environ):
        close = difflib.get_close_matches(name, known, 1, cutoff=0.87) if name.startswith("DJINN_") else []
        if close and name not in known:
            yield CheckResult(f"variable {name}", ok=False, found="no setting has this variable",
                              remedy=f"Did you mean {close[0]}? `djinn settings` lists all.")


def _failed(name: str, error: DjinnError) -> CheckResult:
    return CheckResult(name, ok=False, found=f"[{error.code}] {error.summary}", remedy=error.hint)


def _attempt(name: str, look: Callable[[], str]) -> CheckResult:
    try:
        return CheckResult(name, ok=True, found=look())
    except DjinnError as error:
        return _failed(name, error)
    except Exception as error:  # noqa: BLE001  # a plugin may fail in any way; the other checks must still run
        return CheckResult(name, ok=False, found=f"{type(error).__name__}: {error}",
                           remedy="Report this to the plugin's author; DJINN_PLUGINS=-NAME switches the plugin off.")


def _chosen(plugins: Plugins, kind: str) -> str:
    found = plugins.find(kind, DEFAULTS[kind])
    return f"{found.name} ({found.plugin}, {found.distribution})"


def _device(plugins: Plugins) -> str:
    return str(plugins.choose("interceptor", DEFAULTS["interceptor"]).install())


def _spare_device() -> str:
    """Say which package has taken the one device that PyTorch lets other packages rename."""
    name = torch._C._get_privateuse1_backend_name()
    module = getattr(torch, name, None)
    if module is None:
        return f"{name!r}, taken by nobody"
    owner = getattr(module, "__name__", "") or type(module).__module__
    return f"{name!r}, taken by {owner}"


def _executor(plugins: Plugins, config: Config) -> str:
    """Say which executor a session without a server uses, and why that one.

    Raises:
        ConfigurationError: It has no device here, and is needed because there is no server.
    """
    found = plugins.find_executor(config.device)
    if not config.server and not found.value.devices():
        found.value.open("").close()
    if "executor" in plugins.selection.chosen:
        why = "chosen in the configuration"
    elif config.device:
        why = f"for the device {config.device}"
    else:
        others = [reason for other in executors(plugins) if (reason := why_without_devices(other.value))]
        why = "; ".join(["the default here", *others])
    return f"{found.name} ({found.plugin}, {found.distribution}): {why}"


def _executor_devices(plugins: Plugins) -> str:
    """List the devices of all executors."""
    devices = [f"{device} ({entry.name})" for entry in executors(plugins) for device in entry.value.devices()]
    told = [f"; {name}={os.environ[name]!r}" for name in ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY")
            if name in os.environ]
    return "".join([", ".join(devices) or "none", *told])


def _limits() -> Iterator[CheckResult]:
    """Check the system's limits for a process, where there are any."""
    try:
        import resource
    except ImportError:
        yield CheckResult("limits", ok=True, found="this system has none of this kind")
        return
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = files == resource.RLIM_INFINITY or files >= MIN_FILES
    yield CheckResult("open files (ulimit -n)", ok=enough, found=_amount(files, resource.RLIM_INFINITY),
                      remedy="" if enough else f"Run `ulimit -n {MIN_FILES * 4}` before the program, or raise "
                                               "LimitNOFILE of its service.")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    # Only copies to and from a GPU use page-locked memory.
    enough = locked == resource.RLIM_INFINITY or locked >= MIN_LOCKED_BYTES or not torch.cuda.is_available()
    yield CheckResult("locked memory (ulimit -l)", ok=enough, found=_amount(locked, resource.RLIM_INFINITY, " bytes"),
                      remedy="" if enough else f"Run `ulimit -l {MIN_LOCKED_BYTES // 1024}` before the program, or "
                                               "raise LimitMEMLOCK of its service.")


def _systems(plugins: Plugins) -> list[CheckResult]:
    """Ask plugins which features of this system they can use."""
    checks: list[CheckResult] = []
    problems: list[PluginError] = []

    def report(name: str, found: str, remedy: str) -> None:
        checks.append(CheckResult(name, ok=True, found=found, remedy=remedy))

    for plugin in sorted(plugins.distributions):
        try:
            plugins.call_alone(plugin, "djinn_examine_system", report=report)
        except PluginError as error:
            problems.append(error)
    return checks + [_failed("system", problem) for problem in problems]


def _amount(limit: int, infinity: int, unit: str = "") -> str:
    return "unlimited" if limit == infinity else f"{limit}{unit}"


def _server(plugins: Plugins, config: Config) -> list[CheckResult]:
    """Find the server, and check it."""
    try:
        address = server_address(plugins)
    except DjinnError as error:
        return [_failed("cluster", error)]
    if not address:
        return [CheckResult("server", ok=True, found="none; operations run in this process",
                            remedy="To use one, set DJINN_SERVER=tcp://HOST:PORT or give --server.")]
    led = CheckResult("cluster", ok=True, found=f"its directory leads to {address}")
    return [*([] if config.server else [led]), *_connection(plugins, config, address)]


def _connection(plugins: Plugins, config: Config, address: str) -> list[CheckResult]:
    """Connect, and check what the connection shows. Without a connection, report only that."""
    found: list[CheckResult] = []

    def look() -> str:
        scheme = address.partition("://")[0]
        # An upload that the server keeps would not be sent a second time.
        settings = Settings(plugins.settings(TlsSettings), UploadSettings(owner=""))
        options = ConnectOptions(token=config.token, connect_timeout_s=config.connect_timeout_s, settings=settings)
        begun = time.perf_counter()
        connection = plugins.transport_for(scheme).connect(address, options)
        connected_s = time.perf_counter() - begun
        try:
            round_trip_s = statistics.median(_round_trip_s(connection) for _ in range(ROUND_TRIPS))
            found.extend((_versions(connection), _certificate(connection, time.time()), _token(config, address)))
            found.append(_attempt("throughput", lambda: _throughput(connection)))
        finally:
            connection.close()
        welcome = connection.welcome
        return (f"{address} answers: device {welcome.device} ({summary_of(device_of(welcome))}), "
                f"torch {welcome.torch}, python {welcome.python}; "
                f"connected in {connected_s * 1e3:.1f} ms, round trip {round_trip_s * 1e3:.3f} ms")

    server = _attempt("server", look)
    return [server, *found]


def _round_trip_s(connection: Connection) -> float:
    begun = time.perf_counter()
    connection.request(Batch(synchronize=True), [])
    return time.perf_counter() - begun


def _throughput(connection: Connection) -> str:
    """Send some bytes there and back, first a small amount to choose the size of the measurement."""
    size_bytes = FIRST_BYTES
    there_s, back_s = _transfer_s(connection, size_bytes)
    more = int(min(MAX_BYTES, FIRST_BYTES * TRANSFER_S / max(there_s, back_s)))
    if more > 2 * size_bytes:
        # A limit of the server may forbid it; then use the result for the first amount.
        with contextlib.suppress(LimitError, RefusedError):
            there_s, back_s = _transfer_s(connection, more)
            size_bytes = more
    return (f"{size_bytes / there_s / 1e6:.1f} MB/s there, {size_bytes / back_s / 1e6:.1f} MB/s back, measured with "
            f"{size_bytes / 2**20:.1f} MiB")


def _transfer_s(connection: Connection, size_bytes: int) -> tuple[float, float]:
    tensor = torch.arange(size_bytes // 8)
    begun = time.perf_counter()
    answer, _ = connection.request(Batch([Upload(1, header_of(tensor))], synchronize=True), [tensor])
    uploaded = time.perf_counter()
    if answer.failures:
        raise DjinnError(f"The server could not take {size_bytes} bytes: {answer.failures[0].message}")
    _, received = connection.request(Batch(fetch=(1,)), [])
    downloaded = time.perf_counter()
    connection.request(Batch([Free((1,))], synchronize=True), [])
    if not torch.equal(received[0], tensor):
        raise DjinnError("What came back is not what was sent.",
                         hint="Something between here and the server changes bytes; use a tls:// address.")
    return uploaded - begun, downloaded - uploaded


def _versions(connection: Connection) -> CheckResult:
    here, there = str(torch.__version__), connection.welcome.torch
    same = here.partition("+")[0] == there.partition("+")[0]
    return CheckResult("torch there", ok=True, found=there, remedy="" if same else (
        f"Operators may differ from {here} here, and one that does is refused by name: install the same release."))


def _certificate(connection: Connection, now_s: float) -> CheckResult:
    expires_s = connection.certificate_expires_s if isinstance(connection, SupportsCertificate) else None
    if expires_s is None:
        return CheckResult("certificate", ok=True, found="none; the connection is not encrypted")
    days = (expires_s - now_s) / 86400
    day = datetime.datetime.fromtimestamp(expires_s, datetime.UTC).date()
    return CheckResult("certificate", ok=days > EXPIRY_WARNING_DAYS, found=f"good until {day}, {days:.0f} days",
                       remedy="" if days > EXPIRY_WARNING_DAYS else (
                           "Have a new certificate made, and restart the server with it: after that day nobody can "
                           "connect."))


def _token(config: Config, address: str) -> CheckResult:
    """Say whether there is a token, and whether others could read it in transit."""
    if not config.token:
        return CheckResult("token", ok=True, found="none; the server lets in everybody who can reach it")
    if address.startswith("tcp://") and not _stays_here(urlsplit(address).hostname or ""):
        return CheckResult("token", ok=False, found="given, and taken by the server; sent over a network in the clear",
                           remedy="Start the server with --tls-cert and use its tls:// address, or reach it through a "
                                  "tunnel; then have a new token made.")
    return CheckResult("token", ok=True, found="given, and the server lets it in")


def _stays_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

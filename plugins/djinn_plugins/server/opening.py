"""Opens a server: checks its options, starts the processes that it needs, and listens."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

import djinn
from djinn.errors import ConfigurationError, TransportError
from djinn_plugins.common.choices import check_choices
from djinn_plugins.common.net.exposure import is_loopback
from djinn_plugins.common.net.listening import listen
from djinn_plugins.executor.content_store import read_digests
from djinn_plugins.server.admission import GuardedAdmission
from djinn_plugins.server.authentication import Authentication
from djinn_plugins.server.checks import check_options
from djinn_plugins.server.control import Setup
from djinn_plugins.server.dialing import Exchange
from djinn_plugins.server.event_loop import Tasks
from djinn_plugins.server.forkserver import fork_forkserver, prepare, start_forkserver
from djinn_plugins.server.gateway import Gateway
from djinn_plugins.server.isolation import boundary_of
from djinn_plugins.server.kinds.admission import AdmissionFactory
from djinn_plugins.server.kinds.authenticator import AuthenticatorFactory
from djinn_plugins.server.kinds.metrics import MetricsFactory
from djinn_plugins.server.kinds.store import ModelStoreFactory
from djinn_plugins.server.log_lines import keep_log, write_to
from djinn_plugins.server.memory import default_keep_bytes, memory_plugin
from djinn_plugins.server.models import GatewayModels
from djinn_plugins.server.operator_socket import check_path, default_folder, servers
from djinn_plugins.server.options import ServeOptions
from djinn_plugins.server.peers import UNIX, PeerPolicy
from djinn_plugins.server.plugin_settings import environment_of
from djinn_plugins.server.reloading import Reloading
from djinn_plugins.server.sandbox.fence import plan
from djinn_plugins.server.shared_uploads import GatewayUploads
from djinn_plugins.server.supervisor import Supervisor

if TYPE_CHECKING:
    from djinn.kinds.transport import Transport
    from djinn.plugins import Plugins
    from djinn_plugins.common.kinds.executor import ExecutorFactory

__all__ = ("ListenError", "open_server")

_OF_SESSIONS = ("interceptor", "classifier", "source", "analyzer", "pattern", "exporter", "scheduler", "backend",
                "cache", "observer")
"""Kinds that servers do not use."""
_SECRETS = frozenset({"DJINN_TOKEN", "DJINN_OWNER"})
"""Environment variables that only the gateway may read."""
_log = logging.getLogger("djinn.server")


class ListenError(TransportError):
    """The address cannot be listened on."""

    code = TransportError.code


def open_server(
    options: ServeOptions, read: Callable[[], tuple[ServeOptions, list[str]]], settings: Mapping[str, Any],
) -> tuple[Gateway, Reloading]:
    """Open a server, which does not accept connections yet.

    Args:
        options: Its options.
        read: Reads the options again; returns them, and the names of changed options that need a restart.
        settings: Settings of plugins that the command line gives.

    Returns:
        The server, and what reloads its options.

    Raises:
        ConfigurationError: The options contradict each other, or are unsafe.
        ListenError: The address cannot be listened on.
        DjinnError: A plugin is missing or does not work.
    """
    from djinn.plugins import DEFAULTS, Plugins
    from djinn.settings import Config
    from djinn.settings.logs import configure
    from djinn_plugins.common.kinds.transport import SupportsAdoption

    # The whole package, before a process is forked that needs it; the program `djinn` postpones it.
    version = djinn.__version__
    quiet = {} if os.environ.get("DJINN_LOG_LEVEL") else {"log_level": "INFO"}
    plugins = Plugins.configured({**settings, "token": options.tokens.token, "plugins": options.plugins, **quiet},
                                 os.environ, "server")
    config = plugins.settings(Config)
    keep_log()
    write_to(sys.stderr, options.operator.log_format, secrets=(config.token,), role="gateway")
    configure(config)
    options = _with_device(options, plugins)
    places = [_place(plugins.find_executor(device or "cpu").value, device) for device in options.device.names]
    for kind in ("guard", "shapes"):
        plugins.choose(kind, DEFAULTS[kind])
    transport = _transport(options, plugins)
    memory_plugin(plugins, is_needed=options.limits.memory_bytes > 0)
    authenticators: AuthenticatorFactory = plugins.choose("authenticator", DEFAULTS["authenticator"])
    admissions: AdmissionFactory = plugins.choose("admission", DEFAULTS["admission"])
    stores: ModelStoreFactory | None = plugins.choose("store", DEFAULTS["store"]) if options.models else None
    outputs: list[MetricsFactory] = plugins.all("metrics")

    def check(options: ServeOptions) -> bool:
        return check_options(options, needs_token=authenticators.check(options),
                             encrypts=getattr(transport, "encrypts", False))

    def read_again() -> tuple[ServeOptions, list[str]]:
        now, left = read()
        return attrs.evolve(now, device=options.device), left

    is_private = check(options)
    plan(options.sandbox, (options.tokens.file, options.tls.key or options.tls.cert), encrypts=bool(options.tls.cert))
    # Only this process may see the secrets.
    secrets = _SECRETS.union(authenticators.secret_variables)
    environment = {name: value for name, value in os.environ.items() if name not in secrets}
    chosen = plugins.selection
    environment["DJINN_PLUGINS"] = ",".join([*(f"-{name}" for name in chosen.disabled),
                                             *(f"{kind}={name}" for kind, name in chosen.chosen.items())])
    # Forks inherit what this process has in memory. Files with tokens and keys are read after this.
    knows_secrets = bool(config.token or not secrets.isdisjoint(os.environ))
    forkserver = start_forkserver(environment) if knows_secrets else fork_forkserver(partial(prepare, plugins))
    hands_over = options.scheme != "tls" and isinstance(transport, SupportsAdoption)
    if options.address.is_path and not hands_over:
        raise ConfigurationError(
            f"The transport {transport.name} cannot give connections to other processes, and workers cannot listen "
            f"beside {options.url}.", hint=f"Listen on {options.scheme}://HOST:PORT.")
    try:
        # First, before anything that takes time: an address in use is the most common mistake.
        listener = listen(transport, options.url, options.tls.for_listening)
    except TransportError as error:
        raise ListenError(error.summary, hint=error.hint) from None
    admission = GuardedAdmission(admissions.open(options))
    authentication = Authentication(authenticators.open(options))
    has_workers = authentication.tenant is None or boundary_of(options) != "tenant"
    setup = Setup(
        options.without_token(), device=options.device.names[0],
        address="" if hands_over else options.url_of_port(0), takes_turns=has_workers,
        public_digests=read_digests(Path(options.memory.public_contents)) if options.memory.public_contents
        else frozenset())
    peers = PeerPolicy.parse(options.peers, is_private=is_private, listens_on_path=options.scheme == UNIX)
    environment |= environment_of(plugins) | {"DJINN_LOG_LEVEL": config.log_level}
    tasks = Tasks()
    models = None if stores is None else stores.open(options)
    keep_bytes = default_keep_bytes() if options.memory.keep_bytes is None else options.memory.keep_bytes
    supervisor = Supervisor(setup, environment, admission, tasks, forkserver=forkserver,
                            exchange=Exchange(peers, plugins.transport_for, tasks),
                            models=None if models is None else GatewayModels(models, tasks, options.gated_models),
                            uploads=GatewayUploads(keep_bytes, tasks, among_owners=boundary_of(options) != "tenant")
                            if keep_bytes and has_workers else None,
                            keep_bytes=keep_bytes, places=places)
    gateway = Gateway(listener, authentication, admission, supervisor, options, tasks,
                      control=_control(options.operator.control))
    try:
        pages = gateway.show_metrics(outputs, options, version, tuple if models is None else models.models)
    except BaseException:
        gateway.close()
        raise
    for page in pages:
        if not is_loopback(options.metrics.host):
            _log.warning("other machines can read the metrics on %s", page)
    return gateway, Reloading(options, read_again, check, listener, authentication, supervisor, gateway.renew)


def _transport(options: ServeOptions, plugins: Plugins) -> Transport:
    """Return the transport that clients connect with, once the choices of plugins were checked.

    Raises:
        ConfigurationError: Another one is chosen.
        PluginError: There is none for the address, or a chosen object does not exist.
    """
    idle = dict.fromkeys(_OF_SESSIONS, "sessions use it, see djinn.init(plugins=...)")
    idle |= {"engine": "djinn cluster up uses it", "mode": "djinn run uses it"}
    if not options.limits.memory_bytes:
        idle["memory"] = "there is no --memory-mib"
    if not options.models:
        idle["store"] = "there is no --models"
    check_choices(plugins, idle)
    transport = plugins.transport_for(options.scheme)
    chosen = plugins.choose("transport") if "transport" in plugins.selection.chosen else transport
    if chosen.scheme != options.scheme:
        raise ConfigurationError(
            f"The chosen transport {chosen.name!r} carries {chosen.scheme}://, and this server listens on "
            f"{options.scheme}://.", hint=f"Give --listen {chosen.scheme}://HOST:PORT, or choose another transport.")
    return transport


def _with_device(options: ServeOptions, plugins: Plugins) -> ServeOptions:
    """Choose the best device of this machine if the options name none."""
    if options.device.device:
        return options
    # Without a device, opening one says why there is none.
    best = next(iter(plugins.find_executor("").value.devices()), "")
    _log.info("the device is %s, the best one here; --device chooses another", best)
    return attrs.evolve(options, device=attrs.evolve(options.device, device=best))


def _place(factory: ExecutorFactory, device: str) -> tuple[Mapping[str, str], str]:
    """Return environment variables of a worker that is to see only one device, and the device's name there."""
    from djinn_plugins.common.kinds.executor import SupportsOwnDevice

    return factory.alone(device) if isinstance(factory, SupportsOwnDevice) else ({}, device)


def _control(path: str) -> Path | None:
    """Return the path of the operator's socket, or ``None`` if there is no place for it; the server runs without it."""
    if path:
        return Path(path).absolute()
    try:
        made = default_folder()
        made.mkdir(mode=0o700, parents=True, exist_ok=True)
        for _ in servers(made):
            pass  # looking for them removes the sockets of those that were killed
        found = made / f"{os.getpid()}.sock"
        check_path(found)
    except (OSError, RuntimeError, ConfigurationError) as error:
        _log.warning("djinn sessions and djinn kick do not reach this server: %s", error)
        return None
    return found

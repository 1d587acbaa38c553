"""The command ``djinn serve``."""

from __future__ import annotations

import enum
import ipaddress
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import attrs
import typer
from djinn_lib_service.content_store import read_digests
from djinn_lib_service.kinds import CRITICAL, WARNING, MemoryOptions
from djinn_lib_service.listening import listen

import djinn
from djinn.errors import ConfigurationError, TransportError
from djinn_server.config_file import reread, use_config
from djinn_server.control import Setup
from djinn_server.dialing import Exchange
from djinn_server.draining import DRAIN_S
from djinn_server.fair_queue import Settings
from djinn_server.forkserver import fork_forkserver, prepare, start_forkserver
from djinn_server.gateway import Gateway
from djinn_server.handshake import LEASE_S
from djinn_server.limits import Limits
from djinn_server.log_lines import LogFormat, write_to
from djinn_server.memory import default_keep_bytes, memory_plugin
from djinn_server.operator_socket import check_path, default_folder
from djinn_server.peers import UNIX, PeerPolicy
from djinn_server.placement import default_places
from djinn_server.plugin_settings import environment_of
from djinn_server.reloading import Reloading
from djinn_server.sandbox.fence import SandboxMode, plan
from djinn_server.signals import Operation, catch_signals
from djinn_server.supervisor import Supervisor
from djinn_server.tenants import KnownTenants, OneTenant, Tenant
from djinn_server.tokens import TokenFile

__all__ = ("serve",)

_SECRETS = frozenset({"DJINN_TOKEN", "DJINN_OWNER"})
"""Environment variables that only the gateway may read."""
LOOPBACK = "127.0.0.1"
USAGE_ERROR = 2
"""Exit status of an invalid command line."""
_log = logging.getLogger("djinn.server")


class LogChoice(enum.Enum):
    """The choices of ``--log-format``."""

    text = "text"
    json = "json"


def _configured(context: typer.Context, path: str) -> str:
    return use_config(context, path, serve)


def serve(
    context: typer.Context,
    host: Annotated[str, typer.Option(help="Address to listen on; 127.0.0.1 or ::1 for this machine only.")] = (
        LOOPBACK),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 finds a free one.")] = 0,
    unix: Annotated[str, typer.Option(
        show_default=False, metavar="PATH",
        help="Listen on a Unix-domain socket instead, which only processes of yours on this machine can use.")] = "",
    device: Annotated[str, typer.Option(
        metavar="DEVICE[,DEVICE...]",
        help="Device that runs the operations, for example cpu or cuda:0. Of several, each tenant's process gets the "
             "one with least to do.")] = "cpu",
    device_turns: Annotated[int | None, typer.Option(
        min=1, show_default=False,
        help="With --tokens: tenants that may use a device at a time, the others wait for their turns. One if not "
             "given, and on the CPU as many as have a core for each of their --threads.")] = None,
    token: Annotated[str, typer.Option(
        envvar="DJINN_TOKEN", show_default=False,
        help="Secret that clients have to know. Other users of this machine can see options: prefer the variable.",
    )] = "",
    tokens: Annotated[str, typer.Option(
        show_default=False, metavar="PATH",
        help="Let in those who have a token in this file, each with a process of his own; "
             "see djinn token.")] = "",
    tls_cert: Annotated[str, typer.Option(
        show_default=False, metavar="PATH", help="Encrypt, with this certificate: a PEM file, with its chain.")] = "",
    tls_key: Annotated[str, typer.Option(
        show_default=False, metavar="PATH", help="The certificate's key, if its file does not have it.")] = "",
    tls_client_ca: Annotated[str, typer.Option(
        show_default=False, metavar="PATH",
        help="Let in only clients with a certificate of these authorities: a PEM file.")] = "",
    threads: Annotated[int | None, typer.Option(
        min=1, show_default=False, help="Threads for operations on the CPU; as PyTorch sees fit if not given.")] = None,
    keep_mib: Annotated[int | None, typer.Option(
        min=0, show_default=False,
        help="MiB of memory for uploads that are kept, so that their owners need not send them again; "
             "0 keeps none. An eighth of the memory, and 4096 at most, if not given. "
             "With --tokens, for each tenant.")] = None,
    look_ahead: Annotated[bool, typer.Option(
        help="Run what a session will most likely ask for next while it asks for nothing.")] = True,
    max_sessions: Annotated[int, typer.Option(
        min=0, help="Sessions at a time; 0 for any number. With --tokens, this and the next three are for each tenant "
                    "whose token does not say otherwise.")] = 256,
    max_inflight_mib: Annotated[int, typer.Option(
        min=0, help="MiB of tensors on their way into sessions at a time; 0 for any amount.")] = 0,
    max_handles: Annotated[int, typer.Option(
        min=0, help="Values that sessions hold; 0 for any number.")] = 0,
    max_nodes: Annotated[int, typer.Option(
        min=0, help="Operations in one program; 0 for as many as the protocol allows.")] = 0,
    max_programs: Annotated[int, typer.Option(
        min=0, help="Programs that one session has defined at a time; 0 for any number. djinn's clients keep 2048.",
    )] = 4096,
    max_run_s: Annotated[float, typer.Option(
        min=0, help="Seconds that one program may run. Beyond, its session is ended; and its worker, if the program "
                    "has not ended two seconds later. 0 for any time.")] = 3600,
    max_queued: Annotated[int, typer.Option(
        min=0, help="Programs that wait, all sessions together; 0 for any number. With --tokens, this and the next "
                    "are for each tenant too.")] = 0,
    max_wait_s: Annotated[float, typer.Option(
        min=0, help="Seconds that a program is expected to wait, above which no session begins; 0 for any time.")] = 0,
    memory_mib: Annotated[int, typer.Option(
        min=0, show_default=False,
        help="MiB that the device may hold of all sessions together, which clients are told; what it has no room for "
             "goes to memory of the host, or is made again. 0 for any amount. With --tokens, for each tenant.")] = 0,
    memory_warning: Annotated[float, typer.Option(
        min=0.1, max=1, help="Part of --memory-mib from which on what is cold goes ahead of need.")] = WARNING,
    memory_critical: Annotated[float, typer.Option(
        min=0.1, max=1, help="Part of --memory-mib from which on nothing is run ahead, either.")] = CRITICAL,
    max_host_mib: Annotated[int, typer.Option(
        min=0, help="MiB of memory of the host for what is moved there, together with uploads that are kept; 0 for any "
                    "amount. With --tokens, for each tenant whose token does not say otherwise.")] = 0,
    public_contents: Annotated[str, typer.Option(
        show_default=False, metavar="PATH",
        help="Let every owner use kept uploads whose digests are in this file, one in hexadecimal on each line.")] = "",
    peers: Annotated[str, typer.Option(
        show_default=False, metavar="HOST[,HOST|CIDR...]",
        help="Servers that sessions here may send values to. This machine alone if not given, and not even that "
             "if other machines can reach this server.")] = "",
    program_mib: Annotated[int | None, typer.Option(
        min=1, show_default=False,
        help="MiB that one program may take at a time beside its inputs; what would take more is refused before it "
             "runs. The memory of the device if not given.")] = None,
    allow_namespace: Annotated[list[str] | None, typer.Option(
        show_default=False, metavar="NAME",
        help="Run operators of this namespace too, which an extension of PyTorch has registered in the server. Their "
             "arguments are not checked; may be given several times.")] = None,
    metrics_port: Annotated[int | None, typer.Option(
        min=0, max=65535, show_default=False,
        help="Port to serve /metrics for Prometheus, /healthz and /readyz on; 0 finds a free one. "
             "None of it if not given.")] = None,
    metrics_host: Annotated[str, typer.Option(
        help="Address to serve these on. Anyone who can reach it sees tenants' names and what they use.")] = LOOPBACK,
    lease_s: Annotated[float, typer.Option(
        min=0.0, help="Seconds that a session stays whose connection broke, so that its client can go on with it; "
                      "0: not at all.")] = LEASE_S,
    sandbox: Annotated[SandboxMode, typer.Option(
        help="Have the processes that run operations give up what they do not need of the system. auto: as far as the "
             "system can do that, the rest is logged; require: or else do not start.")] = SandboxMode.auto,
    control: Annotated[str, typer.Option(
        show_default=False, metavar="PATH",
        help="Unix-domain socket for djinn sessions and djinn kick, which only this user can connect to; in "
             "XDG_RUNTIME_DIR, or else beside the tokens, if not given.")] = "",
    log_format: Annotated[LogChoice, typer.Option(help="What a line of the log looks like.")] = LogChoice.text,
    drain_s: Annotated[float, typer.Option(
        min=0.0, help="Seconds that sessions may go on after SIGTERM, while no new ones begin; 0: not at all.",
    )] = DRAIN_S,
    with_parent: Annotated[bool, typer.Option(
        "--with-parent", help="End, as on SIGTERM, when the process that started this one has ended.")] = False,
    config: Annotated[str, typer.Option(
        show_default=False, metavar="PATH", is_eager=True, callback=_configured,
        help="TOML file with values of these options, such as max-sessions = 4; the command line and the environment "
             "win. SIGHUP has limits, certificates, the token and drain-s read again.")] = "",
) -> None:
    """Let sessions in other processes, or on other machines, compute on a device of this machine.

    Prints one line, "djinn serving tcp://HOST:PORT", "djinn serving tls://HOST:PORT" or "djinn serving unix://PATH",
    once it accepts connections; give that address to clients as DJINN_SERVER or djinn.init(server=...). Logs go to
    standard error, as much as DJINN_LOG_LEVEL says. SIGTERM lets sessions end first, for --drain-s; a second one, or
    Ctrl-C, ends it at once. SIGHUP has tokens, certificates and limits read again, and ends nothing.

    Anyone who can connect can compute here and use this machine's memory. An address that other machines can reach is
    therefore refused unless it has both: encryption (--tls-cert), and a token or tokens.
    """
    values = dict(context.params)
    parent = os.getppid() if with_parent else 0
    signals = catch_signals()

    def read() -> tuple[Offer, list[str]]:
        now, left = reread(config, context, serve, values)
        return _offer(now), left

    try:
        offer = _offer(values)
        server, reloading = _open(offer, read, context.obj or {})
        if metrics_port is not None:
            page = server.show_metrics(metrics_host, metrics_port, djinn.__version__)
            if not _is_loopback(metrics_host):
                _log.warning("other machines can read the metrics on %s", page)
        server.start()
    except (ConfigurationError, ListenError) as error:
        typer.echo(f"djinn: {error}", err=True)
        raise typer.Exit(USAGE_ERROR) from None
    print(f"djinn serving {server.address}", flush=True)  # noqa: T201  # the one line that callers read the address from
    _run(server, Operation(server, signals, reloading.reload, lambda: reloading.offer.drain_s, parent))


@attrs.frozen
class Offer:
    """The options of the command line, converted to the units of the program."""

    host: str
    port: int
    unix: str
    device: str
    token: str = attrs.field(repr=False)
    tokens: str
    tls_cert: str
    tls_key: str
    tls_client_ca: str
    threads: int
    keep_bytes: int
    looks_ahead: bool
    limits: Limits
    device_turns: int | None
    memory_warning: float
    memory_critical: float
    public_contents: str
    peers: str
    program_bytes: int | None
    namespaces: tuple[str, ...]
    log_format: LogFormat
    lease_s: float
    sandbox: SandboxMode
    max_run_s: float
    control: str
    drain_s: float

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that run operations."""
        return tuple(device.strip() for device in self.device.split(","))

    @property
    def turns(self) -> list[Settings]:
        """The scheduling settings of each device."""
        places = default_places(self.devices, self.threads)
        return [Settings(self.device_turns or each) for each in places]

    @property
    def address(self) -> str:
        """The address to listen on."""
        return f"unix://{Path(self.unix).absolute()}" if self.unix else self.on_port(self.port)

    def on_port(self, port: int) -> str:
        """Return the address of another port on the same host."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.tls_cert else 'tcp'}://{host}:{port}"


def _offer(given: Mapping[str, Any]) -> Offer:
    """Build an offer from the parameters of `serve`."""
    return Offer(
        host=given["host"], port=given["port"], unix=given["unix"], device=given["device"], token=given["token"],
        tokens=given["tokens"], tls_cert=_full(given["tls_cert"]), tls_key=_full(given["tls_key"]),
        tls_client_ca=_full(given["tls_client_ca"]), threads=given["threads"] or 0,
        keep_bytes=default_keep_bytes() if given["keep_mib"] is None else given["keep_mib"] * 2**20,
        looks_ahead=given["look_ahead"],
        limits=Limits(given["max_sessions"], given["max_inflight_mib"] * 2**20, given["max_handles"],
                      given["max_nodes"], given["max_queued"], given["max_wait_s"],
                      memory_bytes=given["memory_mib"] * 2**20, host_bytes=given["max_host_mib"] * 2**20,
                      programs=given["max_programs"]),
        memory_warning=given["memory_warning"], memory_critical=given["memory_critical"],
        public_contents=given["public_contents"], device_turns=given["device_turns"], peers=given["peers"],
        program_bytes=None if given["program_mib"] is None else given["program_mib"] * 2**20,
        namespaces=tuple(given["allow_namespace"] or ()), log_format=given["log_format"].value,
        lease_s=given["lease_s"], sandbox=given["sandbox"], max_run_s=given["max_run_s"],
        control=given["control"], drain_s=given["drain_s"])


class ListenError(TransportError):
    """The address cannot be listened on."""

    code = TransportError.code


def _full(path: str) -> str:
    return str(Path(path).absolute()) if path else ""


def _open(
    offer: Offer, read: Callable[[], tuple[Offer, list[str]]], settings: Mapping[str, Any],
) -> tuple[Gateway, Reloading]:
    from djinn_lib_service.kinds.transport import AdoptingTransport, ListenOptions

    from djinn.plugins import DEFAULTS, Plugins
    from djinn.session.logs import configure
    from djinn.settings import Config

    quiet = {} if os.environ.get("DJINN_LOG_LEVEL") else {"log_level": "INFO"}
    plugins = Plugins.configured({**settings, "token": offer.token, **quiet}, os.environ, "server")
    config = plugins.settings(Config)
    write_to(sys.stderr, offer.log_format, secrets=(config.token,), role="gateway")
    configure(config)
    is_private = _check(offer, bool(config.token))
    plan(offer.sandbox, (offer.tokens, offer.tls_key or offer.tls_cert), encrypts=bool(offer.tls_cert))
    for device in offer.devices:
        plugins.find_executor(device or "cpu")
    for kind in ("guard", "shapes"):
        plugins.choose(kind, DEFAULTS[kind])
    memory_plugin(plugins, is_needed=offer.limits.memory_bytes > 0)
    # Only this process may see the secrets.
    environment = {name: value for name, value in os.environ.items() if name not in _SECRETS}
    # Forks inherit what this process has in memory. Files with tokens and keys are read after this.
    knows_secrets = bool(config.token or not _SECRETS.isdisjoint(os.environ))
    forkserver = start_forkserver(environment) if knows_secrets else fork_forkserver(partial(prepare, plugins))
    scheme = offer.address.partition("://")[0]
    transport = plugins.transport_for(scheme)
    hands_over = scheme != "tls" and isinstance(transport, AdoptingTransport)
    try:
        # First, before anything that takes time: an address in use is the most common mistake.
        listener = listen(transport, offer.address, ListenOptions(
            tls_cert=offer.tls_cert, tls_key=offer.tls_key, tls_client_ca=offer.tls_client_ca))
    except TransportError as error:
        raise ListenError(error.summary, hint=error.hint) from None
    tenants = (KnownTenants(TokenFile(Path(offer.tokens)), offer.limits) if offer.tokens
               else OneTenant(config.token, Tenant("", offer.limits)))

    public_digests = read_digests(Path(offer.public_contents)) if offer.public_contents else frozenset()

    def setup_for(tenant: Tenant) -> Setup:
        now = reloading.offer
        return Setup(tenant.name, now.devices[0], scheme, now.keep_bytes, now.looks_ahead, tenant.limits,
                     now.threads, "" if hands_over else now.on_port(0), b"", now.tls_cert, now.tls_key,
                     now.tls_client_ca, sandbox=now.sandbox,
                     program_bytes=now.program_bytes, namespaces=now.namespaces, log_format=now.log_format,
                     memory_warning=now.memory_warning, memory_critical=now.memory_critical,
                     public_digests=public_digests, takes_turns=bool(now.tokens), lease_s=now.lease_s)

    exchange = Exchange(PeerPolicy.parse(offer.peers, is_private=is_private, listens_on_path=scheme == UNIX),
                        plugins.transport_for)
    supervisor = Supervisor(setup_for, environment | environment_of(plugins) | {"DJINN_LOG_LEVEL": config.log_level},
                            devices=offer.devices,
                            turns=offer.turns, forkserver=forkserver, exchange=exchange)
    gateway = Gateway(listener, tenants, supervisor, first=tenants.tenant if isinstance(tenants, OneTenant) else None,
                      max_run_s=offer.max_run_s, control=_control(offer.control))

    def apply() -> None:
        gateway.limit_runs(reloading.offer.max_run_s)
        gateway.watch.look()

    reloading = Reloading(offer, read, lambda other: _check(other, bool(other.token)), listener, tenants, supervisor,
                          apply)
    return gateway, reloading


def _control(path: str) -> Path | None:
    """Return the path of the operator's socket, or ``None`` if there is no place for it; the server runs without it."""
    if path:
        return Path(path).absolute()
    try:
        made = default_folder()
        made.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = made / f"{os.getpid()}.sock"
        check_path(found)
    except (OSError, RuntimeError, ConfigurationError) as error:
        _log.warning("djinn sessions and djinn kick do not reach this server: %s", error)
        return None
    return found


def _check(offer: Offer, has_token: bool) -> bool:
    """Reject contradictory or unsafe options, and return whether only this machine can connect."""
    if not hasattr(socket, "send_fds"):
        raise ConfigurationError("djinn serve needs Linux or another Unix: it gives connections to other processes.",
                                 hint="Clients run anywhere.")
    if offer.unix and (offer.host != LOOPBACK or offer.port or offer.tls_cert):
        raise ConfigurationError("--unix cannot be used with --host, --port or --tls-cert: a server listens on one "
                                 "address, and nothing leaves the machine there.")
    if offer.tokens and has_token:
        raise ConfigurationError("There are --tokens, and a token for everybody (--token or DJINN_TOKEN).",
                                 hint="Use one of the two.")
    if offer.tokens and not Path(offer.tokens).exists():
        raise ConfigurationError(f"There is no file {offer.tokens}.",
                                 hint=f"Make a token: djinn token create NAME --tokens {offer.tokens}")
    if not all(offer.devices) and len(offer.devices) > 1:
        raise ConfigurationError(f"{offer.device!r} is no list of devices.", hint="Write --device cuda:0,cuda:1.")
    if not offer.tls_cert and (offer.tls_key or offer.tls_client_ca):
        raise ConfigurationError("--tls-key and --tls-client-ca say nothing without --tls-cert.",
                                 hint="Give a certificate.")
    try:
        MemoryOptions(warning=offer.memory_warning, critical=offer.memory_critical)
    except ValueError as error:
        raise ConfigurationError(f"--memory-warning and --memory-critical: {error}.") from None
    is_private = bool(offer.unix) or _is_loopback(offer.host)
    PeerPolicy.parse(offer.peers, is_private=is_private)
    if is_private:
        return True
    lacking = [remedy for remedy, has in (
        ("encryption: give a certificate with --tls-cert and --tls-key", bool(offer.tls_cert)),
        ("a token: set DJINN_TOKEN to a secret, or make tokens with `djinn token create NAME` and give --tokens",
         has_token or bool(offer.tokens))) if not has]
    if lacking:
        raise ConfigurationError(f"Other machines could reach {offer.host}, and it has no {'; nor '.join(lacking)}.",
                                 hint="Or listen on 127.0.0.1, and reach it through a tunnel.")
    return False


def _is_loopback(host: str) -> bool:
    """Whether every address of a host is a loopback address."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, 0)}
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"There is no host {host!r}: {error}.",
                                 hint="Give --host an address or name of this machine.") from None
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)


def _run(server: Gateway, operation: Operation) -> NoReturn:
    """Serve until a signal arrives."""
    status = operation.run()
    server.stop()
    # Nothing is left to clean up, and tearing PyTorch down takes seconds.
    logging.shutdown()
    os._exit(status)

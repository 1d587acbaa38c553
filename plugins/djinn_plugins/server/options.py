"""The options of a server: one structure, from the command line to the workers."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

import attrs
import msgspec
from msgspec import Meta

from djinn.errors import ConfigurationError
from djinn_plugins.common.net.urls import url_of
from djinn_plugins.common.options import CRITICAL, WARNING, ListenOptions, MemoryOptions
from djinn_plugins.server.option import MIB, Option
from djinn_plugins.server.tenant_limits import Limits

__all__ = (
    "LOOPBACK",
    "AddressOptions",
    "DashboardOptions",
    "DeclaredOption",
    "DeviceOptions",
    "DirectoryOptions",
    "FairnessOptions",
    "LogFormat",
    "MetricsOptions",
    "OperatorOptions",
    "SandboxMode",
    "ServeOptions",
    "ServerMemoryOptions",
    "SessionOptions",
    "TlsOptions",
    "TokenOptions",
    "WorkerOptions",
    "declared",
    "options_from",
)

LOOPBACK = "127.0.0.1"
ANY_HOST = "0.0.0.0"  # noqa: S104  # what an address means that names a port and no host
_Count: TypeAlias = Annotated[int, Meta(ge=0)]
_Positive: TypeAlias = Annotated[int, Meta(ge=1)]
_Port: TypeAlias = Annotated[int, Meta(ge=0, le=65535)]
LogFormat: TypeAlias = Literal["text", "json"]
Isolation: TypeAlias = Literal["auto", "session", "owner", "tenant"]


class SandboxMode(enum.Enum):
    """The choices of ``--sandbox``."""

    require = "require"
    auto = "auto"
    off = "off"


@attrs.frozen
class AddressOptions:
    """Where clients connect."""

    host: Annotated[str, Option(
        "host", "Address to listen on; 127.0.0.1 or ::1 for this machine only.")] = LOOPBACK
    port: Annotated[_Port, Option("port", "Port to listen on; 0 finds a free one.")] = 0
    unix: Annotated[str, Option(
        "unix", "Listen on a Unix-domain socket instead. Only your own processes on this machine can "
                "connect.",
        metavar="PATH", shows_default=False)] = ""
    listen: Annotated[str, Option(
        "listen", "Listen on an address of a transport that a plugin brings instead: SCHEME://HOST:PORT, or what its "
                  "page says.", metavar="ADDRESS", shows_default=False)] = ""

    @property
    def is_path(self) -> bool:
        """Whether the address is a path on this machine, which no other machine can reach."""
        return bool(self.unix) or self.listen.partition("://")[2].startswith("/")

    @property
    def reachable_at(self) -> str:
        """The host that clients connect to; empty for a path."""
        if self.is_path:
            return ""
        return (urlsplit(self.listen).hostname or ANY_HOST) if self.listen else self.host


@attrs.frozen
class DeviceOptions:
    """What runs the operations."""

    device: Annotated[str, Option(
        "device", "Device that runs the operations, such as cpu or cuda:0. With several devices, each new "
                  "worker uses the least busy one. Default: the best device of this machine.",
        metavar="DEVICE[,DEVICE...]", shows_default=False)] = ""
    threads: Annotated[_Positive | None, Option(
        "threads", "CPU threads for operations. Default: as many as PyTorch chooses.", shows_default=False)] = None
    look_ahead: Annotated[bool, Option(
        "look-ahead", "Run the next request of a session ahead of time, if it can be predicted and the "
                      "device is idle.")] = True
    program_bytes: Annotated[_Positive | None, Option(
        "program-mib", "Maximum MiB that one program may allocate besides its inputs; a larger one runs in "
                       "parts, and a larger step fails. Default: the memory of the device.",
        unit=MIB, shows_default=False)] = None
    namespaces: Annotated[tuple[str, ...], Option(
        "allow-namespace", "Also run operators of this namespace, registered in the server by an extension "
                           "of PyTorch. Their arguments are not checked. Repeatable.", metavar="NAME",
        shows_default=False)] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The devices that run operations."""
        return tuple(name.strip() for name in self.device.split(","))


@attrs.frozen
class FairnessOptions:
    """How tenants share a device."""

    device_turns: Annotated[_Positive | None, Option(
        "device-turns", "With --tokens: number of tenants that may use a device at the same time; the others "
                        "wait. Default: one, and on the CPU as many as there are cores for --threads.",
        shows_default=False)] = None


@attrs.frozen
class WorkerOptions:
    """Which sessions share a process."""

    isolate: Annotated[Isolation, Option(
        "isolate", "Who shares no process with others: each session, each owner (see DJINN_OWNER), or each tenant. "
                   "auto: owner on CPUs; tenant on other devices, where each process takes memory.")] = "auto"
    idle_s: Annotated[float, Meta(ge=0, le=1e9), Option(
        "worker-idle-s", "Seconds after which an owner's process without sessions ends, and with it the uploads that "
                         "it has cached.")] = 300.0


@attrs.frozen
class TokenOptions:
    """What clients have to present."""

    token: Annotated[str, Option(
        "token", "Secret that clients must present. Other users of this machine can see options, so prefer "
                 "the variable.",
        variable="DJINN_TOKEN", reloads=True, shows_default=False)] = attrs.field(default="", repr=False)
    file: Annotated[str, Option(
        "tokens", "Admit clients whose token is in this file, each tenant in a separate process; see djinn "
                  "token.",
        metavar="PATH", shows_default=False)] = ""


@attrs.frozen
class TlsOptions:
    """Encryption."""

    cert: Annotated[str, Option(
        "tls-cert", "Encrypt connections with this certificate: a PEM file with its chain.", metavar="PATH",
        reloads=True, is_path=True, shows_default=False)] = ""
    key: Annotated[str, Option(
        "tls-key", "The certificate's key, if it is in a separate file.", metavar="PATH", reloads=True, is_path=True,
        shows_default=False)] = ""
    client_ca: Annotated[str, Option(
        "tls-client-ca", "Admit only clients with a certificate from these authorities: a PEM file.", metavar="PATH",
        reloads=True, is_path=True, shows_default=False)] = ""

    @property
    def for_listening(self) -> ListenOptions:
        """The options of a listener."""
        return ListenOptions(tls_cert=self.cert, tls_key=self.key, tls_client_ca=self.client_ca)


@attrs.frozen
class ServerMemoryOptions:
    """What is kept in memory, and what happens when it becomes short."""

    keep_bytes: Annotated[_Count | None, Option(
        "keep-mib", "MiB of uploads to cache, so that their owners do not send them again; 0 disables the "
                    "cache. Default: an eighth of the memory, at most 4096. With --tokens: per tenant.",
        unit=MIB, shows_default=False)] = None
    public_contents: Annotated[str, Option(
        "public-contents", "Share cached uploads with every owner if their digest is in this file, one "
                           "hexadecimal digest per line.", metavar="PATH", shows_default=False)] = ""
    warning: Annotated[float, Meta(ge=0.1, le=1), Option(
        "memory-warning", "Fraction of --memory-mib above which cold data is evicted ahead of need.")] = WARNING
    critical: Annotated[float, Meta(ge=0.1, le=1), Option(
        "memory-critical", "Fraction of --memory-mib above which nothing is run ahead of time, either.")] = CRITICAL

    @property
    def for_manager(self) -> MemoryOptions:
        """The options of a memory manager; limits are each tenant's.

        Raises:
            ValueError: The fractions are not in increasing order.
        """
        return MemoryOptions(warning=self.warning, critical=self.critical)


@attrs.frozen
class SessionOptions:
    """How long things may take.

    The default of ``drain_s``, and the 5 s that programs may run after that, fit the time that Kubernetes leaves a
    process between SIGTERM and SIGKILL.
    """

    max_run_s: Annotated[float, Meta(ge=0), Option(
        "max-run-s", "Maximum seconds that one program may run. After that its session ends, and its worker "
                     "if the program is still running two seconds later. 0: no limit.", reloads=True)] = 3600
    lease_s: Annotated[float, Meta(ge=0), Option(
        "lease-s", "Seconds that a session is kept after its connection broke, so that its client can resume "
                   "it. 0: not kept.")] = 30.0
    named_lease_s: Annotated[float, Meta(ge=0), Option(
        "named-lease-s", "Longest time in seconds that a session with a name stays after its client has left. 0: "
                         "sessions have no names.")] = 14400.0
    names: Annotated[_Count, Option(
        "named-sessions", "Maximum number of named sessions of a tenant. 0: no limit.")] = 16
    drain_s: Annotated[float, Meta(ge=0), Option(
        "drain-s", "Seconds that existing sessions may continue after SIGTERM, while no new ones start. 0: "
                   "none.",
        reloads=True)] = 25.0


@attrs.frozen
class MetricsOptions:
    """Where metrics can be read."""

    port: Annotated[_Port | None, Option(
        "metrics-port", "Port for /metrics (Prometheus), /healthz and /readyz; 0 finds a free port. Default: "
                        "disabled.", shows_default=False)] = None
    host: Annotated[str, Option(
        "metrics-host", "Address for the metrics port. Anyone who can reach it sees the names of tenants and "
                        "their usage.")] = LOOPBACK
    names: Annotated[str, Option(
        "metrics-name", "Further names by which metrics are read, such as that of a service in a cluster; separated "
                        "by commas. Addresses and names of this machine need not be given.", metavar="NAME,...",
        shows_default=False)] = ""


@attrs.frozen
class OperatorOptions:
    """What the operator sees of the server, and the ways to reach it."""

    control: Annotated[str, Option(
        "control", "Unix-domain socket for djinn sessions and djinn kick; only this user can connect. "
                   "Default: in XDG_RUNTIME_DIR, or beside the tokens.", metavar="PATH",
        shows_default=False)] = ""
    log_format: Annotated[LogFormat, Option("log-format", "What a line of the log looks like.")] = "text"


@attrs.frozen
class DirectoryOptions:
    """Where the server is listed, so that clients of its cluster find it."""

    address: Annotated[str, Option(
        "directory", "List this server in a directory, so that clients of its cluster find it; see djinn directory.",
        metavar="tls://HOST:PORT[/NAME]", shows_default=False)] = ""
    key: Annotated[str, Option(
        "directory-key", "File with the secret that the directory was started with.", metavar="PATH", is_path=True,
        shows_default=False)] = ""
    announced: Annotated[str, Option(
        "announce", "Address that the directory gives to clients. Default: the one that this server listens on, with "
                    "the name of this machine if that is all addresses.", metavar="ADDRESS",
        shows_default=False)] = ""


@attrs.frozen
class DashboardOptions:
    """Where a page shows what the server does."""

    port: Annotated[_Port | None, Option(
        "dashboard-port", "Port for a page that shows tenants and sessions live; 0 finds a free port. Clients see "
                          "their tenant with their token. Default: disabled.", shows_default=False)] = None
    host: Annotated[str, Option(
        "dashboard-host", "Address for the dashboard's port. One that other machines can reach needs --tls-cert and a "
                          "token.")] = LOOPBACK
    key: Annotated[str, Option(
        "dashboard-key", "File with the operator's key, which shows all tenants, ends sessions and drains the server; "
                         "it is made if there is none. Default: beside the tokens.", metavar="PATH", is_path=True,
        shows_default=False)] = ""


@attrs.frozen
class ServeOptions:
    """All options of a server. The gateway passes them whole to its workers, without the clients' token."""

    address: AddressOptions = AddressOptions()
    device: DeviceOptions = DeviceOptions()
    fairness: FairnessOptions = FairnessOptions()
    workers: WorkerOptions = WorkerOptions()
    tokens: TokenOptions = TokenOptions()
    tls: TlsOptions = TlsOptions()
    limits: Limits = attrs.field(factory=lambda: Limits(sessions=256, programs=4096, workers=100))
    sessions: SessionOptions = SessionOptions()
    memory: ServerMemoryOptions = ServerMemoryOptions()
    models: Annotated[str, Option(
        "models", "Folder of models as safetensors files, which clients load by name; see djinn models.",
        metavar="DIR", is_path=True, shows_default=False)] = ""
    gated_models: Annotated[tuple[str, ...], Option(
        "gated-model", "A model, or a pattern such as meta/*, for tenants only whose token names it; see djinn token "
                       "create --model. Repeatable.", metavar="NAME", shows_default=False)] = ()
    keep_model_bytes: Annotated[_Count, Option(
        "keep-models-mib", "MiB of model files that clients have sent and that stay below --models, each for its "
                           "tenant; tenants have equal parts. 0 keeps none.", unit=MIB)] = 0
    peers: Annotated[str, Option(
        "peers", "Servers that sessions may send values to. Default: this machine only, and none if other "
                 "machines can reach this server.", metavar="HOST[,HOST|CIDR...]", shows_default=False)] = ""
    metrics: MetricsOptions = MetricsOptions()
    directory: DirectoryOptions = DirectoryOptions()
    dashboard: DashboardOptions = DashboardOptions()
    sandbox: Annotated[SandboxMode, Option(
        "sandbox", "Drop the privileges that workers do not need. auto: as far as the system supports it, "
                   "and log the rest; require: refuse to start otherwise; off: drop none.")] = SandboxMode.auto
    operator: OperatorOptions = OperatorOptions()
    plugins: Annotated[str, Option(
        "plugins", "Plugins to use, such as authenticator=NAME, admission=NAME or guard=NAME, and plugins to "
                   "switch off: -PLUGIN.", metavar="KIND=NAME[,-PLUGIN...]", variable="DJINN_PLUGINS",
        shows_default=False)] = ""

    @property
    def scheme(self) -> str:
        """The scheme of the addresses that clients connect to."""
        if self.address.listen:
            return self.address.listen.partition("://")[0]
        return "unix" if self.address.unix else "tls" if self.tls.cert else "tcp"

    @property
    def url(self) -> str:
        """The address to listen on."""
        if self.address.listen:
            return self.address.listen
        return (f"unix://{Path(self.address.unix).absolute()}" if self.address.unix
                else self.url_of_port(self.address.port))

    def url_of_port(self, port: int) -> str:
        """Return the address of another port on the same host."""
        return url_of(self.scheme, self.address.reachable_at, port)

    def without_token(self) -> ServeOptions:
        """Return the options for processes that must not know the clients' token."""
        return attrs.evolve(self, tokens=attrs.evolve(self.tokens, token=""))


@attrs.frozen
class DeclaredOption:
    """An option, and the attribute of `ServeOptions` that it sets.

    Attributes:
        option: The option.
        path: Names of the attributes that lead there.
        hint: The attribute's type, with its bounds.
        value_type: The same without.
        bounds: The least and the greatest value of the attribute.
        default: The attribute's default.
    """

    option: Option
    path: tuple[str, ...]
    hint: Any
    value_type: Any
    bounds: Meta
    default: Any


def declared() -> Iterator[DeclaredOption]:
    """List the options of a server, in the order of the help."""
    return _declared(ServeOptions(), ())


def _declared(holder: Any, path: tuple[str, ...]) -> Iterator[DeclaredOption]:
    plain = get_type_hints(type(holder))
    for name, hint in get_type_hints(type(holder), include_extras=True).items():
        extras = list(_extras(hint))
        default = getattr(holder, name)
        option = next((extra for extra in extras if isinstance(extra, Option)), None)
        if option is None:
            yield from _declared(default, (*path, name))
        else:
            bounds = next((extra for extra in extras if isinstance(extra, Meta)), Meta())
            yield DeclaredOption(option, (*path, name), hint, plain[name], bounds, default)


def _extras(hint: Any) -> Iterator[Any]:
    """List what an annotation says besides the type, in all its parts."""
    if get_origin(hint) is Annotated:
        yield from hint.__metadata__
    for part in get_args(hint):
        if get_origin(part) is not None:
            yield from _extras(part)


def options_from(given: Mapping[str, Any]) -> ServeOptions:
    """Build the options from the values of a command's parameters, by name; others are ignored.

    Raises:
        ConfigurationError: A value is invalid; the error names its option.
    """
    nested: dict[str, Any] = {}
    for each in declared():
        if each.option.parameter not in given:
            continue
        try:
            value = msgspec.convert(_converted(given[each.option.parameter], each.option), each.hint)
        except (msgspec.ValidationError, ValueError) as error:
            raise ConfigurationError(f"--{each.option.name} cannot be: {error}.") from None
        holder = nested
        for name in each.path[:-1]:
            holder = holder.setdefault(name, {})
        holder[each.path[-1]] = value
    built: ServeOptions = _built(ServeOptions(), nested)
    return built


def _built(defaults: Any, given: Mapping[str, Any]) -> Any:
    """Return a copy of nested structures in which the given values replace the defaults."""
    values = {name: _built(getattr(defaults, name), value) if isinstance(value, dict) else value
              for name, value in given.items()}
    replace = msgspec.structs.replace if isinstance(defaults, msgspec.Struct) else attrs.evolve
    return replace(defaults, **values)


def _converted(value: Any, option: Option) -> Any:
    """Convert a value from the form of the command line to that of the attribute."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("it is no finite number")
    if option.is_path and value:
        return str(Path(value).absolute())
    return value * option.unit if option.unit != 1 and value is not None else value

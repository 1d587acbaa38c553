"""The command ``djinn directory``."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import ssl
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import attrs
import typer

from djinn.errors import ConfigurationError, RefusedError
from djinn_plugins.cluster.asking import DirectoryAddress, reachable
from djinn_plugins.cluster.records import replace_file

if TYPE_CHECKING:
    from anyio.abc import SocketListener

    from djinn_plugins.cluster.directory.model import ClusterModel
    from djinn_plugins.server.kinds.authenticator import Authenticator

__all__ = ("directory",)

USAGE_ERROR = 2
MIN_KEY_CHARACTERS = 16
MAX_TOKEN_CHARACTERS = 4096
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
_log = logging.getLogger("djinn.directory")


class _Answering(Protocol):
    async def run(self, listener: SocketListener) -> None: ...


def directory(
    host: Annotated[str, typer.Option("--host", help="Address to listen on; 127.0.0.1 or ::1 for this machine only.")
                    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 finds a free one.")] = 0,
    name: Annotated[str, typer.Option("--name", help="Name of the cluster.")] = "default",
    key: Annotated[str, typer.Option(
        "--key", metavar="PATH", help="File with the secret that servers present to be listed, and that lists them; "
                                      "it is made if there is none.")] = "",
    token: Annotated[str, typer.Option(
        "--token", envvar="DJINN_TOKEN", show_default=False, metavar="TEXT",
        help="Secret that clients must present, as that of djinn serve. Prefer the variable.")] = "",
    tokens: Annotated[str, typer.Option(
        "--tokens", metavar="PATH", help="Answer clients whose token is in this file; see djinn token.")] = "",
    tls_cert: Annotated[str, typer.Option(
        "--tls-cert", metavar="PATH", help="Encrypt connections with this certificate: a PEM file with its chain.")
        ] = "",
    tls_key: Annotated[str, typer.Option(
        "--tls-key", metavar="PATH", help="The certificate's key, if it is in a separate file.")] = "",
    dashboard_port: Annotated[int | None, typer.Option(
        "--dashboard-port", min=0, max=65535, show_default=False,
        help="Port for a page that shows the servers live to those who have the key; 0 finds a free one. Default: "
             "disabled.")] = None,
    address_file: Annotated[str, typer.Option(
        "--address-file", metavar="PATH", help="File to write this address into. Servers and clients that can read it "
                                               "find the directory with file:PATH, wherever it is started again.")
        ] = "",
    with_parent: Annotated[bool, typer.Option(
        "--with-parent", help="End when the process that started this one has ended.")] = False,
) -> None:
    """Lead the clients of a cluster to its servers: to the least loaded one that fits.

    Prints one line, "djinn directory tls://HOST:PORT/NAME", once it accepts connections; give that address to clients
    as DJINN_CLUSTER or djinn.init(cluster=...), and to servers with --directory. No session runs through a directory.
    """
    from djinn.plugins import DEFAULTS
    from djinn.plugins.manager import Plugins
    from djinn.settings import Config
    from djinn.settings.logs import configure
    from djinn.settings.resolved import selection_of
    from djinn_plugins.cluster.directory.endpoint import DirectoryEndpoint
    from djinn_plugins.cluster.directory.model import ClusterModel
    from djinn_plugins.common.files.secret_files import key_in
    from djinn_plugins.common.net.encryption import server_context
    from djinn_plugins.common.net.exposure import check_exposure
    from djinn_plugins.server.options import AddressOptions, ServeOptions, TlsOptions, TokenOptions

    parent = os.getppid() if with_parent else 0
    try:
        plugins = Plugins.load(selection_of({}, os.environ), kinds=("authenticator",))
        plugins.configure({"log_level": os.environ.get("DJINN_LOG_LEVEL") or "INFO"}, os.environ)
        configure(plugins.settings(Config))
        logging.basicConfig(format=_LOG_FORMAT)
        if dashboard_port is not None and not key:
            raise ConfigurationError("--dashboard-port needs --key.", hint="The page asks for the key in that file.")
        options = ServeOptions(AddressOptions(host, port), tokens=TokenOptions(token, tokens),
                               tls=TlsOptions(tls_cert, tls_key))
        factory = plugins.choose("authenticator", DEFAULTS["authenticator"])
        check_exposure(host, is_encrypted=bool(tls_cert), needs_token=factory.check(options))
        context = server_context(tls_cert, tls_key) if tls_cert else None
        secret = key_in(Path(key), makes=True) if key else secrets.token_urlsafe(32)
        sock = _listening(host, port)
        page_sock = None if dashboard_port is None else _listening(host, dashboard_port)
        address = DirectoryAddress("tls" if tls_cert else "tcp", reachable(host), sock.getsockname()[1], name)
        if address_file:
            _write(Path(address_file), address)
        authenticator: Authenticator = factory.open(options)
    except ConfigurationError as error:
        typer.echo(f"djinn: {error}", err=True)
        raise typer.Exit(USAGE_ERROR) from None
    endpoint = DirectoryEndpoint(name, secret, _checking(authenticator), context)
    listening: list[tuple[socket.socket, _Answering]] = [(sock, endpoint)]
    model = ClusterModel(name, str(address), secret, endpoint.listing, endpoint.drain)
    if page_sock is not None:
        listening.append((page_sock, _page(model, host, context)))
        url = attrs.evolve(address, scheme="https" if tls_cert else "http", port=page_sock.getsockname()[1], name="")
        _log.info("dashboard on %s/, its key is in %s", url, key)
    _run(listening, model.run, str(address), parent)


def _page(model: ClusterModel, host: str, context: ssl.SSLContext | None) -> _Answering:
    try:
        from djinn_plugins.common.dashboard.endpoint import DashboardEndpoint
    except ImportError:
        typer.echo("djinn: --dashboard-port needs the package h11: python3 -m pip install 'djinn-torch[dashboard]'",
                   err=True)
        raise typer.Exit(USAGE_ERROR) from None
    return DashboardEndpoint(model, host, context)


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(target, family=family, backlog=128)
    except OSError as error:
        raise ConfigurationError(f"Cannot listen on {host}, port {port}: {error.strerror or error}.",
                                 hint="Choose a free port (0 finds one) and an address of this machine.") from None


def _write(path: Path, address: DirectoryAddress) -> None:
    try:
        replace_file(path, f"{address}\n".encode())
    except OSError as error:
        raise ConfigurationError(f"The address cannot be written to {path}: {error.strerror or error}.",
                                 hint="Give --address-file a path in a folder of yours.") from None


def _checking(authenticator: Authenticator) -> Callable[[str], str]:
    def tenant_of(token: str) -> str:
        """Let an authenticator decide; one that fails admits no client."""
        if len(token) > MAX_TOKEN_CHARACTERS:
            raise RefusedError("The token is too long.")
        try:
            return authenticator.authenticate(token).tenant.name
        except RefusedError as error:
            if len(token) >= MIN_KEY_CHARACTERS and token in str(error):
                raise RefusedError("The token is wrong.") from None
            raise
        except Exception:  # noqa: BLE001  # an exception's text may contain the token
            raise RefusedError("The token could not be checked.") from None

    return tenant_of


def _run(listening: Sequence[tuple[socket.socket, _Answering]], take_samples: Callable[[], Coroutine[Any, Any, None]],
         address: str, parent: int) -> None:
    """Answer until a signal arrives, or until the parent has ended."""
    import anyio
    from anyio.abc import SocketListener

    from djinn_plugins.cluster.ending import ending_signals
    from djinn_plugins.common.net.parents import await_parent_end

    async def run() -> None:
        with ending_signals() as signals:
            async with anyio.create_task_group() as tasks:
                async def await_parent() -> None:
                    await await_parent_end(parent)
                    tasks.cancel_scope.cancel()

                tasks.start_soon(take_samples)
                for sock, endpoint in listening:
                    tasks.start_soon(endpoint.run, await SocketListener.from_socket(sock))
                if parent:
                    tasks.start_soon(await_parent)
                try:
                    print(f"djinn directory {address}", flush=True)  # noqa: T201  # callers read the address from it
                except OSError as error:
                    _log.warning("the address %s cannot be printed: %s", address, error)
                async for _ in signals:
                    tasks.cancel_scope.cancel()
                    break

    anyio.run(run)

"""The command ``djinn serve``."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import queue
import signal
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from djinn.errors import ConfigurationError
from djinn_server.memory import default_keep_bytes, device_bytes
from djinn_server.server import Server

__all__ = ("serve",)

LOOPBACK = "127.0.0.1"
USAGE_ERROR = 2
"""Exit status of a command line that cannot be carried out."""
_log = logging.getLogger("djinn.server")


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on; 127.0.0.1 or ::1 for this machine only.")] = (
        LOOPBACK),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 finds a free one.")] = 0,
    unix: Annotated[str, typer.Option(
        show_default=False, metavar="PATH",
        help="Listen on a Unix-domain socket instead, which only processes of yours on this machine can use.")] = "",
    device: Annotated[str, typer.Option(help="Device that runs the operations, for example cpu or cuda:0.")] = "cpu",
    token: Annotated[str, typer.Option(
        envvar="DJINN_TOKEN", show_default=False,
        help="Secret that clients have to know. Other users of this machine can see options: prefer the variable.",
    )] = "",
    threads: Annotated[int | None, typer.Option(
        min=1, show_default=False, help="Threads for operations on the CPU; as PyTorch sees fit if not given.")] = None,
    keep_mib: Annotated[int | None, typer.Option(
        min=0, show_default=False,
        help="MiB of memory for uploads that are kept, so that their owners need not send them again; "
             "0 keeps none. An eighth of the memory, and 4096 at most, if not given.")] = None,
    look_ahead: Annotated[bool, typer.Option(
        help="Run what a session will most likely ask for next while it asks for nothing.")] = True,
    program_mib: Annotated[int | None, typer.Option(
        min=1, show_default=False,
        help="MiB that one program may take at a time beside its inputs; what would take more is refused before it "
             "runs. The memory of the device if not given.")] = None,
    allow_namespace: Annotated[list[str] | None, typer.Option(
        show_default=False, metavar="NAME",
        help="Run operators of this namespace too, which an extension of PyTorch has registered in the server. Their "
             "arguments are not checked; may be given several times.")] = None,
) -> None:
    """Let sessions in other processes, or on other machines, compute on a device of this machine.

    Prints one line, "djinn serving tcp://HOST:PORT" or "djinn serving unix://PATH", once it accepts connections; give
    that address to clients as DJINN_SERVER or djinn.init(server=...). Logs go to standard error, as much as
    DJINN_LOG_LEVEL says. Ends on SIGTERM or Ctrl-C.

    Whoever can connect can compute here and use this machine's memory. An address that other machines can reach is
    therefore refused without a token; and since nothing is encrypted, use such an address in a trusted network only,
    or through a tunnel.
    """
    try:
        server = _open(host, port, unix, device, token, threads, keep_mib, look_ahead, program_mib,
                       frozenset(allow_namespace or ()))
    except ConfigurationError as error:
        typer.echo(f"djinn: {error}", err=True)
        raise typer.Exit(USAGE_ERROR) from None
    _run(server)


def _open(
    host: str, port: int, unix: str, device: str, token: str, threads: int | None, keep_mib: int | None,
    look_ahead: bool, program_mib: int | None, namespaces: frozenset[str],
) -> Server:
    from djinn.config import Config
    from djinn.kinds.guard import Bounds
    from djinn.kinds.transport import ListenOptions
    from djinn.logs import configure
    from djinn.plugins import Plugins

    quiet = {} if os.environ.get("DJINN_LOG_LEVEL") else {"log_level": "INFO"}
    config = Config.resolve({"token": token, **quiet}, os.environ)
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    configure(config)
    if unix and (host != LOOPBACK or port):
        raise ConfigurationError("--unix cannot be used with --host or --port: a server listens on one address.")
    if not unix and not _is_loopback(host):
        if not config.token:
            raise ConfigurationError(f"Other machines could reach {host}, and no token keeps them out.",
                                     hint="Set DJINN_TOKEN to a secret, or listen on 127.0.0.1.")
        _log.warning("listening on %s without encryption: use it in a trusted network only", host)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    plugins = Plugins.load(config.selection)
    executor = plugins.choose("executor", "torch").open(device)
    if unix:
        address = f"unix://{Path(unix).absolute()}"
    else:
        address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    transport = plugins.transport_for(address.partition("://")[0])
    guard, shapes = plugins.choose("guard", "core"), plugins.choose("shapes", "meta")
    bounds = Bounds(executor.device, device_bytes(executor.device) if program_mib is None else program_mib * 2**20,
                    namespaces)
    return Server(transport.listen(address, ListenOptions()), executor, token=config.token,
                  keep_bytes=default_keep_bytes() if keep_mib is None else keep_mib * 2**20, looks_ahead=look_ahead,
                  watch=partial(guard.watch, bounds, shapes))


def _is_loopback(host: str) -> bool:
    """Whether a host, in all its meanings, is this machine alone."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, 0)}
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"There is no host {host!r}: {error}.",
                                 hint="Give --host an address or name of this machine.") from None
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)


def _run(server: Server) -> None:
    """Serve until a signal comes."""
    # A queue, because only its `put` may be called from a signal handler that interrupts its own `get`.
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda caught, _: signals.put(caught))
    server.start()
    print(f"djinn serving {server.address}", flush=True)  # noqa: T201  # the one line that callers read the address from
    caught = _wait(server, signals)
    status = 1 if caught is None else 0
    _log.info("stopping: %s", "the listener failed" if caught is None else signal.Signals(caught).name)
    if not server.stop():
        # Programs that still run cannot be interrupted, and an ordinary exit would tear PyTorch down beneath them.
        logging.shutdown()
        os._exit(status)
    raise typer.Exit(status)


def _wait(server: Server, signals: queue.SimpleQueue[int]) -> int | None:
    """Wait for a signal; ``None`` if the server stops to accept without one."""
    while server.is_accepting:
        # The time limit is also for Windows, where a signal does not end a wait.
        with contextlib.suppress(queue.Empty):
            return signals.get(timeout=1.0)
    return None

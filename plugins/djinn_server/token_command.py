"""The commands ``djinn token create``, ``revoke`` and ``list``."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from djinn.errors import ConfigurationError
from djinn_server.limits import Limits
from djinn_server.tokens import TokenFile, default_path

__all__ = ("create", "list_tokens", "revoke")

USAGE_ERROR = 2
_Name = Annotated[str, typer.Argument(help="Name of the tenant.")]
_Path = Annotated[str, typer.Option(
    "--tokens", show_default=False, metavar="PATH",
    help="The file; djinn/tokens.json in XDG_STATE_HOME, or in ~/.local/state, if not given.")]


def create(
    name: _Name,
    tokens: _Path = "",
    weight: Annotated[float, typer.Option(
        min=1e-6, max=1e6, help="The tenant's part of a device that others want too, compared with theirs.")] = 1.0,
    max_sessions: Annotated[int, typer.Option(min=0, help="Sessions at a time; 0: what the server says.")] = 0,
    max_inflight_mib: Annotated[int, typer.Option(
        min=0, help="MiB of tensors on their way into sessions at a time; 0: what the server says.")] = 0,
    max_handles: Annotated[int, typer.Option(
        min=0, help="Values that sessions hold; 0: what the server says.")] = 0,
    max_nodes: Annotated[int, typer.Option(min=0, help="Operations in one program; 0: what the server says.")] = 0,
    max_queued: Annotated[int, typer.Option(min=0, help="Programs that wait; 0: what the server says.")] = 0,
    max_wait_s: Annotated[float, typer.Option(
        min=0, help="Seconds that a program is expected to wait, above which no session begins; 0: what the server "
                    "says.")] = 0,
    max_memory_mib: Annotated[int, typer.Option(
        min=0, help="MiB that the device may hold; 0: what the server says, which is also the most.")] = 0,
    max_host_mib: Annotated[int, typer.Option(
        min=0, help="MiB that may be moved to memory of the host; 0: what the server says.")] = 0,
    max_programs: Annotated[int, typer.Option(
        min=0, help="Programs that one session has defined; 0: what the server says.")] = 0,
) -> None:
    """Make a token for a new tenant, and print it. It is not kept: only its digest is, so it is printed this once.

    A server that uses the file lets its owner in from now on.
    """
    file = _file(tokens)
    try:
        token = file.create(name, weight=weight,
                            limits=Limits(max_sessions, max_inflight_mib * 2**20, max_handles, max_nodes, max_queued,
                                          max_wait_s, max_memory_mib * 2**20, max_host_mib * 2**20, max_programs))
    except ConfigurationError as error:
        raise _ended(error) from None
    typer.echo(token)
    typer.echo(f"The token of {name}, this once. Its owner sets DJINN_TOKEN to it; the server is started with "
               f"--tokens {file.path}", err=True)


def revoke(name: _Name, tokens: _Path = "") -> None:
    """Take a tenant's token away. A server that uses the file ends the tenant's sessions within 5 seconds."""
    try:
        _file(tokens).revoke(name)
    except ConfigurationError as error:
        raise _ended(error) from None


def list_tokens(tokens: _Path = "") -> None:
    """List tenants: name, day, weight, and their own limits.

    These are sessions, bytes in flight, values, operations, programs that wait, seconds that they wait, bytes on the
    device, bytes on the host, and programs of a session.
    """
    try:
        found = _file(tokens).read().tenants
    except ConfigurationError as error:
        raise _ended(error) from None
    for name, entry in sorted(found.items()):
        day = datetime.datetime.fromtimestamp(entry.created, datetime.UTC).date()
        own = entry.limits
        cells = (name, day, f"{entry.weight:g}", *(
            limit or "-" for limit in msgspec.structs.astuple(own)))
        typer.echo("\t".join(map(str, cells)))


def _file(path: str) -> TokenFile:
    return TokenFile(Path(path) if path else default_path())


def _ended(error: ConfigurationError) -> typer.Exit:
    typer.echo(f"djinn: {error}", err=True)
    return typer.Exit(USAGE_ERROR)

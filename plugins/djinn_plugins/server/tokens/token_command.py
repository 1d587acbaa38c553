"""The commands ``djinn token create``, ``rotate``, ``revoke`` and ``list``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from djinn.errors import ConfigurationError
from djinn_plugins.server.tenant_limits import MAX_WORKERS, Limits
from djinn_plugins.server.tenants import written
from djinn_plugins.server.tokens.expiry import duration_s, end_of
from djinn_plugins.server.tokens.tokens import TokenFile, default_path

__all__ = ("create", "list_tokens", "revoke", "rotate")

USAGE_ERROR = 2
_Name = Annotated[str, typer.Argument(help="Name of the tenant.")]
_Path = Annotated[str, typer.Option(
    "--tokens", show_default=False, metavar="PATH",
    help="The file; djinn/tokens.json in XDG_STATE_HOME, or in ~/.local/state, if not given.")]


def create(
    name: _Name,
    tokens: _Path = "",
    weight: Annotated[float, typer.Option(
        min=1e-6, max=1e6, help="The tenant's share of a contended device, relative to other tenants.")] = 1.0,
    max_sessions: Annotated[int, typer.Option(min=0, help="Concurrent sessions; 0: the server's default.")] = 0,
    max_inflight_mib: Annotated[int, typer.Option(
        min=0, help="MiB of tensors being received at the same time; 0: the server's default.")] = 0,
    max_handles: Annotated[int, typer.Option(
        min=0, help="Values that sessions hold; 0: the server's default.")] = 0,
    max_nodes: Annotated[int, typer.Option(min=0, help="Operations in one program; 0: the server's default.")] = 0,
    max_queued: Annotated[int, typer.Option(min=0, help="Queued programs; 0: the server's default.")] = 0,
    max_wait_s: Annotated[float, typer.Option(
        min=0, help="Expected wait of a program, in seconds, above which no session starts; 0: the "
                    "server's default.")] = 0,
    max_memory_mib: Annotated[int, typer.Option(
        min=0, help="MiB of device memory; 0: the server's limit, which cannot be exceeded.")] = 0,
    max_host_mib: Annotated[int, typer.Option(
        min=0, help="MiB that may be offloaded to host memory; 0: the server's default.")] = 0,
    max_programs: Annotated[int, typer.Option(
        min=0, help="Programs defined by one session; 0: the server's default.")] = 0,
    max_workers: Annotated[int, typer.Option(
        min=0, max=MAX_WORKERS, help="Processes for owners that are kept apart; 0: the server's default.")] = 0,
    models: Annotated[list[str] | None, typer.Option(
        "--model", show_default=False, metavar="NAME",
        help="A gated model that the tenant may use, or a pattern such as meta/*; see djinn serve --gated-model. "
             "Repeatable.")] = None,
    share: Annotated[str, typer.Option(
        show_default=False, metavar="GROUP",
        help="The server keeps equal uploads of the tenants of a group in memory once. A tenant can find out that "
             "another one of the group has uploaded the same.")] = "",
    expires: Annotated[str, typer.Option(
        show_default=False, metavar="30d|DATE",
        help="When the token ends, with the sessions that use it: after 90s, 30m, 12h, 30d or 2w, or at 2027-01-31 or "
             "2027-01-31T12:00, which are UTC. Never if not given.")] = "",
) -> None:
    """Make a token for a new tenant, and print it. It is not kept: only its digest is, so it is printed this once.

    A server that uses the file admits the token's owner at once.
    """
    file = _file(tokens)
    try:
        limits = Limits(max_sessions, max_inflight_mib * 2**20, max_handles, max_nodes, max_queued, max_wait_s,
                        max_memory_mib * 2**20, max_host_mib * 2**20, max_programs, max_workers)
        token = file.create(name, weight=weight, expires=end_of(expires, int(time.time())), models=models or (),
                            share=share, limits=limits)
        _show(token, name)
    except ConfigurationError as error:
        raise _ended(error) from None
    typer.echo(f"The token of {name}, this once. Its owner sets DJINN_TOKEN to it; the server is started with "
               f"--tokens {file.path}", err=True)


def rotate(
    name: _Name,
    tokens: _Path = "",
    overlap: Annotated[str, typer.Option(
        metavar="24h", help="How long the tenant's other tokens stay good, such as 30m, 24h or 7d; 0s: not at all.",
    )] = "24h",
    expires: Annotated[str, typer.Option(
        show_default=False, metavar="30d|DATE|never",
        help="When the new token ends, as for create. After as long as the token before it if not given.")] = "",
) -> None:
    """Make another token for a tenant, and print it, this once. The tenant's other tokens end after the overlap.

    The tenant stays the same, with limits, weight and sessions. Sessions that were started with an older token end with
    it; those that are started with the new one do not.
    """
    file = _file(tokens)
    try:
        overlap_s = duration_s(overlap)
        until = {"": None, "never": 0}[expires] if expires in ("", "never") else end_of(expires, int(time.time()))
        token = file.rotate(name, overlap_s, until)
        _show(token, name)
    except ConfigurationError as error:
        raise _ended(error) from None
    typer.echo(f"The new token of {name}, this once. Other tokens of {name} are good until "
               f"{written(int(time.time()) + overlap_s)} at most.", err=True)


def revoke(name: _Name, tokens: _Path = "") -> None:
    """Take all tokens of a tenant away. A server that uses the file ends the tenant's sessions within 5 seconds."""
    try:
        _file(tokens).revoke(name)
    except ConfigurationError as error:
        raise _ended(error) from None


def list_tokens(tokens: _Path = "") -> None:
    """List tokens, one on each line: tenant, when made, when it ends, weight, and the tenant's own limits.

    These are sessions, bytes in flight, values, operations, programs that wait, seconds that they wait, bytes on the
    device, bytes on the host, and programs of a session. Gated models that the tenant may use, and the group that it
    shares uploads with, come last.
    """
    try:
        found = _file(tokens).read().tenants
    except ConfigurationError as error:
        raise _ended(error) from None
    now_s = time.time()
    for name, entry in sorted(found.items()):
        for secret in entry.secrets:
            end = "-" if not secret.expires else written(secret.expires)
            cells = (name, written(secret.created)[:10], end if secret.is_valid(now_s) else f"{end} (expired)",
                     f"{entry.weight:g}", *(limit or "-" for limit in msgspec.structs.astuple(entry.limits)),
                     ",".join(entry.models) or "-", entry.share or "-")
            typer.echo("\t".join(map(str, cells)))


def _file(path: str) -> TokenFile:
    return TokenFile(Path(path) if path else default_path())


def _show(token: str, name: str) -> None:
    try:
        typer.echo(token)
    except OSError as error:
        raise ConfigurationError(f"The token cannot be printed: {error.strerror}.",
                                 hint=f"It was made, and nobody knows it. Make another: djinn token rotate {name}"
                                 ) from None


def _ended(error: ConfigurationError) -> typer.Exit:
    typer.echo(f"djinn: {error}", err=True)
    return typer.Exit(USAGE_ERROR)

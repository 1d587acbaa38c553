"""The commands ``djinn sessions`` and ``djinn kick``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from djinn.errors import ConfigurationError, DjinnError
from djinn_plugins.server.log_lines import printable
from djinn_plugins.server.session_rows import EVERYBODY, SessionRow

__all__ = ("kick", "list_sessions")

USAGE_ERROR = 2
_Control = Annotated[str, typer.Option(
    "--control", show_default=False, metavar="PATH",
    help="The operator's socket of a server. Default: all servers of this user.")]
_MIB = 2**20


def list_sessions(
    control: _Control = "",
    connect: Annotated[str, typer.Option(
        show_default=False, metavar="URL", help="List the sessions that have a name on this server instead, such as "
                                                "tcp://HOST:PORT, as its client with DJINN_TOKEN.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the sessions of the servers that run here as this user, or with --connect your sessions that have a name.

    Each line is a session: tenant, identifier, process of its worker, age, how long its client has asked for nothing,
    programs of its last message that are not through, for how long its program has run, MiB that it holds, its client's
    address, its name if its client has given one, how long it stays if no client has it open, and the program that it
    runs or has run last.

    With --connect: name, the client that has it open, how long it stays without one, number of values, and MiB.
    """
    if connect:
        _list_named(connect, as_json=as_json)
        return
    found: list[tuple[Path, SessionRow]] = []
    for path in _paths(control):
        rows = _asked(path, "sessions")
        found += [(path, row) for row in msgspec.convert(rows, list[SessionRow])]
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(
            [{"control": str(path), **msgspec.structs.asdict(row)} for path, row in found]), indent=2).decode())
        return
    _show([("tenant", "session", "worker", "age", "idle", "queued", "running", "MiB", "client", "name", "left",
            "program"), *(_cells(row) for _, row in found)])


def _list_named(address: str, *, as_json: bool) -> None:
    import djinn
    from djinn_plugins.sessions.named.kept import named_sessions

    try:
        djinn.init(server=address, name="")
        found = named_sessions()
    except DjinnError as error:
        raise _ended(error) from None
    finally:
        djinn.shutdown()
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode([msgspec.structs.asdict(one) for one in found])).decode())
        return
    _show([("name", "client", "left", "values", "MiB"),
           *((printable(one.name), printable(one.client) or "-", _time(one.left_s), str(one.values),
              f"{one.size_bytes / _MIB:.1f}") for one in found)])


def _show(cells: list[tuple[str, ...]]) -> None:
    """Print a table, with its head and aligned if a person reads it."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row_cells in cells if sys.stdout.isatty() else cells[1:]:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row_cells, widths, strict=True)).rstrip()
                   if sys.stdout.isatty() else "\t".join(row_cells))


def kick(
    target: Annotated[str, typer.Argument(
        metavar="TENANT|SESSION", help=f"Name of a tenant ({EVERYBODY} where there are no names), or how the name of a "
                                       "session begins, four characters at least.")],
    control: _Control = "",
    wait_s: Annotated[float, typer.Option(
        min=0, max=60, help="Seconds that the running program may continue.")] = 5.0,
    keep_worker: Annotated[bool, typer.Option(
        "--keep-worker", help="Leave the worker alone even if the session's program does not end.")] = False,
) -> None:
    """End a session, or all of a tenant. Clients learn that it was the operator, and do not come back by themselves.

    A kernel that runs cannot be interrupted. If a session's program has not ended after --wait-s, its worker is killed;
    other sessions of that worker recover as they do when it crashes, and a new one starts at once.
    """
    from djinn_plugins.server.operator_socket import ask

    last: DjinnError | None = None
    for path in _paths(control):
        try:
            said = ask(path, "kick", target=target, wait_s=wait_s, keeps_worker=keep_worker)
        except ConfigurationError as error:
            last = error
            continue
        except DjinnError as error:
            raise _ended(error) from None
        _report(target, said)
        return
    raise _ended(last or ConfigurationError("No server runs here as this user.",
                                            hint="Give the path of its socket with --control."))


def _report(target: str, said: dict[str, Any]) -> None:
    if said["remains"]:
        typer.echo(f"djinn: the program of session {said['remains']} still runs; without --keep-worker, its worker is "
                   "killed", err=True)
        raise typer.Exit(1)
    killed = f"; worker {said['worker']} did not end and was killed" if said["worker"] else ""
    typer.echo(f"{target}: {said['sessions']} session{'' if said['sessions'] == 1 else 's'} ended{killed}")


def _paths(control: str) -> list[Path]:
    from djinn_plugins.server.operator_socket import default_folder, servers

    return [Path(control)] if control else list(servers(default_folder()))


def _asked(path: Path, command: str) -> Any:
    from djinn_plugins.server.operator_socket import ask

    try:
        return ask(path, command)
    except DjinnError as error:
        raise _ended(error) from None


def _ended(error: DjinnError) -> typer.Exit:
    typer.echo(f"djinn: {error}", err=True)
    return typer.Exit(USAGE_ERROR if isinstance(error, ConfigurationError) else 1)


def _cells(row: SessionRow) -> tuple[str, ...]:
    state = (_time(row.age_s), _time(row.idle_s), str(row.queued)) if row.answers else ("-", "-", "-")
    return (printable(row.tenant) or EVERYBODY, printable(row.session) or "-", str(row.worker), *state,
            _time(row.running_s) if row.running_s else "-",
            f"{row.held_bytes / _MIB:.1f}" if row.answers else "does not answer", printable(row.peer) or "-",
            printable(row.name) or "-", _time(row.left_s) if row.left_s else "-", printable(row.program) or "-")


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{left:02}s"

"""The commands ``djinn cluster up``, ``status``, ``logs`` and ``down``."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Annotated, TypeVar

import attrs
import typer

from djinn.errors import ConfigurationError, PluginError
from djinn_plugins.cluster.clusters import Cluster, chosen_engine, clusters, find, make
from djinn_plugins.cluster.joining import await_servers, await_servers_apart
from djinn_plugins.cluster.kinds import ClusterSpec, EngineProgram, ProgramReport, SupportsHosts
from djinn_plugins.cluster.programs import DIRECTORY, programs_of
from djinn_plugins.common.files.secret_files import key_in
from djinn_plugins.common.settings.connection import client_authorities

__all__ = ("down", "logs", "status", "up")

USAGE_ERROR = 2
DEFAULT = "default"
DIRECTORY_PORT, SERVER_PORT = 7700, 7777
"""Where each program has a host of its own."""
_Returned = TypeVar("_Returned")
_Name = Annotated[str, typer.Option("--name", help="Name of the cluster.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def up(
    options: Annotated[list[str] | None, typer.Argument(
        metavar="[-- OPTIONS]", show_default=False, help="Options of djinn serve for each server, such as --tokens "
                                                         "PATH.")] = None,
    engine: Annotated[str, typer.Option(
        "--engine", show_default=False,
        help="What runs the servers; `djinn plugins` lists engines. Default: the one that DJINN_PLUGINS chooses, or "
             "local.")] = "",
    servers: Annotated[int, typer.Option("--servers", min=0, max=1000, help="How many servers without a GPU.")] = 0,
    gpus: Annotated[int, typer.Option("--gpus", min=0, max=1000, help="How many servers with one GPU each.")] = 0,
    name: _Name = DEFAULT,
    port: Annotated[int, typer.Option(
        "--port", min=0, max=65535, show_default=False,
        help="Port of the directory; the servers have the next ones. Default: free ports.")] = 0,
    dashboard_port: Annotated[int | None, typer.Option(
        "--dashboard-port", min=0, max=65535, show_default=False,
        help="Port for a page that shows the servers live; 0 chooses a free one. Default: disabled.")] = None,
) -> None:
    """Start servers and their directory, and print their addresses once they accept connections.

    The command ends when the directory leads clients to all servers. Clients find the least loaded server with the
    address of the directory, as DJINN_CLUSTER or djinn.init(cluster=...). A server that ends is started again at the
    same port. The servers get the environment of this command; DJINN_TOKEN is the token that clients must present.
    """
    cluster = _usable(lambda: make(name, engine or chosen_engine()))
    own_gpus = [0] * (servers if servers or gpus else 1) + [1] * gpus
    page = dashboard_port or (None if dashboard_port is None else next(_ports(0, 1)))
    ports = _chosen(cluster, port, 1 + len(own_gpus))
    _usable(lambda: _start(cluster, programs_of(cluster, own_gpus, ports, options or [], page)))
    try:
        failed = _await_start(cluster)
    except KeyboardInterrupt:
        failed = []
        typer.echo("djinn: stopping the cluster again", err=True)
    else:
        if not failed:
            if page is not None:
                typer.echo(f"djinn cluster {name}: dashboard on port {page}, its key is in {cluster.key_file}")
            return
        for report in failed:
            typer.echo(f"djinn: {report.name}: {report.problem}", err=True)
    cluster.engine.stop(0)
    cluster.remove()
    raise typer.Exit(1)


def status(
    name: Annotated[str, typer.Option("--name", show_default=False, help="Name of the cluster. Default: all.")] = "",
    as_json: _Json = False,
) -> None:
    """Show the servers of a cluster: state, address, where they run, how often they were started again, and why."""
    found = [_usable(lambda: find(name))] if name else _usable(lambda: list(clusters()))
    states = [(cluster, cluster.engine.programs()) for cluster in found]
    if as_json:
        typer.echo(json.dumps([
            {"name": cluster.name, "engine": cluster.engine_name, "programs": list(map(attrs.asdict, reports))}
            for cluster, reports in states], indent=2))
    elif sys.stdout.isatty():
        _show(states)
    else:
        for cluster, reports in states:
            for report in reports:
                typer.echo("\t".join((cluster.name, *_cells(report))))


def logs(
    program: Annotated[str, typer.Argument(show_default=False, help="Name of a server, as in djinn cluster status. "
                                                                    "Default: all.")] = "",
    name: _Name = DEFAULT,
    lines: Annotated[int, typer.Option("--lines", min=1, max=100_000, help="How many of the last lines.")] = 50,
) -> None:
    """Print the end of the logs of a cluster's servers."""
    engine = _usable(lambda: find(name)).engine
    names = [program] if program else [report.name for report in engine.programs()]
    for each in names:
        try:
            found = engine.logs(each, lines)
        except LookupError as error:
            raise _ended(error.args[0]) from None
        for line in found:
            typer.echo(line if program else f"{each}: {line}")


def down(
    name: _Name = DEFAULT,
    drain_s: Annotated[float, typer.Option("--drain-s", min=0, help="Seconds that sessions may continue.")] = 25.0,
) -> None:
    """Stop the servers of a cluster. Nothing is left of it when this command ends."""
    cluster = _usable(lambda: find(name))
    cluster.engine.stop(drain_s)
    cluster.remove()


def _chosen(cluster: Cluster, port: int, count: int) -> list[int]:
    if port or not (cluster.moves or cluster.is_apart):
        return list(_ports(port, count))
    # Which ports are free on another machine is known there.
    return [0] * count if cluster.moves else [DIRECTORY_PORT, *[SERVER_PORT] * (count - 1)]


def _ports(first: int, count: int) -> Iterator[int]:
    """Choose a port for each program, which it keeps when it is started again."""
    if first:
        if first + count > 2**16:
            raise _ended(f"There are no {count} ports from {first} on.")
        yield from range(first, first + count)
        return
    with ExitStack() as bound:
        sockets = [bound.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        ports = [each.getsockname()[1] for each in sockets]
    yield from ports


def _start(cluster: Cluster, programs: Sequence[EngineProgram]) -> None:
    """Start programs. Their key exists before, because servers need it and may begin before their directory.

    So does what other commands find the cluster by, in case this one is killed.
    """
    is_new = not cluster.key_file.exists()
    try:
        key_in(cluster.key_file, makes=True)
        cluster.describe()
        cluster.engine.start(ClusterSpec(cluster.name, tuple(programs)))
    except (ConfigurationError, OSError) as error:
        if is_new:
            cluster.remove()
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"The cluster {cluster.name} cannot be started: {error}.",
                                 hint=f"See whether {cluster.folder} can be written to.") from None


def _await_start(cluster: Cluster) -> list[ProgramReport]:
    """Print the address of each program that serves; return those that cannot start, as soon as there is one."""
    printed: set[str] = set()
    for reports in cluster.engine.watch():
        for report in reports:
            if report.state == "serving" and report.name not in printed:
                printed.add(report.name)
                typer.echo(f"djinn cluster {cluster.name}: {report.name} serving {report.address}")
        failed = [report for report in reports if report.state == "failed"]
        if failed:
            return failed
        if len(printed) == len(reports):
            address = next(report.address for report in reports if report.name == DIRECTORY)
            if missing := _await_listed(cluster, address, len(reports) - 1):
                typer.echo(f"djinn cluster {cluster.name}: {missing}", err=True)
            return []
    return [ProgramReport(cluster.name, "failed", problem="the cluster was stopped before it served")]


def _await_listed(cluster: Cluster, address: str, count: int) -> str:
    """Wait until the directory leads clients to all servers; return why it does not."""
    asked = address, cluster.key_file, count, client_authorities()
    if isinstance(cluster.engine, SupportsHosts):
        return await_servers_apart(cluster.engine, DIRECTORY, *asked)
    return await_servers(*asked)


def _cells(report: ProgramReport) -> tuple[str, ...]:
    return (report.name, report.state, report.address, report.place, str(report.restarts),
            " ".join(report.problem.split()))


def _show(states: Sequence[tuple[Cluster, list[ProgramReport]]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    for cluster, reports in states:
        table = Table("program", "state", "address", "place", "restarts", "ended last because",
                      title=f"cluster {cluster.name}, engine {cluster.engine_name}")
        for report in reports:
            table.add_row(*map(escape, _cells(report)))
        Console().print(table)


def _usable(action: Callable[[], _Returned]) -> _Returned:
    """Return what an action returns; a mistake on the command line ends the program."""
    try:
        return action()
    except (ConfigurationError, PluginError) as error:
        raise _ended(str(error)) from None


def _ended(reason: str) -> typer.Exit:
    typer.echo(f"djinn: {reason}", err=True)
    return typer.Exit(USAGE_ERROR)

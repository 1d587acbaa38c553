"""The command ``djinn top``."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from djinn.errors import ConfigurationError, DjinnError
from djinn_plugins.watch.monitor.of_cluster import metrics_of_cluster
from djinn_plugins.watch.monitor.rates import ProgramRates, TenantRates, programs_between, rows_between
from djinn_plugins.watch.monitor.reading import Reading, read

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

__all__ = ("MetricsOption", "ended", "top")

USAGE_ERROR = 2
_COLUMNS = ("tenant", "sessions", "requests_per_s", "bytes_per_s", "held_bytes", "handles", "device_part",
            "wait_p99_s", "p99_s", "restarts", "pressure_tier")
_PROGRAM_COLUMNS = ("tenant", "program", "phase", "runs_per_s", "device_part", "total_s", "mean_s", "longest_s")
MAX_SHOWN = 10
"""How many programs are shown to people."""
_TIERS = ("-", "warning", "critical")
MetricsOption = Annotated[str, typer.Option(
    "--metrics", envvar="DJINN_METRICS", show_default=False, metavar="URL",
    help="Where the server serves its metrics, such as http://127.0.0.1:9090.")]


def top(
    metrics: MetricsOption = "",
    interval_s: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between two readings.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Read twice, print tables with tabs, and exit.")] = False,
) -> None:
    """Watch who does what on a server: sessions, requests and bytes per second, memory, latency, restarts.

    device is the part of the time in which programs ran, wait what 99 of 100 of them waited for their turns at most.
    p99 is what 99 of 100 requests took at most, from when a message was there until it was answered, since the last
    look. Slow programs are named as on the dashboard, to those on the server's own machine. Ends on Ctrl-C. The server
    has to be started with --metrics-port. Without --metrics, it is the server that the
    directory of DJINN_CLUSTER leads to.
    """
    try:
        metrics = metrics or metrics_of_cluster()
        before = _read(metrics)
        if once:
            time.sleep(interval_s)
            _print_plain(before, read(metrics))
        else:
            _watch(before, lambda: read(metrics), interval_s)
    except ConfigurationError as error:
        raise ended(error) from None
    except KeyboardInterrupt:
        # Ctrl-C is the normal way to exit.
        return


def ended(error: ConfigurationError) -> typer.Exit:
    """Print an error of the command line, and return the exception that exits the program."""
    typer.echo(f"djinn: {error}", err=True)
    return typer.Exit(USAGE_ERROR)


def _read(metrics: str) -> Reading:
    if not metrics:
        raise ConfigurationError("It is not said where the metrics are.",
                                 hint="Give --metrics URL, or set DJINN_METRICS or DJINN_CLUSTER; the log of "
                                      "a server that was started with --metrics-port names the address.")
    return read(metrics)


def _watch(before: Reading, look: Callable[[], Reading], interval_s: float) -> None:
    """Show the table after each reading until interrupted. If the server does not answer, say so and keep trying."""
    from rich.live import Live

    with Live(_shown(before, before, "looking ..."), auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            try:
                now = look()
            except ConfigurationError:
                raise
            except DjinnError as error:
                live.update(_table([], error.summary), refresh=True)
                continue
            live.update(_shown(before, now, now.not_ready), refresh=True)
            before = now


def _print_plain(before: Reading, now: Reading) -> None:
    """Print the tenants and, after an empty line, the programs, if any ran."""
    typer.echo("\t".join(_COLUMNS))
    for row in rows_between(before, now):
        wait, p99 = ("-" if found is None else f"{found:.6g}" for found in (row.wait_p99_s, row.p99_s))
        typer.echo("\t".join((row.tenant, str(row.sessions), f"{row.requests_per_s:.6g}", f"{row.bytes_per_s:.6g}",
                              str(row.held_bytes), str(row.handles), f"{row.device_part:.6g}", wait, p99,
                              str(row.restarts), str(row.pressure_tier))))
    programs = programs_between(before, now)
    if programs:
        typer.echo("\n" + "\t".join(_PROGRAM_COLUMNS))
    for each in programs:
        numbers = (each.runs_per_s, each.device_part, each.total_s, each.mean_s, each.longest_s)
        typer.echo("\t".join((each.tenant, each.name, each.phase or "-", *(f"{number:.6g}" for number in numbers))))


def _shown(before: Reading, now: Reading, caption: str) -> Group:
    from rich.console import Group

    tenants, programs = _table(rows_between(before, now), caption), programs_between(before, now)[:MAX_SHOWN]
    return Group(tenants, _programs(programs)) if programs else Group(tenants)


def _programs(rows: Sequence[ProgramRates]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table("tenant", "program", "phase", title="slow programs")
    for name in ("runs/s", "device", "total", "mean", "longest"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(escape(row.tenant), escape(row.name), row.phase.replace("_", " "), f"{row.runs_per_s:,.1f}",
                      f"{row.device_part:.0%}", *map(_duration, (row.total_s, row.mean_s, row.longest_s)))
    return table


def _table(rows: Sequence[TenantRates], caption: str) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table("tenant", title="djinn top", caption=escape(caption) or None)
    for name in ("sessions", "req/s", "bytes/s", "held", "handles", "device", "wait", "p99", "restarts", "pressure"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(escape(row.tenant), str(row.sessions), f"{row.requests_per_s:,.1f}", _size(row.bytes_per_s),
                      _size(row.held_bytes), f"{row.handles:,}", f"{row.device_part:.0%}", _duration(row.wait_p99_s),
                      _duration(row.p99_s), str(row.restarts), _TIERS[min(row.pressure_tier, 2)])
    return table


def _size(size_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def _duration(duration_s: float | None) -> str:
    if duration_s is None:
        return "-"
    if math.isinf(duration_s):
        return "long"
    return f"{duration_s:.2f} s" if duration_s >= 1 else f"{duration_s * 1e3:.2f} ms"

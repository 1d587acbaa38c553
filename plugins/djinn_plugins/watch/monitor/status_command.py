"""The command ``djinn status``."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any

import attrs
import typer

from djinn.errors import ConfigurationError, DjinnError
from djinn.plugins import Plugins
from djinn.settings import Config
from djinn_plugins.common.net.server_address import server_address
from djinn_plugins.watch.monitor.reading import Reading, name_of, printable, read
from djinn_plugins.watch.monitor.top_command import MetricsOption, ended

__all__ = ("status",)


def status(
    connect: Annotated[str, typer.Option(
        show_default=False, metavar="URL",
        help="Server to greet as a client would, such as tcp://HOST:PORT. Without --metrics either: DJINN_SERVER, or "
             "the server that the directory of DJINN_CLUSTER leads to.",
    )] = "",
    metrics: MetricsOption = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say whether a server lets sessions in, and what it does.

    With --connect, it is greeted, with DJINN_TOKEN if there is one; with --metrics, its counters are read, and --json
    prints all of them. The exit status is 0 if sessions can begin, 1 if not or if no server answers, 2 if the command
    line makes no sense.
    """
    try:
        content = _look(connect, metrics)
    except ConfigurationError as error:
        raise ended(error) from None
    except DjinnError as error:
        if not as_json:
            raise
        content = {"ready": False, "reason": str(error)}
    if as_json:
        typer.echo(json.dumps(content, indent=2))
    elif sys.stdout.isatty():
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        table = Table("what", "now", title="djinn status")
        for name, value in _facts(content):
            table.add_row(escape(name), escape(value))
        Console().print(table)
    else:
        for name, value in _facts(content):
            typer.echo(f"{name}\t{value}")
    if not content["ready"]:
        raise typer.Exit(1)


def _look(connect: str, metrics: str) -> dict[str, Any]:
    plugins = Plugins.configured({"server": connect or None}, os.environ)
    content: dict[str, Any] = {"ready": True, "reason": ""}
    if connect or not metrics:
        content["server"] = _greeted(plugins, server_address(plugins))
    if metrics:
        content |= _told(read(metrics))
    return content


def _greeted(plugins: Plugins, address: str) -> dict[str, Any]:
    """Start a session, which ends at once, and return the server's description of itself."""
    from djinn.kinds import ConnectOptions
    from djinn_plugins.common.device_report import device_of, summary_of

    if not address:
        raise ConfigurationError("No server is named.",
                                 hint="Give --connect tcp://HOST:PORT or --metrics http://HOST:PORT, or set "
                                      "DJINN_SERVER, DJINN_CLUSTER or DJINN_METRICS.")
    config = plugins.settings(Config)
    options = ConnectOptions(token=config.token, connect_timeout_s=config.connect_timeout_s, settings=plugins.settings)
    transport = plugins.transport_for(address.partition("://")[0])
    begun = time.perf_counter()
    connection = transport.connect(address, options)
    connected_s = time.perf_counter() - begun
    welcome = connection.welcome
    connection.close()
    return {"address": address, "connected_s": round(connected_s, 6), "device": welcome.device,
            "hardware": summary_of(device_of(welcome)),
            "torch": welcome.torch, "python": welcome.python, "protocol": welcome.protocol,
            "sessions": welcome.sessions, "held_bytes": welcome.held_bytes, "limit_bytes": welcome.memory_bytes}


def _told(reading: Reading) -> dict[str, Any]:
    tenants = {}
    for label, found in sorted(reading.tenants.items()):
        content = attrs.asdict(found)
        for name, buckets in (("durations", found.durations), ("waits", found.waits)):
            content[name] = {"+Inf" if math.isinf(bound) else str(bound): count for bound, count in buckets.items()}
        tenants[label] = content
    return {"ready": not reading.not_ready, "reason": reading.not_ready, "build": dict(reading.build),
            "protocol_errors": dict(reading.protocol_errors), "tenants": tenants}


def _facts(content: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """List the content for people; `--json` has all counters and histograms."""
    yield "sessions can start", "yes" if content["ready"] else f"no: {printable(content['reason'])}"
    server = content.get("server")
    if server is not None:
        yield "server", f"{printable(server['address'])}, answered in {server['connected_s'] * 1e3:.1f} ms"
        yield "device", printable(f"{server['device']} ({server['hardware']})")
        yield "versions", printable(f"torch {server['torch']}, python {server['python']}, protocol "
                                    f"{server['protocol']}")
        limit = f" of {_mib(server['limit_bytes'])}" if server["limit_bytes"] else ""
        yield "now", f"{_count(server['sessions'], 'session')}, {_mib(server['held_bytes'])}{limit} held"
    for label, tenant in content.get("tenants", {}).items():
        yield f"tenant {printable(name_of(label, content['tenants']))}", _activity(tenant)


def _activity(tenant: dict[str, Any]) -> str:
    failed = sum(count for outcome, count in tenant["requests"].items() if outcome != "ok")
    parts = [_count(tenant["workers"], "worker"), _count(tenant["sessions"], "session"),
             f"{_mib(tenant['held_bytes'])} held", _count(sum(tenant["requests"].values()), "request")]
    for count, what in ((failed, "failed"), (sum(tenant["rejections"].values()), "refused"),
                        (sum(tenant["restarts"].values()), "workers lost")):
        parts += [f"{count} {what}"] if count else []
    return ", ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"

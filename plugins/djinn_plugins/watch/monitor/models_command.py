"""The command ``djinn models``."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from djinn.errors import ConfigurationError
from djinn_plugins.watch.monitor.reading import printable
from djinn_plugins.watch.monitor.top_command import ended

__all__ = ("models",)


def models(
    connect: Annotated[str, typer.Option(
        show_default=False, metavar="URL", help="Server to ask, such as tcp://HOST:PORT. Default: DJINN_SERVER, or the "
                                               "server that the directory of DJINN_CLUSTER leads to.",
    )] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the models that a server has: name, revision, variant, digest and size, and why one cannot be used."""
    import djinn

    try:
        djinn.init(server=connect or None)
        found = djinn.models.list()
    except ConfigurationError as error:
        raise ended(error) from None
    finally:
        djinn.shutdown()
    rows = [{"name": model.name, "revision": model.revision, "digest": model.digest, "size_bytes": model.size_bytes,
             "problem": model.problem, "variant": model.variant} for model in found]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    elif sys.stdout.isatty():
        _table(rows)
    else:
        for row in rows:
            typer.echo("\t".join(printable(str(value)) for value in row.values()))


def _table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("name", "revision", "variant", "digest", "MiB", "problem", title="djinn models")
    for row in rows:
        name, revision, digest, size_bytes, problem, variant = row.values()
        table.add_row(*(escape(printable(text)) for text in (
            name, revision[:12], variant, digest[:12], f"{size_bytes / 2**20:,.1f}", problem)))
    Console().print(table)

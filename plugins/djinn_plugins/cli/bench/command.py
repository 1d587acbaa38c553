"""The command ``djinn bench``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

__all__ = ("bench",)


def bench(
    server: Annotated[str | None, typer.Option(
        show_default=False,
        help="Server to measure, tcp://HOST:PORT. Without it: DJINN_SERVER, or this process.")] = None,
    seconds: Annotated[float, typer.Option(
        min=1.0, max=3600.0, help="Duration of all measurements together, without the import of PyTorch.")] = 40.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure a server, and the way to it, in about a minute.

    Latency, throughput of uploads and downloads, operations recorded per second, and tokens per second of a small GPT
    with random weights. The last two are compared with PyTorch on the CPU of this machine. Measure while nothing else
    computes there.
    """
    def say(what: str) -> None:
        if not as_json:
            typer.echo(f"djinn: {what}", err=True)

    say("loading PyTorch")
    import attrs

    import djinn
    from djinn_plugins.cli.bench.measuring import measure
    from djinn_plugins.cli.bench.plot import print_report

    djinn.init(server=server)
    try:
        report = measure(seconds, lambda what: say(f"measuring {what}"))
    finally:
        djinn.shutdown()
    if as_json:
        typer.echo(json.dumps(attrs.asdict(report), indent=2))
    else:
        print_report(report)

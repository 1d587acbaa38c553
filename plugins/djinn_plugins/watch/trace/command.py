"""The command ``djinn trace``."""

from __future__ import annotations

import runpy
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

from djinn.errors import ConfigurationError

__all__ = ("SETTINGS", "trace")

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
"""Arguments after the script's name belong to the script."""


def trace(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="Python file to run, followed by its own arguments.")],
    output: Annotated[str, typer.Option(
        show_default=False, metavar="PATH", help="Where to write: PATH.html and PATH.trace.json. The script's name in "
                                                 "the current folder if not given.")] = "",
    server: Annotated[str | None, typer.Option(
        help="Server to use, tcp://HOST:PORT. Without it: DJINN_SERVER, or this process.")] = None,
) -> None:
    """Run a script on the remote accelerator, and draw what its model did.

    Tensors that the script makes without naming a device are made remotely. PATH.html shows the graph from the first
    call of the script's model on, with its meaning; PATH.trace.json shows when operations were recorded, handed over
    and executed, for https://ui.perfetto.dev or chrome://tracing. Both are written even if the script fails; the exit
    status is the script's.
    """
    if not script.is_file():
        raise ConfigurationError(f"There is no file {script}.", hint="Name a Python file.")
    prefix = Path(output or script.stem)
    if not prefix.parent.is_dir():
        raise ConfigurationError(f"There is no folder {prefix.parent}.", hint="Make it, or write somewhere else.")

    import djinn
    from djinn_plugins.common.tracing.spans import spans_of
    from djinn_plugins.common.tracing.waits import WaitLedger
    from djinn_plugins.watch.trace import timeline
    from djinn_plugins.watch.trace.watching import ScriptWatch

    session = djinn.init(server=server)
    watch = ScriptWatch()
    with spans_of(session) as spans, djinn.capture() as block:
        with watch.watching():
            status = _run(script, context.args)
        if not session.closed:
            djinn.synchronize()
    waits = session.shared(WaitLedger).table()
    annotated = djinn.annotate_graph(watch.graph or block.graph)
    written = [annotated.to_html(prefix.with_name(f"{prefix.name}.html")),
               prefix.with_name(f"{prefix.name}.trace.json")]
    timeline.write(written[1], timeline.events_of(spans, watch.calls, annotated.profile.steps))
    _tell(annotated, written, waits)
    djinn.shutdown()
    raise typer.Exit(status)


def _run(script: Path, arguments: list[str]) -> int:
    """Run a script as Python would, and return its exit status."""
    argv, path = sys.argv, sys.path
    sys.argv, sys.path = [str(script), *arguments], [str(script.resolve().parent), *sys.path]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        typer.echo(leaving.code, err=True)
        return 1
    except Exception:  # noqa: BLE001  # reported as Python would; the operations recorded so far are still drawn
        traceback.print_exc()
        return 1
    finally:
        sys.argv, sys.path = argv, path
    return 0


def _tell(annotated: Any, written: list[Path], waits: Any) -> None:
    """Print a short summary, the waits by line, and the paths of the files, apart from the script's own output."""
    typer.echo(f"djinn trace: {annotated}", err=True)
    if waits:
        typer.echo(waits, err=True)
    for path in written:
        typer.echo(f"  {path}", err=True)

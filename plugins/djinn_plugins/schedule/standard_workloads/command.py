"""The command ``djinn calibrate``."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ("calibrate",)


def calibrate(
    server: Annotated[str | None, typer.Option(
        help="Server to measure, tcp://HOST:PORT. Without it: DJINN_SERVER, or this process.")] = None,
    device: Annotated[str, typer.Option(
        show_default=False, help="Device of this process to measure, for example cuda:0, where there is no server.",
    )] = "",
    threads: Annotated[int | None, typer.Option(
        min=1, show_default=False,
        help="Threads for operations on the CPU of this process; as many as PyTorch chooses if not given.")] = None,
    seconds: Annotated[float, typer.Option(
        min=0.0, help="Seconds to repeat uncertain measurements; everything is measured at least once.")] = 10.0,
    save: Annotated[bool, typer.Option(help="Save the results for later sessions.")] = True,
) -> None:
    """Measure how fast an executor and the way to it are, for schedules and predictions.

    What is found is printed, and kept in the user's cache, where sessions with the same executor find it. Measure while
    nothing else computes there.
    """
    import torch

    import djinn
    from djinn_plugins.schedule import profiles

    if threads is not None:
        torch.set_num_threads(threads)
    settings = {"device": device} if device else {}
    djinn.init(server=server, **settings)
    found = djinn.calibrate(seconds=seconds, save=save)
    typer.echo(str(found))
    if save:
        typer.echo(f"  kept in {profiles.path_of(found.of)}")
    djinn.shutdown()

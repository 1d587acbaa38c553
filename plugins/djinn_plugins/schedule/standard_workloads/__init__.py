"""The workloads that `djinn.calibrate` runs, and the command ``djinn calibrate``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable

    import typer

    from djinn_plugins.schedule.workloads import Workload

__all__ = ("djinn_register_commands", "djinn_register_workloads")


@hookimpl
def djinn_register_workloads(register: Callable[[Workload], None]) -> None:
    """Register products, convolutions, attention, and memory-bound operations."""
    from djinn_plugins.schedule.standard_workloads import passes, products

    for workload in (*products.workloads(), *passes.workloads()):
        register(workload)


@hookimpl
def djinn_register_commands(app: typer.Typer) -> None:
    """Add ``djinn calibrate``."""
    from djinn_plugins.schedule.standard_workloads.command import calibrate

    app.command("calibrate")(calibrate)

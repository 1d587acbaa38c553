"""The engine ``slurm``: each program of a cluster is a job of Slurm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable

    from djinn_plugins.cluster.kinds import EngineFactory

__all__ = ("djinn_register_engines",)


@hookimpl
def djinn_register_engines(register: Callable[[EngineFactory], None]) -> None:
    """Register the engine."""
    from djinn_plugins.cluster.slurm.engine import SlurmEngines

    register(SlurmEngines())

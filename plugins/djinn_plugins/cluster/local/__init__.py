"""The engine ``local``: the programs of a cluster are processes of this machine, kept running by one process."""

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
    from djinn_plugins.cluster.local.engine import LocalEngines

    register(LocalEngines())

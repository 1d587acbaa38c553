"""The engine ``ray``: the programs of a cluster run on the nodes of a Ray cluster, each kept running by an actor."""

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
    from djinn_plugins.cluster.ray.engine import RayEngines

    register(RayEngines())

"""The engine ``kubernetes``: each program of a cluster is a Job of Kubernetes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable

    from djinn.settings import Declarations
    from djinn_plugins.cluster.kinds import EngineFactory

__all__ = ("djinn_add_settings", "djinn_register_engines")


@hookimpl
def djinn_add_settings(settings: Declarations) -> None:
    """Declare the settings of its Pods."""
    from djinn_plugins.cluster.kubernetes.settings import KubernetesSettings

    settings.add(KubernetesSettings)


@hookimpl
def djinn_register_engines(register: Callable[[EngineFactory], None]) -> None:
    """Register the engine."""
    from djinn_plugins.cluster.kubernetes.engine import KubernetesEngines

    register(KubernetesEngines())

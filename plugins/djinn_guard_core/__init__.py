"""The guard: what a server's clients want to run is looked at before it runs."""

from __future__ import annotations

from collections.abc import Callable

from djinn.hookspecs import hookimpl
from djinn.kinds import Guard

__all__ = ("djinn_register_guards",)


@hookimpl
def djinn_register_guards(register: Callable[[Guard], None]) -> None:
    """Register the plugin's one guard."""
    from djinn_guard_core.guard import CoreGuard

    register(CoreGuard())

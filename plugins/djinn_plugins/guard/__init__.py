"""The guard: checks the programs of a server's clients before they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    from djinn_plugins.common.kinds.guard import Guard

__all__ = ("djinn_register_guards",)


@hookimpl
def djinn_register_guards(register: Callable[[Guard], None]) -> None:
    """Register the plugin's guard."""
    from djinn_plugins.guard.guard import CoreGuard

    register(CoreGuard())

"""Keeps the values of a server's sessions within its device memory: evicts, offloads, reloads and recomputes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    from djinn_plugins.common.kinds.memory import MemoryFactory


@hookimpl
def djinn_register_memory(register: Callable[[MemoryFactory], None]) -> None:
    """Register the plugin's one memory manager."""
    from djinn_plugins.executor.memory.manager import TieredFactory

    register(TieredFactory())

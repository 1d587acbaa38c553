"""The blocks that watch what is recorded; without the watches' own code, which only a program that captures needs."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from djinn_plugins.graph.provenance import ModuleTracker

BLOCKS: ContextVar[tuple[ModuleTracker, ...]] = ContextVar("djinn_capture_blocks", default=())
"""The watches of the blocks in which a thread or an asynchronous task is, the innermost last."""

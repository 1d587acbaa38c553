"""The patterns of common models: attention, caches, perceptrons, experts, convolutions, norms, and models as wholes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    from djinn_plugins.graph.kinds import Pattern


@hookimpl
def djinn_register_patterns(register: Callable[[Pattern], None]) -> None:
    """Register every pattern of the plugin."""
    from djinn_plugins.graph.patterns.patterns import PATTERNS

    for pattern in PATTERNS:
        register(pattern)

"""A pattern that finds low-rank products: two matrix products in a row, through a small inner dimension.

Adapters such as LoRA look like this, beside the weight that they adapt, and so does every factorised weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    from djinn_plugins.graph.kinds import Pattern


@hookimpl
def djinn_register_patterns(register: Callable[[Pattern], None]) -> None:
    """Register the pattern ``lowrank``."""
    from djinn_pattern_lowrank.pattern import LowRankPattern

    register(LowRankPattern())

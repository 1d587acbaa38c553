"""The run mode ``cuda``: programs that say ``"cuda"`` use the remote device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from djinn.hookspecs import hookimpl

__all__ = ("djinn_register_modes",)


@hookimpl
def djinn_register_modes(register: Callable[[Any], None]) -> None:
    """Register the mode."""
    from djinn_plugins.run.cuda.mode import CudaMode

    register(CudaMode())

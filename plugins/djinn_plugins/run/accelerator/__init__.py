"""The run mode ``accelerator``: the remote device is the accelerator of the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from djinn.hookspecs import hookimpl

__all__ = ("djinn_register_modes",)


@hookimpl
def djinn_register_modes(register: Callable[[Any], None]) -> None:
    """Register the mode."""
    from djinn_plugins.run.accelerator.mode import AcceleratorMode

    register(AcceleratorMode())

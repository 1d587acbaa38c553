"""The run mode ``accelerator``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from djinn_plugins.run.kinds import RunContext

__all__ = ("AcceleratorMode",)


class AcceleratorMode:
    """Makes the remote device the one that ``torch.accelerator`` and the libraries that ask it choose."""

    name = "accelerator"
    help = "torch.accelerator and libraries choose the device"
    device = "remote_accelerator:0"

    @contextlib.contextmanager
    def enter(self, context: RunContext) -> Iterator[None]:
        """Make the device available, and name it to libraries whose own lists of accelerators are closed."""
        from djinn_plugins.device.accelerator.availability import make_available
        from djinn_plugins.run.accelerator import libraries, lightning
        from djinn_plugins.run.changes import variables
        from djinn_plugins.run.replacing import replaced

        replacements = [*libraries.replacements(context.device), *lightning.replacements(context.device)]
        registries = [(f"{package}.accelerators", lightning.register)
                      for family in lightning.FAMILIES for package in family]
        with (make_available(), replaced(replacements, context.report, registries),
              variables(os.environ, {"ACCELERATE_TORCH_DEVICE": str(context.device)})):
            yield

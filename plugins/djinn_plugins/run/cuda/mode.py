"""The run mode ``cuda``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from djinn_plugins.run.kinds import RunContext

__all__ = ("CudaMode",)


class CudaMode:
    """Makes ``cuda`` a name of the remote device, which is also the accelerator of the process."""

    name = "cuda"
    help = "programs that say cuda use the device"
    device = "cuda:0"

    @contextlib.contextmanager
    def enter(self, context: RunContext) -> Iterator[None]:
        """Put the alias in place, and report afterwards where the program compares devices with CUDA."""
        # Here, since the help of `djinn run` names the mode without PyTorch.
        from djinn_plugins.run.cuda.alias import cuda_alias
        from djinn_plugins.run.cuda.hints import hint, main_script

        with cuda_alias():
            try:
                yield
            finally:
                text = hint(main_script())
                if text:
                    context.report.note(text)

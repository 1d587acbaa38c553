"""Runs programs with PyTorch on CUDA devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    from djinn.settings import Declarations
    from djinn_plugins.common.kinds.executor import ExecutorFactory


@hookimpl
def djinn_add_settings(settings: Declarations) -> None:
    """Declare the settings of CUDA devices, which sessions without a server have, too."""
    from djinn_plugins.executor.cuda.settings import CudaSettings

    settings.add(CudaSettings, "both")


@hookimpl
def djinn_register_executors(register: Callable[[ExecutorFactory], None]) -> None:
    """Register the ``cuda`` executor."""
    from djinn_plugins.executor.cuda.executor import CudaExecutorFactory

    register(CudaExecutorFactory())

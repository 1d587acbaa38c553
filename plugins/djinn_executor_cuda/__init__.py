"""Runs programs with PyTorch on CUDA devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    from djinn_lib_service.kinds import ExecutorFactory


@hookimpl
def djinn_register_executors(register: Callable[[ExecutorFactory], None]) -> None:
    """Register the ``cuda`` executor."""
    from djinn_executor_cuda.executor import CudaExecutorFactory

    register(CudaExecutorFactory())

"""Runs programs with PyTorch on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    from djinn_lib_service.kinds import ExecutorFactory


@hookimpl
def djinn_register_executors(register: Callable[[ExecutorFactory], None]) -> None:
    """Register the ``cpu`` executor."""
    from djinn_executor_cpu.executor import CpuExecutorFactory

    register(CpuExecutorFactory())

"""Runs programs with PyTorch on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    from djinn_plugins.common.kinds.executor import ExecutorFactory


@hookimpl
def djinn_register_executors(register: Callable[[ExecutorFactory], None]) -> None:
    """Register the ``cpu`` executor."""
    from djinn_plugins.executor.cpu.executor import CpuExecutorFactory

    register(CpuExecutorFactory())

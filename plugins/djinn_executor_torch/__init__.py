"""Runs programs with PyTorch, on the CPU or a CUDA device, with the same code."""

from __future__ import annotations

from collections.abc import Callable

from djinn_lib_service.kinds import ExecutorFactory

from djinn.hookspecs import hookimpl


@hookimpl
def djinn_register_executors(register: Callable[[ExecutorFactory], None]) -> None:
    """Register the ``torch`` executor."""
    from djinn_executor_torch.executor import TorchExecutorFactory

    register(TorchExecutorFactory())

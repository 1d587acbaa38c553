"""The executor that runs pending operations in this process, as earlier documents describe it."""

from __future__ import annotations

from functools import cache

import torch

from djinn.errors import NothingCapturedError
from djinn.record.tensor import LazyTensor
from djinn_plugins.schedule.execution import ExecutionStrategy, execute
from djinn_plugins.schedule.scheduling import SchedulingStrategy, schedule
from djinn_plugins.sessions.names.building import pending_graph

__all__ = ("SimpleExecutor", "get_executor")


class SimpleExecutor:
    """Runs the pending operations of a tensor with PyTorch on this process's CPU, to compare with the remote result.

    Values from outside are fetched. The operations stay pending.
    """

    def __init__(self) -> None:
        self._executions = 0

    def execute_subgraph(self, tensor: torch.Tensor) -> torch.Tensor:
        """Compute a lazy tensor here; a tensor behind which nothing is pending is fetched.

        Random operations draw from this process's generator.
        """
        self._executions += 1
        if not isinstance(tensor, LazyTensor):
            return tensor
        try:
            graph = pending_graph(tensor)
        except NothingCapturedError:
            return tensor.materialize()
        planned = schedule(graph, SchedulingStrategy.SINGLE)
        value = f"v{tensor._value.slot.number}"
        made: torch.Tensor = execute(planned, outputs=[value], strategy=ExecutionStrategy.LOCAL)[0]
        return made

    execute_graph = execute_subgraph

    def get_stats(self) -> dict[str, int]:
        """Return how often it has been asked."""
        return {"execution_count": self._executions}


@cache
def get_executor() -> SimpleExecutor:
    """Return the executor of this process."""
    return SimpleExecutor()

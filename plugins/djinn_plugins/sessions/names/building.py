"""The builder of graphs, as earlier documents describe it."""

from __future__ import annotations

import threading
from typing import Any

import torch

from djinn.errors import NothingCapturedError
from djinn.ir.tape import needed_for
from djinn.record import devices
from djinn.record.tensor import LazyTensor
from djinn_plugins.graph import capture as capturing
from djinn_plugins.graph.analysis import build_graph
from djinn_plugins.graph.from_tape import graph_of
from djinn_plugins.graph.graph import Graph, RecordedGraph

__all__ = ("GraphBuilder", "get_global_builder", "initialize_global_builder", "pending_graph")

_local = threading.local()


class GraphBuilder:
    """Builds graphs of models and of captured blocks, and remembers the last one.

    Concurrency:
        One thread. `get_global_builder` has one for each.
    """

    def __init__(self) -> None:
        self._graph: Graph | None = None
        self._captured: Any = capturing.last_capture()

    def build_from_model(self, model: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Graph:
        """Build the graph of a call, as `djinn.build_graph` does: by tracing, or by running if that is impossible."""
        return self._remember(build_graph(model, *args, **kwargs))

    def build_from_capture(self) -> Graph:
        """Return the graph of this thread's last `djinn.capture` block, as `djinn.get_graph` does.

        Raises:
            NothingCapturedError: There is none.
        """
        return self._remember(capturing.get_graph())

    def add_operation(self, tensor: torch.Tensor) -> None:
        """Let `get_graph` return the operations that a tensor waits for.

        Raises:
            NothingCapturedError: It waits for none.
        """
        self._remember(pending_graph(tensor))

    def get_graph(self) -> Graph:
        """Return the last graph: of a call of this builder, or of a block that has ended since.

        Raises:
            NothingCapturedError: There is none.
        """
        if self._graph is None or capturing.is_capturing() or capturing.last_capture() is not self._captured:
            return capturing.get_graph()
        return self._graph

    def materialize(self, tensor: LazyTensor) -> torch.Tensor:
        """Bring a tensor's data home, as its own method does."""
        return tensor.materialize()

    def _remember(self, graph: Graph) -> Graph:
        self._graph, self._captured = graph, capturing.last_capture()
        return graph


def pending_graph(tensor: torch.Tensor) -> RecordedGraph:
    """Return the graph of the pending operations that a tensor needs.

    Raises:
        NothingCapturedError: There are none.
    """
    session = devices.running_session()
    if isinstance(tensor, LazyTensor) and session is not None:
        session.check_owner(tensor)
        nodes = session.tape.nodes[:]
        needed = needed_for(nodes, [tensor._value.slot])
        if any(needed):
            return graph_of([node for node, is_needed in zip(nodes, needed, strict=True) if is_needed])
    raise NothingCapturedError("No operation is pending behind the tensor.",
                               hint="Ask before its value is needed, or capture the block that computes it.")


def get_global_builder() -> GraphBuilder:
    """Return this thread's builder."""
    if not hasattr(_local, "builder"):
        _local.builder = GraphBuilder()
    found: GraphBuilder = _local.builder
    return found


def initialize_global_builder() -> None:
    """Let this thread begin with a new builder."""
    _local.builder = GraphBuilder()

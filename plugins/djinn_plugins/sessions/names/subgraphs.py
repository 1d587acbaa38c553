"""Parts of a graph that are sent to an executor, as earlier documents describe them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch

from djinn.errors import InputsError
from djinn.record.tensor import LazyTensor
from djinn.session import runtime
from djinn_plugins.graph.graph import Graph, GraphNode, RecordedGraph
from djinn_plugins.graph.returned import returned_by, value_in
from djinn_plugins.schedule.costs import CostModel, CostWeights
from djinn_plugins.schedule.inputs import returned_of
from djinn_plugins.schedule.liveness import MemoryEstimator
from djinn_plugins.schedule.schedule import CostEstimate, DeviceInfo, ExecutionSchedule
from djinn_plugins.schedule.scheduling import schedule
from djinn_plugins.sessions.names.building import pending_graph

__all__ = ("CostCalculator", "FragmentationConfig", "RemoteSubgraph", "SmartSubgraphBuilder", "SubgraphBuilder",
           "SubgraphFragment")


@attrs.frozen
class FragmentationConfig:
    """How large the parts of a graph may be."""

    max_nodes: int = 256
    """Most nodes of a part."""
    max_bytes: int | None = None
    """Most bytes that a part may hold at once, beside values from outside; ``None``: any number. A node that needs more
    is a part of its own.
    """


@attrs.frozen
class SubgraphFragment:
    """A part of a graph: consecutive nodes."""

    nodes: tuple[GraphNode, ...]
    inputs: tuple[str, ...]
    """Values that it reads and does not make."""
    outputs: tuple[str, ...]
    """Values that it makes and that later parts, or nodes of no part, read."""
    memory_bytes: int
    """Most bytes that it holds at once."""
    cost: CostEstimate
    """Its expected cost on one device."""


@attrs.frozen(eq=False, slots=False)
class RemoteSubgraph(RecordedGraph):
    """The pending operations that a tensor needs. It is a graph, and can be scheduled as one.

    Attributes:
        target: The tensor.
        fragments: Its parts, in order.
    """

    target: LazyTensor | None = None
    fragments: tuple[SubgraphFragment, ...] = ()

    @property
    def inputs(self) -> tuple[str, ...]:
        """Values that it reads and does not make: weights and inputs."""
        return _outside(self.nodes)

    @property
    def output(self) -> str:
        """Identifier of the tensor's value."""
        return "" if self.target is None else f"v{self.target._value.slot.number}"

    def execute(self) -> torch.Tensor:
        """Run it, and bring the tensor's data home, in one round trip.

        Raises:
            InputsError: It was not built from a tensor.
        """
        if self.target is None:
            raise InputsError("The subgraph was built from a graph, and has no tensor to fetch.",
                              hint="Use djinn.execute(djinn.schedule(subgraph)).")
        return self.target.materialize()


class SubgraphBuilder:
    """Finds the operations that a tensor needs."""

    def build(self, target: torch.Tensor | Graph) -> RemoteSubgraph:
        """Return the subgraph of a lazy tensor; or a graph, as a subgraph.

        Raises:
            NothingCapturedError: No operation is pending behind the tensor.
        """
        if not isinstance(target, LazyTensor):
            graph: Graph = pending_graph(target) if isinstance(target, torch.Tensor) else target
            return RemoteSubgraph(graph.nodes(), graph.storages, graph.backend_type, graph.values,
                                  graph.fallback_reason, returned_of(graph))
        graph = pending_graph(target)
        return RemoteSubgraph(graph.nodes(), graph.storages, values=graph.values, target=target,
                              returned=returned_by(target, value_in(runtime.current())))


class SmartSubgraphBuilder(SubgraphBuilder):
    """As `SubgraphBuilder`; it also cuts the subgraph into parts.

    Args:
        config: How large the parts may be.
    """

    def __init__(self, config: FragmentationConfig | None = None) -> None:
        self.config = config or FragmentationConfig()

    def build(self, target: torch.Tensor | Graph) -> RemoteSubgraph:
        """Return the subgraph of a lazy tensor, or a graph, with its parts.

        Raises:
            NothingCapturedError: No operation is pending behind the tensor.
        """
        whole = super().build(target)
        return attrs.evolve(whole, fragments=tuple(self._cut(whole)))

    def _cut(self, graph: RemoteSubgraph) -> Iterator[SubgraphFragment]:
        read_at: dict[str, int] = {}
        for position, node in enumerate(graph):
            read_at |= dict.fromkeys(node.inputs, position)
        begin = 0
        for position in range(1, len(graph) + 1):
            nodes = graph.nodes[begin:position]
            is_full = position == len(graph) or len(nodes) == self.config.max_nodes
            if is_full or self._exceeds(graph, (*nodes, graph.nodes[position])):
                outputs = [value for node in nodes for value in node.outputs
                           if read_at.get(value, len(graph)) >= position]
                part = RecordedGraph(nodes, graph.storages, graph.backend_type, graph.values)
                yield SubgraphFragment(tuple(nodes), _outside(nodes), tuple(outputs),
                                       MemoryEstimator(part).peak_bytes, CostCalculator().estimate_graph(part))
                begin = position

    def _exceeds(self, graph: RemoteSubgraph, nodes: Sequence[GraphNode]) -> bool:
        if self.config.max_bytes is None:
            return False
        outside: Mapping[str, int] = {value: spec.reach_bytes for node in nodes
                                      for value, spec in zip(node.inputs, node.input_specs, strict=False)
                                      if spec is not None and value in set(_outside(nodes))}
        part = RecordedGraph(tuple(nodes), graph.storages)
        return MemoryEstimator(part).peak_bytes - sum(outside.values()) > self.config.max_bytes


class CostCalculator(CostModel):
    """Predicts what work costs, with weights of its parts.

    Args:
        devices: The devices; by default, those of the running session, or an unmeasured one.
        alpha: Weight of computing.
        beta: Weight of moving values.
        gamma: Weight of waiting for other sessions' work.
    """

    def __init__(
        self, devices: Sequence[DeviceInfo] | None = None, *, alpha: float = 1.0, beta: float = 1.0, gamma: float = 1.0
    ) -> None:
        self._infos = None if devices is None else list(devices)
        super().__init__(self._infos or [], CostWeights(alpha, beta, gamma))

    def estimate_graph(self, graph: Graph) -> CostEstimate:
        """Predict the cost of a graph on one device, in program order."""
        made = schedule(graph, "single", self._infos)
        return self.estimate_schedule(made)

    def estimate_schedule(self, made: ExecutionSchedule) -> CostEstimate:
        """Predict the cost of a schedule of `djinn.schedule`, with these weights."""
        assert made.graph is not None, "djinn.schedule keeps the graph"
        return CostModel(made.device_infos, self.weights).estimate(made, made.graph)


def _outside(nodes: Sequence[GraphNode]) -> tuple[str, ...]:
    made = {value for node in nodes for value in node.outputs}
    return tuple(dict.fromkeys(value for node in nodes for value in node.inputs if value not in made))

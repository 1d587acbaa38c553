"""Patterns that are written for one graph at a time, as earlier documents describe them, and helpers for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from djinn.errors import PluginValidationError
from djinn.plugins.in_process import register
from djinn_plugins.graph.analysis import find_patterns
from djinn_plugins.graph.graph import Graph, GraphNode
from djinn_plugins.graph.match import PatternMatch

if TYPE_CHECKING:
    import networkx

__all__ = ("PatternPlugin", "PatternRegistry", "analyze_graph_complexity", "base_name", "find_attention_pattern",
           "find_mlp_pattern", "graph_to_networkx")

_PRODUCTS = frozenset("matmul mm bmm baddbmm addmm linear".split())
_SOFTMAX = frozenset("softmax safe_softmax".split())
_ACTIVATIONS = frozenset("relu relu_ gelu silu tanh sigmoid hardswish leaky_relu elu".split())
_BETWEEN = frozenset(
    "to_copy add contiguous clone div dropout expand masked_fill mul native_dropout permute reshape sub t "
    "transpose unsqueeze view where unsafe_view".split())
"""Operations that may stand between the parts of a structure: scaling, masks, dropout, views."""


def base_name(operation: str) -> str:
    """Return the usual name of an operation: ``softmax`` for ``aten::_softmax`` and ``aten::softmax.int``."""
    return operation.rpartition("::")[2].partition(".")[0].lstrip("_")


class PatternPlugin(ABC):
    """A pattern that looks at a whole graph and gives at most one match.

    It can be registered with `PatternRegistry.register`, or, as any pattern, with a plugin's hook. `find` calls `match`
    only for graphs within the limits of the class.
    """

    expected_operations: ClassVar[frozenset[str]] = frozenset()
    """Operations that a graph must contain, without namespace and overload."""
    min_nodes: ClassVar[int] = 0
    """Fewest nodes of a graph."""
    max_nodes: ClassVar[int | None] = None
    """Most nodes of a graph; ``None``: any number."""
    allows_cycles: ClassVar[bool] = True
    """Whether a graph may have cycles. Those that djinn records have none."""
    max_fanout: ClassVar[int | None] = None
    """Most nodes that may read one node's results; ``None``: any number."""
    min_confidence: ClassVar[float] = 0.0
    """Matches with less are left out."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the pattern."""

    @abstractmethod
    def match(self, graph: Graph) -> PatternMatch | None:
        """Look at a graph.

        A match without nodes stands for all nodes with one of the expected operations; without any, for the graph.
        """

    def accepts(self, graph: Graph) -> bool:
        """Whether a graph is within the limits."""
        nodes = graph.nodes()
        if len(nodes) < self.min_nodes or (self.max_nodes is not None and len(nodes) > self.max_nodes):
            return False
        if not self.expected_operations <= {base_name(node.operation) for node in nodes}:
            return False
        if self.max_fanout is not None and max(_fanouts(graph), default=0) > self.max_fanout:
            return False
        return self.allows_cycles or not analyze_graph_complexity(graph_to_networkx(graph))["has_cycles"]

    def find(self, graph: Graph) -> Sequence[PatternMatch]:
        """Return the match, if there is one."""
        found = self.match(graph) if self.accepts(graph) else None
        if found is None or found.confidence < self.min_confidence:
            return []
        if not found.nodes:
            nodes = tuple(node.id for node in graph.nodes()
                          if not self.expected_operations or base_name(node.operation) in self.expected_operations)
            found = PatternMatch(found.pattern, nodes, found.confidence, found.hints, found.roles, found.values,
                                 found.metadata)
        return [found]


class PatternRegistry:
    """The patterns that one analyzer looks for.

    Args:
        patterns: Patterns to begin with.
        installed: Whether the installed patterns belong to it as well.
    """

    def __init__(self, patterns: Sequence[Any] = (), *, installed: bool = False) -> None:
        self._patterns: dict[str, Any] = {}
        self._installed = installed
        for pattern in patterns:
            self.register(pattern)

    def register(self, pattern: Any) -> None:
        """Add a pattern: an object, or a class of such objects. One of the same name is replaced.

        Raises:
            PluginValidationError: It is no pattern.
        """
        made = pattern() if isinstance(pattern, type) else pattern
        if not callable(getattr(made, "find", None)) or not isinstance(getattr(made, "name", None), str):
            raise PluginValidationError(f"The object {made!r} is no pattern.",
                                        hint="Derive its class from djinn.PatternPlugin.")
        self._patterns[made.name] = made

    def unregister(self, name: str) -> None:
        """Remove a pattern.

        Raises:
            KeyError: There is none of that name.
        """
        del self._patterns[name]

    def install(self) -> None:
        """Make its patterns plugins of this process, for `djinn.find_patterns` and all sessions that begin later."""
        for pattern in self._patterns.values():
            register(pattern, "pattern")

    def get_all_patterns(self) -> list[Any]:
        """List the patterns that were added."""
        return list(self._patterns.values())

    def match_patterns(self, graph: Graph) -> list[PatternMatch]:
        """Find all patterns in a graph; the most confident first."""
        found = find_patterns(graph) if self._installed else []
        for pattern in self._patterns.values():
            found += pattern.find(graph)
        return sorted(found, key=lambda match: -match.confidence)


def graph_to_networkx(graph: Graph) -> networkx.DiGraph[str]:
    """Convert a graph to one of networkx, whose nodes have the attribute ``operation``, without namespace."""
    import networkx

    made: networkx.DiGraph[str] = networkx.DiGraph()
    for node in graph.nodes():
        made.add_node(node.id, operation=base_name(node.operation), shape=node.shape)
    made.add_edges_from((edge.source, edge.target) for edge in graph.edges() if edge.kind == "data")
    return made


def find_attention_pattern(graph: networkx.DiGraph[str]) -> list[dict[str, str]]:
    """Find a product, a softmax and a product, with scaling, masks or views between them.

    Args:
        graph: What `graph_to_networkx` returns.

    Returns:
        For each: the nodes ``qkt``, ``attn`` and ``output``; the same one three times if attention is one operation.
    """
    found = []
    for node, operation in _operations(graph):
        if "scaled_dot_product" in str(operation) and "attention" in str(operation):
            found.append(dict.fromkeys(("qkt", "attn", "output"), node))
        elif operation in _SOFTMAX:
            found += [{"qkt": first, "attn": node, "output": last}
                      for first in _nearest(graph, node, _PRODUCTS, graph.predecessors)
                      for last in _nearest(graph, node, _PRODUCTS, graph.successors)]
    return found


def find_mlp_pattern(graph: networkx.DiGraph[str]) -> list[dict[str, str]]:
    """Find a product, an activation and a product: ``up``, ``activation`` and ``down``."""
    return [{"up": first, "activation": node, "down": last}
            for node, operation in _operations(graph) if operation in _ACTIVATIONS
            for first in _nearest(graph, node, _PRODUCTS, graph.predecessors)
            for last in _nearest(graph, node, _PRODUCTS, graph.successors)]


def _operations(graph: networkx.DiGraph[str]) -> Iterator[tuple[str, str]]:
    for node, attributes in graph.nodes(data=True):
        yield node, str(attributes["operation"])


def _nearest(graph: networkx.DiGraph[str], node: str, wanted: frozenset[str], step: Any) -> Iterator[str]:
    """List the nearest nodes of some kind in one direction."""
    seen, waiting = {node}, [node]
    while waiting:
        for other in step(waiting.pop()):
            if other in seen:
                continue
            seen.add(other)
            operation = graph.nodes[other]["operation"]
            if operation in wanted:
                yield other
            elif operation in _BETWEEN:
                waiting.append(other)


def analyze_graph_complexity(graph: networkx.DiGraph[str]) -> dict[str, Any]:
    """Count the nodes, edges, edges by node, and strongly connected components of a graph, and look for cycles."""
    import networkx

    count = graph.number_of_nodes()
    return {
        "node_count": count,
        "edge_count": graph.number_of_edges(),
        "avg_degree": 2 * graph.number_of_edges() / count if count else 0.0,
        "has_cycles": not networkx.is_directed_acyclic_graph(graph),
        "strongly_connected_components": networkx.number_strongly_connected_components(graph),
    }


def _fanouts(graph: Graph) -> Sequence[int]:
    makers: dict[str, GraphNode] = {value: node for node in graph.nodes() for value in node.outputs}
    counts = Counter(makers[value].id for node in graph.nodes() for value in dict.fromkeys(node.inputs)
                     if value in makers)
    return list(counts.values())

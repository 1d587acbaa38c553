"""Inner parts of earlier versions, as earlier documents describe them, by what does their work today."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from djinn.errors import UnknownOperatorError
from djinn.record import devices
from djinn_plugins.common.tracing.state import get_interception_stats
from djinn_plugins.graph import interception
from djinn_plugins.graph.graph import Graph, GraphNode
from djinn_plugins.graph.match import PatternMatch
from djinn_plugins.graph.metadata import WorkloadType
from djinn_plugins.sessions.names.analyzing import SemanticAnalyzer
from djinn_plugins.sessions.names.building import pending_graph
from djinn_plugins.sessions.names.classifying import FETCHING, packet_named
from djinn_plugins.sessions.names.executing import SimpleExecutor
from djinn_plugins.sessions.names.patterns import PatternRegistry, analyze_graph_complexity, graph_to_networkx

__all__ = (
    "FULL_FEATURES", "AutomaticDispatch", "FactoryInterceptor", "GraphCache", "MaterializationOptimizer",
    "NetworkXPatternMatcher", "OperationRegistry", "ShapeInferrer", "UniversalDispatcher", "WorkloadClassifier",
    "check_pytorch_compatibility", "get_default_pattern_matcher", "get_factory_interceptor", "register_device_backend",
    "unwrap_factories", "wrap_factories",
)

FULL_FEATURES = "full"
"""What `check_pytorch_compatibility` returns: there are no degrees."""


def check_pytorch_compatibility() -> str:
    """Return ``FULL_FEATURES``. With a release of PyTorch that lacks parts, djinn cannot be imported.

    Raises:
        DeviceNameTakenError: Another library has taken the device's place.
    """
    register_device_backend()
    return FULL_FEATURES


def register_device_backend() -> None:
    """Check that PyTorch has the remote device, which importing djinn has registered.

    Raises:
        DeviceNameTakenError: Another library has taken its place.
    """
    problem = devices.device_problem()
    if problem is not None:
        raise problem


def wrap_factories() -> None:
    """Let the factories of this thread or task be remote again within `djinn.capture`, after `unwrap_factories`."""
    interception.set_disabled(disabled=False)


def unwrap_factories() -> None:
    """Keep the factories of this thread or task local, also within `djinn.capture`, until `wrap_factories`."""
    interception.set_disabled(disabled=True)


class FactoryInterceptor:
    """Whether factories are intercepted."""

    def wrap(self) -> None:
        """Intercept them, as `wrap_factories` does."""
        wrap_factories()

    def unwrap(self) -> None:
        """Leave them alone, as `unwrap_factories` does."""
        unwrap_factories()

    def get_stats(self) -> Mapping[str, int]:
        """Return the counters, as `djinn.get_interception_stats` does."""
        return get_interception_stats()


_interceptor = FactoryInterceptor()


def get_factory_interceptor() -> FactoryInterceptor:
    """Return the interceptor of this process."""
    return _interceptor


class UniversalDispatcher:
    """Calls functions on lazy tensors. PyTorch's dispatcher records them, whatever they are."""

    SPECIAL_OPS = frozenset(f"aten::{name}" for name in FETCHING)
    """Operations that give Python values or ordinary tensors."""

    @classmethod
    def dispatch(
        cls, func: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None,
        lazy_tensor_class: type | None = None,
    ) -> Any:
        """Call a function; its results have their sizes and dtypes at once.

        Args:
            func: A function of PyTorch.
            args: Its arguments.
            kwargs: Its keyword arguments.
            lazy_tensor_class: The class of the results, `djinn.LazyTensor` or one derived from it.
        """
        made = func(*args, **(kwargs or {}))
        return made if lazy_tensor_class is None else tree_map_only(
            torch.Tensor, lambda tensor: tensor.as_subclass(lazy_tensor_class)
            if not isinstance(tensor, lazy_tensor_class) else tensor, made)


AutomaticDispatch = UniversalDispatcher


class OperationRegistry:
    """The operations of PyTorch by name, as client and server both have them, and those that `register` adds."""

    def __init__(self) -> None:
        self._own: dict[str, Callable[[Sequence[Any], Mapping[str, Any]], Any]] = {}

    def register(self, operation: str, function: Callable[[Sequence[Any], Mapping[str, Any]], Any]) -> None:
        """Add an operation to this registry, or replace one.

        Args:
            operation: Its name.
            function: Takes its arguments and its keyword arguments. On lazy tensors, its operations are recorded.
        """
        self._own[operation] = function

    def get(self, operation: str) -> Callable[[Sequence[Any], Mapping[str, Any]], Any]:
        """Return a function that takes the arguments and the keyword arguments of an operation.

        Raises:
            UnknownOperatorError: Neither the registry nor PyTorch has such an operation.
        """
        if operation in self._own:
            return self._own[operation]
        packet = packet_named(operation)
        return lambda inputs, kwargs: packet(*inputs, **kwargs)

    def execute(self, operation: str, inputs: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Any:
        """Run an operation, or record it if its inputs are lazy."""
        return self.get(operation)(inputs, kwargs or {})

    def __contains__(self, operation: str) -> bool:
        try:
            self.get(operation)
        except UnknownOperatorError:
            return False
        return True


class ShapeInferrer:
    """Tells sizes without computing anything."""

    @classmethod
    def infer_shape(
        cls, operation: str | Callable[..., Any], inputs: Sequence[Any], kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return the size of an operation's result; of several results, a tuple of sizes.

        Args:
            operation: A name such as ``aten::matmul``, or a function.
            inputs: Its arguments; of tensors, only sizes and dtypes matter.
            kwargs: Its keyword arguments.

        Raises:
            Exception: What the operation raises for such arguments, or PyTorch if the size depends on data.
        """
        function = packet_named(operation) if isinstance(operation, str) else operation
        args, keywords = tree_map_only(
            torch.Tensor, lambda tensor: torch.empty_like(tensor, device="meta"), (list(inputs), dict(kwargs or {})))
        return tree_map_only(torch.Tensor, lambda made: made.shape, function(*args, **keywords))


class GraphCache:
    """Graphs by keys of the caller's choice; of more than ``max_size``, the one that was asked for longest ago goes.

    Args:
        max_size: Most graphs.

    Attributes:
        stats: How often a graph was found, ``hits``, and how often none was, ``misses``.
    """

    def __init__(self, max_size: int = 100) -> None:
        self.cache: OrderedDict[Any, Graph] = OrderedDict()
        self.max_size = max_size
        self.stats = {"hits": 0, "misses": 0}

    def get(self, cache_key: Any) -> Graph | None:
        """Return a graph, if it is there."""
        self.stats["hits" if cache_key in self.cache else "misses"] += 1
        if cache_key in self.cache:
            self.cache.move_to_end(cache_key)
        return self.cache.get(cache_key)

    def put(self, cache_key: Any, graph: Graph) -> None:
        """Keep a graph."""
        self.cache[cache_key] = graph
        self.cache.move_to_end(cache_key)
        while len(self.cache) > self.max_size:
            self.cache.popitem(last=False)


class MaterializationOptimizer:
    """Fetches tensors. Streams and pinned memory are settings of the executor."""

    def build_schedule(self, root_lazy_tensor: torch.Tensor) -> Sequence[GraphNode]:
        """List the pending operations that a tensor needs, in the order in which they run.

        Raises:
            NothingCapturedError: It needs none.
        """
        return pending_graph(root_lazy_tensor).topological_sort()

    def execute_optimized(self, root_lazy_tensor: Any, executor: SimpleExecutor | None = None) -> torch.Tensor:
        """Fetch a tensor; or let an executor of this process compute it."""
        made: torch.Tensor = (
            root_lazy_tensor.materialize() if executor is None else executor.execute_subgraph(root_lazy_tensor))
        return made


class NetworkXPatternMatcher:
    """Finds the patterns of a registry.

    Args:
        pattern_registry: The registry; by default, one with the installed patterns.
    """

    def __init__(self, pattern_registry: PatternRegistry | None = None) -> None:
        self.pattern_registry = pattern_registry or PatternRegistry(installed=True)

    def match_patterns(self, graph: Graph) -> Sequence[PatternMatch]:
        """Find them, the most confident first."""
        return self.pattern_registry.match_patterns(graph)

    def analyze_structure(self, graph: Graph) -> Mapping[str, Any]:
        """Count nodes and edges, and look for cycles."""
        return analyze_graph_complexity(graph_to_networkx(graph))


def get_default_pattern_matcher() -> NetworkXPatternMatcher:
    """Return what finds the installed patterns."""
    return NetworkXPatternMatcher()


class WorkloadClassifier:
    """Says of what kind a workload is."""

    def classify(self, graph: Graph) -> WorkloadType:
        """Return the kind, as `djinn.SemanticAnalyzer` finds it."""
        return SemanticAnalyzer().analyze_graph(graph).workload_type

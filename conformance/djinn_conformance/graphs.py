"""Graphs for analyzers, patterns and schedulers: random ones, common blocks of models, and a deep one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import attrs
import torch
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from djinn.ir.schema import facts_of
from djinn.ir.spec import SpecTable, TensorSpec
from djinn_conformance.assertions import expect_equal
from djinn_conformance.operations import IN_PLACE, RANDOM, VIEWS, grouped
from djinn_conformance.oracle import run_eager, seeded
from djinn_conformance.programs import Recording
from djinn_conformance.strategies import filled, recordings
from djinn_plugins.graph.graph import GraphNode, Operand, RecordedGraph, ValueInfo

__all__ = ("DEEP", "EMPTY", "blocks", "chain", "deep_graph", "expect_unchanged", "graphs", "renamed", "show",
           "snapshot")

DEEP = 20_000
"""Number of nodes of the deep graph."""
EMPTY = RecordedGraph(())
_LOGICAL = torch.device("meta")


class _GraphMode(TorchDispatchMode):
    """Records the operations of eager PyTorch code as a graph."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped
        self.nodes: list[GraphNode] = []
        self.storages: dict[str, str] = {}
        self._specs = SpecTable()
        self._names: dict[int, str] = {}
        self._owners: dict[int, str] = {}
        # Results are kept alive, so that no other tensor gets the identity of a freed one.
        self._alive: list[torch.Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Do not involve PyTorch's compiler, whose import takes seconds; nothing is compiled here."""
        return False

    def _name(self, tensor: torch.Tensor) -> str:
        if id(tensor) not in self._names:
            self._alive.append(tensor)
            name = self._names[id(tensor)] = f"v{len(self._names)}"
            owner = self._owners.setdefault(tensor.untyped_storage()._cdata, name)
            if owner != name:
                self.storages[name] = owner
        return self._names[id(tensor)]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        returned = func(*args, **kwargs)
        facts = facts_of(func)
        named = [*zip(facts.argument_names, args, strict=False), *kwargs.items()]
        operands = [leaf for _, item in named for leaf in tree_leaves(item) if isinstance(leaf, torch.Tensor)]
        inputs = [self._name(operand) for operand in operands]
        writes = [self._name(leaf) for name, item in named if name in facts.written for leaf in tree_leaves(item)
                  if isinstance(leaf, torch.Tensor)]
        results = [leaf for leaf in tree_leaves(returned) if isinstance(leaf, torch.Tensor)]
        new = [result for result in results if id(result) not in self._names]
        positions = iter(range(len(operands)))
        self.nodes.append(GraphNode(
            id=f"n{len(self.nodes)}",
            operation=facts.name,
            inputs=tuple(inputs),
            outputs=tuple(self._name(result) for result in new),
            specs=tuple(self._specs.of(result, _LOGICAL) for result in new),
            writes=tuple(writes),
            is_random=facts.is_random,
            input_specs=tuple(self._specs.of(operand, _LOGICAL) for operand in operands),
            arguments=tuple(_argument(item, positions) for item in args),
            keywords={name: _argument(item, positions) for name, item in kwargs.items()},
            metadata={"origin": ["conformance"]},
        ))
        return returned


def _argument(item: Any, positions: Iterator[int]) -> Any:
    """Convert an argument to the form used in graphs: operands by position, PyTorch constants by name."""
    if isinstance(item, torch.Tensor):
        return Operand(next(positions))
    if isinstance(item, (list, tuple)):
        return [_argument(member, positions) for member in item]
    if isinstance(item, (torch.dtype, torch.layout, torch.memory_format)):
        return str(item).removeprefix("torch.")
    return "" if isinstance(item, torch.device) else item


def _traced(function: Callable[[], Any]) -> RecordedGraph:
    mode = _GraphMode()
    with torch.inference_mode(), mode:
        function()
    return RecordedGraph(tuple(mode.nodes), dict(mode.storages), values=_values_from_outside(mode.nodes))


def _values_from_outside(nodes: Sequence[GraphNode]) -> dict[str, ValueInfo]:
    produced: set[str] = set()
    found: dict[str, ValueInfo] = {}
    for node in nodes:
        for value, spec in zip(node.inputs, node.input_specs, strict=True):
            if value not in produced:
                found.setdefault(value, ValueInfo(spec=spec))
        produced.update(node.outputs)
    return found


def _attention() -> None:
    x, weights = filled((1, 6, 8), torch.float32, 1), [filled((8, 8), torch.float32, seed) for seed in range(4)]
    q, k, v = (functional.linear(x, weight).view(1, 6, 2, 4).transpose(1, 2) for weight in weights[:3])
    scores = torch.softmax(q @ k.transpose(-1, -2) / 2.0, dim=-1)
    functional.linear((scores @ v).transpose(1, 2).reshape(1, 6, 8), weights[3])


def _decode_step() -> None:
    x, past_keys = filled((1, 1, 8), torch.float32, 1), filled((1, 2, 5, 4), torch.float32, 2)
    weights = [filled((8, 8), torch.float32, seed) for seed in range(4)]
    q, k, v = (functional.linear(x, weight).view(1, 1, 2, 4).transpose(1, 2) for weight in weights[:3])
    keys, values = torch.cat([past_keys, k], dim=2), torch.cat([past_keys, v], dim=2)
    attended = functional.scaled_dot_product_attention(q, keys, values)
    functional.linear(attended.transpose(1, 2).reshape(1, 1, 8), weights[3])
    past_keys[:, :, 4:5].copy_(k)


def _mlp() -> None:
    x = functional.layer_norm(filled((2, 8), torch.float32, 1), [8])
    up = functional.gelu(functional.linear(x, filled((16, 8), torch.float32, 2), filled((16,), torch.float32, 3)))
    gate = functional.silu(functional.linear(x, filled((16, 8), torch.float32, 4)))
    x + functional.linear(up * gate, filled((8, 16), torch.float32, 5))  # the sum is recorded


def _convolutions() -> None:
    x = filled((1, 3, 8, 8), torch.float32, 1)
    for seed, channels in ((2, 3), (3, 4)):
        x = functional.conv2d(x, filled((4, channels, 3, 3), torch.float32, seed), padding=1)
        x = functional.batch_norm(x, torch.zeros(4), torch.ones(4)).relu_()
    functional.adaptive_avg_pool2d(functional.max_pool2d(x, 2), 1).flatten(1)


def _adapter() -> None:
    x, wide = torch.tanh(filled((4, 48), torch.float32, 1)), filled((48, 48), torch.float32, 2)
    narrow, back = filled((4, 48), torch.float32, 3), filled((48, 4), torch.float32, 4)
    functional.linear(x, wide) + functional.linear(functional.linear(x, narrow), back)  # as above


def _training_step() -> None:
    table, weight = filled((10, 8), torch.float32, 1), filled((10, 8), torch.float32, 2)
    hidden = functional.dropout(functional.embedding(torch.tensor([[1, 2, 3]]), table), 0.5)
    loss = functional.cross_entropy(functional.linear(hidden, weight).view(-1, 10), torch.tensor([2, 3, 4]))
    weight.mul_(0.9).add_(loss, alpha=-0.1)


@lru_cache(maxsize=1)
def blocks() -> tuple[RecordedGraph, ...]:
    """Trace the common blocks."""
    with seeded(torch.device("cpu"), 0):
        return tuple(map(_traced, (_attention, _decode_step, _mlp, _convolutions, _adapter, _training_step)))


def _graph_of(recording: Recording) -> RecordedGraph:
    return _traced(lambda: run_eager(recording, torch.device("cpu"), seed=0))


def graphs() -> st.SearchStrategy[RecordedGraph]:
    """Draw graphs: random programs with views, in-place writes and random numbers, common blocks, an empty one."""
    random_ones = recordings(grouped() + RANDOM, favoured=VIEWS + IN_PLACE, max_calls=16).map(_graph_of)
    return st.one_of(st.sampled_from([EMPTY, *blocks()]), random_ones)


@lru_cache(maxsize=1)
def deep_graph() -> RecordedGraph:
    """Create a chain of `DEEP` nodes."""
    return chain(DEEP)


def chain(count: int) -> RecordedGraph:
    """Create a chain in which each node reads the result of the one before, and some write to it in place."""
    spec = SpecTable().of(torch.empty(4, device=_LOGICAL), _LOGICAL)
    return RecordedGraph(tuple(_link(index, spec) for index in range(count)))


def _link(index: int, spec: TensorSpec) -> GraphNode:
    writes = index % 7 == 0
    inputs = (f"v{index - 1}",) if writes else (f"v{index - 1}", f"v{index // 2}")
    return GraphNode(
        f"n{index}", "aten::add_.Tensor" if writes else "aten::add.Tensor", inputs, (f"v{index}",), (spec,),
        inputs[:writes], input_specs=(spec,) * len(inputs),
        arguments=(Operand(0), 1) if writes else (Operand(0), Operand(1)))


def renamed(graph: RecordedGraph) -> tuple[RecordedGraph, Mapping[str, str]]:
    """Rename and reorder all nodes and values, and return the mapping of the nodes."""
    nodes = {node.id: f"{position * 7919 % 99991}-node" for position, node in enumerate(graph.nodes())}
    names: dict[str, str] = {}

    def value(name: str) -> str:
        return names.setdefault(name, f"{len(names) * 104729 % 999983}-value")

    made = tuple(attrs.evolve(
        node, id=nodes[node.id], inputs=tuple(map(value, node.inputs)), outputs=tuple(map(value, node.outputs)),
        writes=tuple(map(value, node.writes)), metadata=copy.deepcopy(dict(node.metadata)),
    ) for node in graph.nodes())
    storages = {value(view): value(base) for view, base in graph.storages.items()}
    return RecordedGraph(made, storages, values={value(name): info for name, info in graph.values.items()}), nodes


def snapshot(graph: RecordedGraph) -> list[Any]:
    """Copy the whole content of a graph."""
    fields = [{name: copy.deepcopy(value) if name == "metadata" else value
               for name, value in attrs.asdict(node, recurse=False).items()} for node in graph.nodes()]
    return [fields, list(graph.edges()), dict(graph.storages), dict(graph.values), graph.backend_type,
            graph.fallback_reason]


def expect_unchanged(graph: RecordedGraph, before: list[Any], where: str) -> None:
    """Check that a graph is unchanged."""
    __tracebackhide__ = True
    names = ("nodes", "edges", "storages", "values", "backend type", "reason for falling back")
    for name, got, wanted in zip(names, snapshot(graph), before, strict=True):
        expect_equal(got, wanted, f"{name} of the graph afterwards", where)


def show(graph: RecordedGraph) -> str:
    """Describe a graph in one line."""
    shown = "; ".join(f"{node.id}: {node.operation}({', '.join(node.inputs)}) -> {', '.join(node.outputs) or '()'}"
                      for node in list(graph)[:30])
    return f"{len(graph)} nodes: {shown}"

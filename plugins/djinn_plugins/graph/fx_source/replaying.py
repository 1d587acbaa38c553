"""Runs a graph of ``torch.fx`` in a rehearsal, node by node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.nn.utils.stateless import _reparametrize_module

from djinn.errors import UnsupportedTensorError
from djinn.ir.schema import facts_of
from djinn.ir.tape import Node
from djinn.record.tensor import LazyTensor
from djinn_plugins.graph.from_tape import graph_of
from djinn_plugins.graph.fx_source.device_remap import OnRemote
from djinn_plugins.graph.fx_source.dry_run import HINT, Beside, DryRunSession
from djinn_plugins.graph.fx_source.places import STACK, followed, origin_of
from djinn_plugins.graph.graph import Origin, RecordedGraph, ValueInfo
from djinn_plugins.graph.returned import Returned, returned_by, value_in

_UNKNOWN = ValueInfo()
_CONSTANT = "_tensor_constant"
"""Prefix of the names that tracers give to tensors that belong to no module."""
_aten = torch.ops.aten
_LIFTS = (_aten.lift_fresh.default, _aten.lift_fresh_copy.default)
_LEAVES_VALUES = (_aten.detach_.default, _aten.detach.default, _aten.alias.default)
"""Operators that tracers add after a lifted constant; lazy tensors made from numbers do not have them."""
_SIZES: Mapping[Any, Callable[..., Any]] = {
    _aten.sym_size.int: lambda tensor, dim: tensor.shape[dim],
    _aten.sym_size.default: lambda tensor: tensor.shape,
    _aten.sym_stride.int: lambda tensor, dim: tensor._value.spec.stride[dim],
    _aten.sym_numel.default: lambda tensor: tensor._value.spec.numel,
    _aten.sym_storage_offset.default: lambda tensor: tensor._value.spec.storage_offset,
}
"""Metadata queries, which lazy tensors answer without recording an operation."""


@attrs.frozen
class Given:
    """The value of one placeholder of a graph.

    Attributes:
        value: A tensor, of which only the metadata is used, or a plain value.
        info: Its role in the model; the spec is filled in.
    """

    value: Any
    info: ValueInfo = _UNKNOWN


@attrs.frozen(eq=False, slots=False)
class FxGraph(RecordedGraph):
    """A graph from one of PyTorch's tracers, in the form that lazy tensors record."""

    backend_type: str = "fx"
    module: torch.fx.GraphModule | None = None
    """The traced graph itself, for passes of ``torch.fx``."""


def replay(
    rehearsal: DryRunSession, module: torch.fx.GraphModule, given: Sequence[Given], root: str, terms: OnRemote,
    structure: Returned | None = None,
) -> FxGraph:
    """Record the operations of a traced graph.

    Args:
        rehearsal: The rehearsal that records.
        module: The graph.
        given: The values of its placeholders, in order.
        root: Class of the model that was traced.
        terms: The mode that interprets the graph's devices.
        structure: What the model returned, with positions among the graph's results in place of tensors; by default,
            the results themselves.

    Raises:
        UnsupportedTensorError: Some metadata depends on data.
        Exception: The error of an operation.
    """
    recorded: list[tuple[Node, Origin]] = []
    interpreter = _Interpreter(module, rehearsal, root, terms)
    stop = rehearsal.capture(lambda node: recorded.append((node, interpreter.place.origin)))
    names: dict[int, ValueInfo] = {}
    known: dict[int, tuple[torch.Tensor, LazyTensor]] = {}

    def stand_in(tensor: torch.Tensor, info: ValueInfo) -> LazyTensor:
        _, made = known.get(id(tensor)) or known.setdefault(id(tensor), (tensor, rehearsal.stand_in(tensor)))
        if tensor.requires_grad:
            made.requires_grad_()
        slot, spec = made._value.slot, made._value.spec
        names.setdefault(slot.number, attrs.evolve(info, spec=spec))
        return made

    arguments = [stand_in(item.value, item.info) if isinstance(item.value, torch.Tensor) else item.value
                 for item in given]
    state: dict[str, torch.Tensor] = {name: stand_in(tensor, info) for name, tensor, info in _state_of(module)}
    try:
        with _reparametrize_module(module, state, tie_weights=True), terms, Beside(rehearsal):
            result = interpreter.run(*arguments)
    finally:
        stop()
    nodes = [node for node, _ in recorded]
    if structure is not None:
        result = structure.filled({str(position): tensor for position, tensor in enumerate(result)})
    graph = graph_of(nodes, [origin for _, origin in recorded], _values(nodes, names))
    return FxGraph(graph.nodes(), graph.storages, values=graph.values, module=module,
                   returned=returned_by(result, value_in(rehearsal)))


def _state_of(module: torch.fx.GraphModule) -> Iterator[tuple[str, torch.Tensor, ValueInfo]]:
    """List the state that a graph contains from its model, and the numbers that its tracer has found."""
    for kind, tensors in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in tensors:
            if not isinstance(tensor, LazyTensor):
                yield name, tensor, _UNKNOWN if name.startswith(_CONSTANT) else ValueInfo(name, kind)


def _values(nodes: Sequence[Node], names: Mapping[int, ValueInfo]) -> dict[str, ValueInfo]:
    """Return the information about values from outside."""
    produced: set[int] = set()
    found: dict[str, ValueInfo] = {}
    for node in nodes:
        for slot, spec in zip(node.inputs, node.signature.operands, strict=True):
            if slot.number not in produced:
                found.setdefault(f"v{slot.number}", names.get(slot.number) or ValueInfo(spec=spec))
        produced.update(slot.number for slot in node.outputs)
    return found


@attrs.define
class _Place:
    """The current position of the replay."""

    origin: Origin


class _Interpreter(torch.fx.Interpreter):
    def __init__(self, module: torch.fx.GraphModule, rehearsal: DryRunSession, root: str, terms: OnRemote) -> None:
        super().__init__(module)
        self.place = _Place(origin_of(None, root))
        self._terms = terms
        self._rehearsal = rehearsal
        self._root = root
        self._constants: set[int] = set()

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.op not in ("placeholder", "output"):
            self.place.origin = origin_of(n.meta.get(STACK), self._root)
        return super().run_node(n)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        found = self.fetch_attr(target)
        if isinstance(found, torch.Tensor) and not isinstance(found, LazyTensor):
            return self._terms.constant(found)
        return found

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = self.fetch_attr(target)
        if isinstance(module, torch.fx.GraphModule):
            return None if target == "_guards_fn" else self._nested(module)(*args, **kwargs)

        def moved(stack: dict[str, tuple[str, Any]]) -> None:
            self.place.origin = origin_of(stack, self._root)

        with followed(module, target, moved):
            return module(*args, **kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(target, torch._ops.HigherOrderOperator):
            return self._higher_order(target, args, kwargs)
        if isinstance(target, torch._ops.OpOverload):
            if target in _SIZES:
                return _SIZES[target](*args)
            if target in _LIFTS or (target in _LEAVES_VALUES and id(args[0]) in self._constants):
                made = self._terms.lifted(args[0]) if target in _LIFTS else args[0]
                self._constants.add(id(made))
                return made
            facts = facts_of(target)
            if not facts.returns and not facts.written:
                # An assertion about metadata.
                return None
        return super().call_function(target, args, kwargs)

    def _higher_order(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Execute a region of a graph that has other modes; no other operator over graphs is straight-line."""
        if target.name() not in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
            raise UnsupportedTensorError(f"{target.name()} decides by data which of its graphs runs.", hint=HINT)
        inner = [self._nested(item) if isinstance(item, torch.fx.GraphModule) else item for item in args]
        if target.name() == "wrap_with_autocast":
            inner[0] = self._rehearsal.device.type
        return target(*inner, **kwargs)

    def _nested(self, module: torch.fx.GraphModule) -> Callable[..., Any]:
        inner = _Interpreter(module, self._rehearsal, self._root, self._terms)
        inner.place, inner._constants = self.place, self._constants
        return inner.run

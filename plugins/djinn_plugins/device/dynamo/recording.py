"""Records a captured graph once on lazy tensors, and determines whether the recording is repeatable."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch

from djinn.ir.tape import Node
from djinn.ir.value import Slot
from djinn.record.tensor import LazyTensor, wrap
from djinn_plugins.device.dynamo.remote_mode import recording_remotely
from djinn_plugins.device.dynamo.results import Fetched, Results, sort_out
from djinn_plugins.device.dynamo.segments import Segment, can_be_repeated

if TYPE_CHECKING:
    from djinn.session.session import Session


_LEAVES_VALUES = "aten::detach_"
"""Writes only autograd metadata, although its schema declares a write; ``torch.tensor`` calls it in inference mode."""


@attrs.define(eq=False)
class RecordedGraphCall:
    """One recorded call of a graph; it also represents that call itself.

    Attributes:
        leaves: The operands that it was recorded with.
        results: Its results, and the values to download for them: results, then operands that were written.
        written: Index of each written operand, by position among the downloaded values.
        nodes: The operations.
        differentiable: Positions, among the downloaded values, of results with gradients.
        constants: Tensors that the graph made from numbers it contains; they were uploaded.
        changes_metadata: Whether an operand was resized in place.
    """

    session: Session
    leaves: list[LazyTensor]
    results: Results
    written: dict[int, int]
    nodes: list[Node]
    differentiable: list[int]
    constants: list[LazyTensor]
    changes_metadata: bool

    @property
    def trained(self) -> list[int]:
        """Indices of the operands that may need gradients."""
        return [index for index, leaf in enumerate(self.leaves) if leaf.requires_grad]

    def fetch(self) -> list[torch.Tensor]:
        """Download the results of the call."""
        return self.session.materialize(self.results.wanted)

    def gradients(self, incoming: Sequence[LazyTensor]) -> list[LazyTensor | None]:
        """Record the backward pass; may be called again."""
        outputs = [self.results.wanted[position] for position in self.differentiable]
        inputs = [self.leaves[index] for index in self.trained]
        with torch.inference_mode(mode=False):
            found = torch.autograd.grad(outputs, inputs, list(incoming), retain_graph=True, allow_unused=True)
            return [_resolved(gradient) for gradient in found]

    def backward(self, incoming: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Run the backward pass of this call, and download the gradients in one round trip."""
        session = self.session
        lazy = self.gradients([session.upload(gradient) for gradient in incoming])
        home = iter(session.materialize([gradient for gradient in lazy if gradient is not None]))
        return [None if gradient is None else next(home) for gradient in lazy]


def record(
    session: Session, run: Callable[[Sequence[Any]], Sequence[Any]], operands: Sequence[torch.Tensor],
    lazy: Sequence[LazyTensor],
) -> RecordedGraphCall:
    """Run a graph on lazy tensors.

    Args:
        session: The session.
        run: Runs the graph with the given operands instead of the original ones.
        operands: The call's own operands.
        lazy: Their remote copies.
    """
    specs = [tensor._value.spec for tensor in lazy]
    leaves = [_leaf_like(operand, tensor) for operand, tensor in zip(operands, lazy, strict=True)]
    with _Listener(session) as nodes:
        with recording_remotely() as made:
            returned = [_resolved(result) for result in run(leaves)]
        has_gradients = any(leaf.requires_grad for leaf in leaves) and any(
            isinstance(result, LazyTensor) and result.requires_grad for result in returned)
        results = sort_out(returned, leaves, differentiable=has_gradients)
    differentiable = [form.index for form, result in zip(results.forms, returned, strict=True)
                      if has_gradients and isinstance(form, Fetched) and result.requires_grad]
    written = _written(nodes, leaves)
    first = len(results.wanted)
    results.wanted += [leaves[index] for index in written]
    produced = {slot for node in nodes for slot in node.outputs}
    return RecordedGraphCall(
        session, leaves, results, dict(enumerate(written, first)), nodes, list(dict.fromkeys(differentiable)),
        constants=[tensor for tensor in made if tensor._value.slot not in produced],
        changes_metadata=any(leaf._value.spec is not spec for leaf, spec in zip(leaves, specs, strict=True)),
    )


def listen(session: Session, action: Callable[[], Any]) -> tuple[Any, list[Node]]:
    """Run an action, and return its result and the nodes that it records."""
    with _Listener(session) as nodes:
        return action(), nodes


class _Listener:
    """Collects the nodes that this thread records."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._thread = threading.get_ident()
        self._nodes: list[Node] = []

    def __enter__(self) -> list[Node]:
        self._stop = self._session.capture(self._receive)
        return self._nodes

    def __exit__(self, *details: object) -> None:
        self._stop()

    def _receive(self, node: Node) -> None:
        if threading.get_ident() == self._thread:
            self._nodes.append(node)


def is_repeatable(
    session: Session, nodes: Sequence[Node], piece: Segment, known: set[Slot], constants: Sequence[LazyTensor]
) -> bool:
    """Whether nodes may run again: they do not depend on data, and their inputs are known and unchanged."""
    constant = {tensor._value.slot for tensor in constants}
    return (
        set(piece.reads) <= known | constant
        and not storages_written(nodes).intersection(slot.storage for slot in constant)
        and can_be_repeated(session, nodes)
    )


def _leaf_like(operand: torch.Tensor, lazy: LazyTensor) -> LazyTensor:
    """Give a remote copy the same role in autograd as its ordinary tensor; the copy itself is not involved."""
    with torch._C._InferenceMode(operand.is_inference()):
        leaf = wrap(lazy._value.spec, lazy._value)
    return leaf.requires_grad_(operand.requires_grad) if operand.requires_grad else leaf  # type: ignore[return-value]  # stays lazy


def _resolved(result: Any) -> Any:
    """Materialize conjugation and negation: only plain values are downloaded."""
    if isinstance(result, LazyTensor) and (result.is_conj() or result.is_neg()):
        return result.resolve_conj().resolve_neg()
    return result


def _written(nodes: Sequence[Node], leaves: Sequence[LazyTensor]) -> list[int]:
    storages = {leaf._value.slot.storage: index for index, leaf in enumerate(leaves)}
    written = storages_written(nodes)
    return [index for storage, index in storages.items() if storage in written]


def storages_written(nodes: Sequence[Node]) -> set[int]:
    """Return the storages that nodes write."""
    return {node.inputs[position].storage for node in nodes for position in node.signature.writes
            if node.signature.template.operator != _LEAVES_VALUES}

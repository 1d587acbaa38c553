"""The values that a graph reads from outside, and the tensors bound to them."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch

from djinn.errors import InputsError
from djinn.ir.spec import TensorSpec
from djinn.record.tensor import LazyTensor
from djinn_plugins.graph.graph import Graph
from djinn_plugins.graph.returned import Returned

if TYPE_CHECKING:
    from djinn.session.session import Session

Inputs = Mapping[str, Any] | Sequence[Any] | None
_WEIGHTS = ("parameter", "buffer", "optimizer_state", "gradient")
"""Kinds of values that are not passed to each call."""


@attrs.frozen
class Outside:
    """A value that a graph reads from outside."""

    value: str
    name: str
    """Its name in the captured model, if it has one."""
    kind: str
    spec: TensorSpec | None
    is_written: bool
    """Whether the graph writes into its storage."""
    maker: str = ""
    """The factory that made it in the captured block, if it can be given in place of that factory's result."""

    @property
    def is_weight(self) -> bool:
        """Whether the value is not passed to each call. A weight that only the analysis recognizes has no name."""
        return bool(self.name) and self.kind in _WEIGHTS

    @property
    def label(self) -> str:
        """Name of the value in messages."""
        return f"{self.name!r} ({self.value})" if self.name else self.value


def returned_of(graph: Graph) -> Returned | None:
    """Return what a graph returns, if that is known."""
    return getattr(graph, "returned", None)


def outside_values(graph: Graph) -> list[Outside]:
    """List the values that a graph reads from outside, in the order in which it first reads them.

    Those that it only returns follow.
    """
    made: set[str] = set()
    specs: dict[str, TensorSpec | None] = {}
    written: set[str] = set()
    storages = graph.storages
    for node in graph.nodes():
        for value, spec in itertools.zip_longest(node.inputs, node.input_specs[:len(node.inputs)]):
            if value not in made:
                specs.setdefault(value, spec)
        written.update(storages.get(value, value) for value in node.writes)
        made.update(node.outputs)
    returned = returned_of(graph)
    for value, spec in returned.values.items() if returned else ():
        if value not in made:
            specs.setdefault(value, spec)
    found = []
    for value, spec in specs.items():
        info = graph.values.get(value)
        found.append(Outside(value, info.name if info else "", info.kind if info else "",
                             spec or (info.spec if info else None), storages.get(value, value) in written))
    return found


def made_inputs(graph: Graph) -> list[Outside]:
    """List the values that the captured block made for its model: results of factories outside the model's modules.

    They are no values from outside, but a caller can give others in their place.
    """
    storages = graph.storages
    nodes = graph.nodes()
    written = {storages.get(value, value) for node in nodes for value in node.writes}
    return [Outside(node.outputs[0], "", "input", node.specs[0], node.outputs[0] in written, node.id) for node in nodes
            if not node.inputs and not node.origin.module_type and len(node.outputs) == 1 and node.specs[0] is not None]


def alive_values(session: Session, wanted: Sequence[Outside]) -> dict[str, LazyTensor]:
    """Find a session's tensors that hold the values which a graph of the same session has read.

    Sessions keep no list of their tensors, because that would slow down every operation; the garbage collector knows
    them. Nothing is cached here, because `torch.nn.Module.to` cannot move tensors that have weak references.
    """
    numbers = {int(value.value[1:]): value.value for value in wanted
               if value.spec is not None and value.spec in session.specs and value.value[1:].isdecimal()}
    found: dict[str, LazyTensor] = {}
    if numbers:
        for tensor in tensors_of(session):
            if tensor._value.slot.number in numbers:
                found[numbers[tensor._value.slot.number]] = tensor
    return found


def tensors_of(session: Session) -> list[LazyTensor]:
    """List the tensors of a session that are alive."""
    released = session.recorder.released
    kinds = {LazyTensor, *LazyTensor.__subclasses__()}
    return [tensor for tensor in gc.get_objects() if type(tensor) in kinds
            and (value := getattr(tensor, "_value", None)) is not None and value.released is released]


def bind(
    session: Session, graph: Graph, outside: Sequence[Outside], inputs: Inputs
) -> tuple[list[Outside], dict[str, Any]]:
    """Find a tensor for every value from outside, and for those of `made_inputs` that are given.

    Raises:
        InputsError: A tensor is missing or does not fit.

    Returns:
        The values that have a tensor, and the tensors.
    """
    made = made_inputs(graph)
    bound: dict[str, Any] = _given(outside, made, inputs)
    outside = [*outside, *(value for value in made if value.value in bound)]
    missing = [value for value in outside if value.value not in bound]
    bound |= alive_values(session, missing)
    if absent := [value.label for value in missing if value.value not in bound]:
        raise InputsError(f"{len(absent)} of {len(outside)} values from outside are missing: "
                          f"{', '.join(absent[:5])}{', ...' if len(absent) > 5 else ''}.",
                          hint="The session does not hold them any more; give them in djinn.execute(inputs={...}).")
    for value in outside:
        _check_fits(value, bound[value.value])
    for tensor in bound.values():
        if isinstance(tensor, LazyTensor):
            session.check_owner(tensor)
    _check_sharing(graph, outside, bound)
    return outside, bound


def _places(outside: Sequence[Outside], made: Sequence[Outside], inputs: Sequence[Any]) -> list[Outside]:
    """Choose the values that inputs without names stand for.

    A tensor that the block has made stands for itself. Otherwise, the values from outside come first, and then those
    that the block made for its model, if as many inputs are given.
    """
    own = {value.value: value for value in made}
    known = [own.get(f"v{tensor._value.slot.number}") if isinstance(tensor, LazyTensor) else None for tensor in inputs]
    if known and None not in known and len({*map(id, known)}) == len(known):
        return [value for value in known if value is not None]
    places = [value for value in outside if not value.is_weight]
    named = [value.value for value in known if value is not None]
    if len(places) + len(set(named)) == len(inputs):
        rest = iter(places)
        return [next(rest) if value is None else value for value in known]
    return [*places, *made] if len(places) < len(inputs) else places


def _given(outside: Sequence[Outside], made: Sequence[Outside], inputs: Inputs) -> dict[str, Any]:
    if inputs is None:
        return {}
    if isinstance(inputs, torch.Tensor):
        raise InputsError("The inputs are one tensor.", hint="Put it into a list: inputs=[tensor].")
    if not isinstance(inputs, Mapping):
        places = _places(outside, made, inputs)
        if len(inputs) != len(places):
            usual = [value for value in outside if not value.is_weight]
            raise InputsError(f"{len(inputs)} inputs are given, and the graph reads {len(usual)} values from outside "
                              f"that are no weights: {', '.join(value.label for value in usual) or 'none'}. The block "
                              f"made {len(made)} more: {', '.join(value.value for value in made) or 'none'}.",
                              hint="Give as many as there are from outside, or as many as there are in all, in this "
                                   "order; or name them in a mapping.")
        return {value.value: tensor for value, tensor in zip(places, inputs, strict=True)}
    named: dict[str, list[str]] = {}
    for value in outside:
        named.setdefault(value.name, []).append(value.value)
    known = {value.value for value in (*outside, *made)}
    found: dict[str, Any] = {}
    for key, tensor in inputs.items():
        answers = [key] if key in known else named.get(key, []) if key else []
        if len(answers) != 1:
            why = f"is the name of several values: {', '.join(answers)}" if answers else "is no value from outside"
            raise InputsError(f"The input {key!r} {why}.", hint="The graph reads "
                              f"{', '.join(value.label for value in outside if not value.is_weight)}.")
        found[answers[0]] = tensor
    return found


def _check_fits(value: Outside, given: Any) -> None:
    if not isinstance(given, torch.Tensor):
        raise InputsError(f"{value.label} is given a {type(given).__name__}, and is a tensor.")
    spec = value.spec
    if spec is not None and (given.shape != spec.size or given.dtype != spec.dtype):
        raise InputsError(
            f"{value.label} is given {given.dtype}{list(given.shape)}, and was {spec.dtype}{list(spec.size)} when the "
            "graph was recorded.", hint="A graph holds for one size of each input; record it anew for another.")
    if spec is None or _layout_of(given) == (spec.stride, spec.storage_offset):
        return
    overlaps = any(step == 0 != there and extent > 1
                   for extent, step, there in zip(spec.size, spec.stride, given.stride(), strict=True))
    if overlaps or (value.is_written and isinstance(given, LazyTensor)):
        raise InputsError(f"{value.label} lies in memory in another way than when the graph was recorded, which "
                          f"{'expanded it' if overlaps else 'writes there'}.",
                          hint=f"Give a tensor with the strides {spec.stride}.")


def _check_sharing(graph: Graph, outside: Sequence[Outside], bound: Mapping[str, Any]) -> None:
    """Check that values that share memory and are written still share memory, so that each sees the other's writes."""
    owners: dict[str, tuple[Outside, Any]] = {}
    for value in outside:
        if value.is_written and not value.maker:
            storage = graph.storages.get(value.value, value.value)
            first, memory = owners.setdefault(storage, (value, _memory_of(bound[value.value])))
            if memory != _memory_of(bound[value.value]):
                raise InputsError(f"{value.label} and {first.label} share memory in the graph, which writes there, and "
                                  "what is given for them does not.", hint="Give views of one lazy tensor for both.")


def _memory_of(tensor: Any) -> Any:
    return tensor._value.slot.storage if isinstance(tensor, LazyTensor) else id(tensor)


def _layout_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], int]:
    if isinstance(tensor, LazyTensor):
        spec = tensor._value.spec
        return spec.stride, spec.storage_offset
    return tensor.stride(), int(tensor.storage_offset())


def arrived(session: Session, given: torch.Tensor, value: Outside) -> torch.Tensor:
    """Move a tensor to the executor."""
    if value.maker and value.is_written:
        # The graph goes on to change it, as it changed the result of the factory.
        return laid_out_as(given.detach().clone() if isinstance(given, LazyTensor) else session.upload(given.detach()),
                           value.spec)
    if not isinstance(given, LazyTensor):
        given = session.upload(given.detach()) if value.is_written else session.mixer.upload(given)
    return laid_out_as(given, value.spec)


def laid_out_as(given: torch.Tensor, spec: TensorSpec | None) -> torch.Tensor:
    """Copy a tensor into the memory layout of the graph's value, because operations may access its storage."""
    if spec is None or spec.numel == 0 or _layout_of(given) == (spec.stride, spec.storage_offset):
        return given
    reach = sum((extent - 1) * step for extent, step in zip(spec.size, spec.stride, strict=True))
    base = torch.empty(spec.storage_offset + reach + 1, dtype=spec.dtype, device=given.device)
    # In an expanded dimension, all positions share one memory location.
    narrow = tuple(slice(0, 1) if step == 0 else slice(None) for step in spec.stride)
    made = base.as_strided(spec.size, spec.stride, spec.storage_offset)
    made[narrow].copy_(given[narrow])
    return made

"""Plans of graphs on remote tensors: what to submit, and how to make the results, without recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import torch
from torch.overrides import TorchFunctionMode

from djinn.ir.value import Slot, Value
from djinn.record.tensor import LazyTensor, wrap
from djinn_dynamo.recording import is_repeatable, listen, storages_written
from djinn_dynamo.results import Constant
from djinn_dynamo.segments import Segment, make_piece

if TYPE_CHECKING:
    from djinn.ir.spec import TensorSpec
    from djinn.ir.tape import Node
    from djinn.session.session import Session

_FROM_NUMBERS = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor})
"""Functions that upload a constant, if they are called without tensors."""


@attrs.frozen
class Same:
    """A result that is an operand of the call itself."""

    index: int


@attrs.frozen
class Alias:
    """A result that is a view of an operand."""

    index: int
    spec: TensorSpec


@attrs.frozen
class Made:
    """A new tensor.

    Attributes:
        position: Its position among the values of the program that are kept.
        owner: Position of the value whose storage it shares; its own, if it shares none.
        spec: Its metadata.
    """

    position: int
    owner: int
    spec: TensorSpec


Form: TypeAlias = Same | Alias | Made | Constant


@attrs.frozen(eq=False)
class RemotePlan:
    """A recorded call, prepared for repetition.

    Attributes:
        segment: What to submit.
        reads: Positions, among the operands and then the constants, of the values that it reads.
        constants: Tensors that the graph made from numbers.
        written: Positions of the operands that it writes.
        forms: The results.
    """

    segment: Segment
    reads: tuple[int, ...]
    constants: list[LazyTensor]
    written: tuple[int, ...]
    forms: list[Form]

    @property
    def length(self) -> int:
        """How many operations it submits."""
        return self.segment.length

    def run(self, session: Session, operands: Sequence[LazyTensor]) -> list[Any]:
        """Submit the program for other operands, and return the results."""
        handles = [operand._value.slot.number for operand in operands]
        handles += [constant._value.slot.number for constant in self.constants]
        given = self.segment.run(session, [handles[position] for position in self.reads])
        for position in self.written:
            _count_write(operands[position])
        released = session.recorder.released
        made: dict[int, LazyTensor] = {}
        results: list[Any] = []
        for form in self.forms:
            if type(form) is Made:
                position = form.position
                tensor = made.get(position)
                if tensor is None:
                    slot = Slot(given[position], given[form.owner])
                    tensor = made[position] = wrap(form.spec, Value(slot, form.spec, released))
                results.append(tensor)
            else:
                results.append(_given_back(form, operands))
        return results


def _given_back(form: Form, operands: Sequence[LazyTensor]) -> Any:
    if isinstance(form, Constant):
        return form.value
    if isinstance(form, Same):
        return operands[form.index]
    assert isinstance(form, Alias)
    spec = form.spec
    return operands[form.index].as_strided(spec.size, spec.stride, spec.storage_offset)


def _count_write(tensor: torch.Tensor) -> None:
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def record_remotely(
    session: Session, run: Callable[[], Sequence[Any]], operands: Sequence[LazyTensor]
) -> tuple[Sequence[Any], RemotePlan | None]:
    """Run a graph once, operation by operation.

    Returns:
        Its results; and the plan for further calls, or ``None`` if each call has to be recorded.
    """
    before = [_state(operand) for operand in operands]
    # A cast that is cached from before would be missing in the recording.
    torch.clear_autocast_cache()
    constants = _Constants()
    with constants:
        returned, nodes = listen(session, run)
    if [_state(operand) for operand in operands] != before:
        # An operand has another size or storage than it had.
        return returned, None
    return returned, _plan(session, returned, nodes, operands, constants.made)


def _state(operand: LazyTensor) -> tuple[TensorSpec, Slot, int]:
    value = operand._value
    return value.spec, value.slot, value.slot.storage


def _plan(
    session: Session, returned: Sequence[Any], nodes: list[Node], operands: Sequence[LazyTensor], made: list[LazyTensor]
) -> RemotePlan | None:
    produced = {slot: None for node in nodes for slot in node.outputs}
    slots = [operand._value.slot for operand in operands]
    places = {slot: index for index, slot in enumerate(slots)}
    storages = {slot.storage: index for index, slot in enumerate(slots)}
    constants = [tensor for tensor in made if tensor._value.slot not in produced]
    written = [storages[storage] for storage in storages_written(nodes) if storage in storages]
    if len(places) < len(slots) or (written and len(storages) < len(slots)):
        # Operands that share memory may be written in another order than they are used in.
        return None
    sorted_out = _forms(returned, operands, produced, storages)
    if sorted_out is None:
        return None
    forms, kept = sorted_out
    segment = make_piece(session, nodes, kept)
    if not is_repeatable(session, nodes, segment, set(slots), constants):
        return None
    places.update((tensor._value.slot, len(slots) + index) for index, tensor in enumerate(constants))
    positions = {slot: position for position, slot in enumerate(segment.gives)}
    owners: dict[int, int] = {}
    final: list[Form] = []
    for form in forms:
        if isinstance(form, tuple):
            slot, spec = form
            position = positions[slot]
            final.append(Made(position, owners.setdefault(slot.storage, position), spec))
        else:
            final.append(form)
    return RemotePlan(segment, tuple(places[slot] for slot in segment.reads), constants, tuple(written), final)


def _forms(
    returned: Sequence[Any], operands: Sequence[LazyTensor], produced: dict[Slot, None], storages: dict[int, int]
) -> tuple[list[Form | tuple[Slot, TensorSpec]], list[Slot]] | None:
    """Sort the results; ``None`` if one of them cannot be made anew."""
    indices = {id(operand): index for index, operand in enumerate(operands)}
    forms: list[Form | tuple[Slot, TensorSpec]] = []
    kept: dict[Slot, None] = {}
    for result in returned:
        if not isinstance(result, torch.Tensor):
            forms.append(Constant(result))
        elif id(result) in indices:
            forms.append(Same(indices[id(result)]))
        elif type(result) is not LazyTensor or result.is_conj() or result.is_neg() or result.requires_grad:
            return None
        else:
            slot, spec = result._value.slot, result._value.spec
            base = storages.get(slot.storage)
            if base is not None and operands[base].dtype == spec.dtype:
                forms.append(Alias(base, spec))
            elif base is not None or slot not in produced:
                return None
            else:
                kept[slot] = None
                forms.append((slot, spec))
    return forms, list(kept)


class _Constants(TorchFunctionMode):
    """Collects the tensors that functions make from numbers."""

    def __init__(self) -> None:
        self.made: list[LazyTensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _FROM_NUMBERS and isinstance(result, LazyTensor) and not isinstance(args[0], torch.Tensor):
            self.made.append(result)
        return result

"""Plans of graphs on remote tensors: what to submit, and how to make the results, without recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import torch
from torch.overrides import TorchFunctionMode

from djinn.ir.value import Slot, Value
from djinn.record.tensor import LazyTensor, wrap
from djinn_plugins.device.dynamo.recording import is_repeatable, listen, storages_written
from djinn_plugins.device.dynamo.results import Constant
from djinn_plugins.device.dynamo.segments import Segment, make_piece

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
        owner: Position of the value whose storage it shares; its own, if it shares none. Operands and then constants
            are counted from -1 downwards.
        spec: Its metadata.
    """

    position: int
    owner: int
    spec: TensorSpec


Form: TypeAlias = Same | Alias | Made | Constant


@attrs.frozen
class Saved:
    """A value that the backward pass may need.

    Attributes:
        position: Its position among the values of the program that are kept; or, counted from -1 downwards, among the
            operands and then the constants.
        owner: In the same way, the value whose storage it shares.
        spec: Its metadata.
    """

    position: int
    owner: int
    spec: TensorSpec


@attrs.frozen(eq=False)
class RemotePlan:
    """A recorded call, prepared for repetition.

    Attributes:
        segment: What to submit.
        reads: Positions, among the operands and then the constants, of the values that it reads.
        constants: Tensors that the graph made from numbers.
        written: Positions of the operands that it writes.
        counted: Positions of the operands whose version it increases, once for each time.
        forms: The results.
        saved: The values that autograd saved.
        kept: Position, owner and metadata of each value that is kept.
    """

    segment: Segment
    reads: tuple[int, ...]
    constants: list[LazyTensor]
    written: tuple[int, ...]
    counted: tuple[int, ...]
    forms: list[Form]
    saved: tuple[Saved, ...]
    kept: tuple[tuple[int, int, TensorSpec], ...] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        found = {form.position: (form.position, form.owner, form.spec) for form in (*self.forms, *self.saved)
                 if isinstance(form, (Made, Saved)) and form.position >= 0}
        object.__setattr__(self, "kept", tuple(found.values()))

    @property
    def weight(self) -> int:
        """How many operations take as much memory."""
        return self.segment.weight

    def run(self, session: Session, operands: Sequence[LazyTensor]) -> list[Any]:
        """Submit the program for other operands, and return the results."""
        values = self.values(session, operands, self.submit(session, operands))
        return self.results(operands, {position: wrap(value.spec, value) for position, value in values.items()})

    def submit(self, session: Session, operands: Sequence[LazyTensor]) -> list[int]:
        """Submit the program for other operands; the caller releases the handles that this returns."""
        handles = [operand._value.slot.number for operand in operands]
        handles += [constant._value.slot.number for constant in self.constants]
        given = self.segment.run(session, [handles[position] for position in self.reads])
        for position in self.counted:
            _count_write(operands[position])
        return given

    def values(self, session: Session, operands: Sequence[LazyTensor], given: Sequence[int]) -> dict[int, Value]:
        """Return the values that the program keeps, by position."""
        released = session.recorder.released
        made: dict[int, Value] = {}
        for position, owner, spec in self.kept:
            storage = given[owner] if owner >= 0 else self._source(operands, owner).storage
            made[position] = Value(Slot(given[position], storage), spec, released)
        return made

    def _source(self, operands: Sequence[LazyTensor], position: int) -> Slot:
        index = ~position
        tensor = operands[index] if index < len(operands) else self.constants[index - len(operands)]
        return tensor._value.slot

    def values_saved(self, operands: Sequence[LazyTensor], values: dict[int, Value]) -> list[Value]:
        """Return the values that the backward pass may need."""
        sources = [*operands, *self.constants]
        return [values[form.position] if form.position >= 0 else sources[~form.position]._value for form in self.saved]

    def results(self, operands: Sequence[LazyTensor], made: dict[int, LazyTensor]) -> list[Any]:
        """Return the results, of which the new tensors are given by their positions."""
        return [made[form.position] if type(form) is Made else _given_back(form, operands) for form in self.forms]


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
    before = [state_of(operand) for operand in operands]
    # A cast that is cached from before would be missing in the recording.
    torch.clear_autocast_cache()
    call = recorded(session, run, operands)
    if [state_of(operand) for operand in operands] != before:
        # An operand has another size or storage than it had.
        return call.returned, None
    plan = make_plan(session, call, operands)
    return call.returned, plan if plan is not None and may_run_again(session, plan, call, operands) else None


@attrs.frozen
class GraphRecording:
    """A recorded call of a graph.

    Attributes:
        returned: Its results.
        nodes: The nodes that it recorded.
        constants: The tensors that it made from numbers.
        counted: Positions of the operands whose version it increased, once for each time.
    """

    returned: Sequence[Any]
    nodes: list[Node]
    constants: list[LazyTensor]
    counted: tuple[int, ...]


def recorded(session: Session, run: Callable[[], Sequence[Any]], operands: Sequence[LazyTensor]) -> GraphRecording:
    """Run a graph and record it."""
    constants, before = _Constants(), _versions(operands)
    with constants:
        returned, nodes = listen(session, run)
    produced = {slot for node in nodes for slot in node.outputs}
    made = [tensor for tensor in constants.made if tensor._value.slot not in produced]
    times = zip(_versions(operands), before, strict=True)
    counted = tuple(index for index, (now, then) in enumerate(times) for _ in range(now - then))
    return GraphRecording(returned, nodes, made, counted)


def _versions(operands: Sequence[LazyTensor]) -> list[int]:
    with torch._C.DisableTorchFunctionSubclass():
        return [0 if operand.is_inference() else operand._version for operand in operands]


def state_of(operand: LazyTensor) -> tuple[TensorSpec, Slot, int]:
    """Return the properties that a repeated call leaves in an operand."""
    value = operand._value
    return value.spec, value.slot, value.slot.storage


def may_run_again(session: Session, plan: RemotePlan, call: GraphRecording, operands: Sequence[LazyTensor]) -> bool:
    """Whether other operands give the same nodes."""
    known = {operand._value.slot for operand in operands}
    return is_repeatable(session, call.nodes, plan.segment, known, plan.constants)


def make_plan(
    session: Session, call: GraphRecording, operands: Sequence[LazyTensor], saved: Sequence[LazyTensor] | None = None
) -> RemotePlan | None:
    """Prepare a recorded call for repetition.

    Args:
        session: The session.
        call: The call.
        operands: Its operands.
        saved: The tensors that autograd saved; ``None`` if results must not have gradients.

    Returns:
        The plan; ``None`` if a result, or a saved value, cannot be made for another call.
    """
    nodes, constants = call.nodes, call.constants
    produced = {slot: None for node in nodes for slot in node.outputs}
    slots = [operand._value.slot for operand in operands] + [tensor._value.slot for tensor in constants]
    places = {slot: index for index, slot in enumerate(slots)}
    storages = {slot.storage: index for index, slot in enumerate(slots)}
    written = [storages[storage] for storage in storages_written(nodes) if storage in storages]
    if len(places) < len(slots) or (written and len(storages) < len(slots)):
        # Operands that share memory may be written in another order than they are used in.
        return None
    sorted_out = _forms(call.returned, operands, produced, has_gradients=saved is not None)
    if sorted_out is None:
        return None
    forms, kept = sorted_out
    packed = [(tensor._value.slot, tensor._value.spec) for tensor in saved or ()]
    if not all(slot in produced or slot in places for slot, _ in packed):
        return None
    segment = make_piece(session, nodes, [*kept, *(slot for slot, _ in packed if slot in produced)])
    positions = {slot: position for position, slot in enumerate(segment.gives)}
    owners = {storage: ~index for storage, index in storages.items()}
    final: list[Form] = []
    for form in forms:
        if isinstance(form, tuple):
            slot, spec = form
            position = positions[slot]
            final.append(Made(position, owners.setdefault(slot.storage, position), spec))
        else:
            final.append(form)
    held = tuple(
        Saved(positions[slot], owners.setdefault(slot.storage, positions[slot]), spec) if slot in produced
        else Saved(~places[slot], ~places[slot], spec) for slot, spec in packed)
    if not set(segment.reads) <= places.keys():
        return None
    reads = tuple(places[slot] for slot in segment.reads)
    return RemotePlan(segment, reads, constants, tuple(written), call.counted, final, held)


def _forms(
    returned: Sequence[Any], operands: Sequence[LazyTensor], produced: dict[Slot, None], *, has_gradients: bool
) -> tuple[list[Form | tuple[Slot, TensorSpec]], list[Slot]] | None:
    """Sort the results; ``None`` if one of them cannot be made anew."""
    indices = {id(operand): index for index, operand in enumerate(operands)}
    storages = {operand._value.slot.storage: index for index, operand in enumerate(operands)}
    forms: list[Form | tuple[Slot, TensorSpec]] = []
    kept: dict[Slot, None] = {}
    families: dict[int, set[int]] = {}
    for result in returned:
        if not isinstance(result, torch.Tensor):
            forms.append(Constant(result))
        elif id(result) in indices:
            forms.append(Same(indices[id(result)]))
        elif type(result) is not LazyTensor or result.is_conj() or result.is_neg():
            return None
        else:
            slot, spec = result._value.slot, result._value.spec
            base = storages.get(slot.storage)
            if result.requires_grad and not (has_gradients and base is None):
                return None
            if base is not None and operands[base].dtype == spec.dtype and not (
                    has_gradients and operands[base].requires_grad):
                forms.append(Alias(base, spec))
            elif base is not None or slot not in produced:
                return None
            else:
                kept[slot] = None
                forms.append((slot, spec))
                families.setdefault(slot.storage, set()).add(id(result))
                if has_gradients and len(families[slot.storage]) > 1:
                    # Autograd forbids writes to results of one function that share memory.
                    return None
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

"""Plans: recorded calls prepared for repetition, including the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import torch

from djinn.ir.value import Slot, Value
from djinn.record.tensor import LazyTensor, wrap
from djinn.wire.tensors import is_dense
from djinn_plugins.device.dynamo.recording import RecordedGraphCall, is_repeatable, listen
from djinn_plugins.device.dynamo.segments import Segment, make_piece

if TYPE_CHECKING:
    from djinn.ir.spec import TensorSpec
    from djinn.session.session import Session


@attrs.frozen(eq=False)
class _Backward:
    """The backward pass of a plan.

    Attributes:
        piece: Its piece.
        saved: The slots of the forward pass that it needs.
        operands: The slots of operands and constants that it needs.
        incoming: The slot of each incoming gradient.
        given: Slot and metadata of each gradient; ``None`` for an operand without one.
    """

    piece: Segment
    saved: list[Slot]
    operands: list[Slot]
    incoming: list[Slot]
    given: list[tuple[Slot, TensorSpec] | None]


@attrs.frozen(eq=False)
class RecordingPlan:
    """The repeatable part of a recording; holds none of its values.

    Attributes:
        forward: The forward pass.
        backward: The backward pass, if some results have gradients.
        operands: The slots of the operands, then those of `constants`.
        constants: Tensors that the graph made from numbers it contains.
        reads: The values that the forward pass reads, by position among the operands.
        wanted: All values to download: metadata, and position among the results of the forward pass, or among the
            operands, counted from -1 downwards.
        kept: Other results of the forward pass that the backward pass needs: slot and position.
    """

    forward: Segment
    backward: _Backward | None
    operands: list[Slot]
    constants: list[LazyTensor]
    reads: list[int]
    wanted: list[tuple[TensorSpec, int]]
    kept: list[tuple[Slot, int]]


class _Claims:
    """Keeps values alive for the backward pass."""

    def __init__(self, session: Session, handles: dict[Slot, int]) -> None:
        self.handles = handles
        self._released = session.released

    def __del__(self) -> None:
        self._released.extend(self.handles.values())


class PlannedCall:
    """One repetition of a recording."""

    def __init__(self, session: Session, plan: RecordingPlan, lazy: Sequence[LazyTensor], handles: list[int]) -> None:
        self._session = session
        self._plan = plan
        self._lazy = [*lazy, *plan.constants]
        self._handles = handles + [tensor._value.slot.number for tensor in plan.constants]
        self._known: dict[Slot, LazyTensor] = {}
        self._claims: _Claims | None = None

    def fetch(self) -> list[torch.Tensor]:
        """Run the forward pass and download its results, in one round trip."""
        plan, session, lazy, handles = self._plan, self._session, self._lazy, self._handles
        with session.lock:
            given = plan.forward.run(session, [handles[position] for position in plan.reads])
            self._claims = _Claims(session, {slot: given[position] for slot, position in plan.kept})
            wanted = [_owned(session, spec, given[position]) if position >= 0 else lazy[-1 - position]
                      for spec, position in plan.wanted]
            home = session.materialize(wanted)
        if plan.backward is not None:
            known = dict(zip(plan.operands, lazy, strict=True))
            known.update((plan.forward.gives[position], tensor)
                         for tensor, (_, position) in zip(wanted, plan.wanted, strict=True) if position >= 0)
            needed = {*plan.backward.operands, *plan.backward.saved}
            self._known = {slot: tensor for slot, tensor in known.items() if slot in needed}
        return home

    def backward(self, incoming: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Run the backward pass and download the gradients, in one round trip."""
        session, plan = self._session, self._plan.backward
        assert plan is not None
        assert self._claims is not None
        piece = plan.piece
        with session.lock:
            uploaded = [session.upload(gradient) for gradient in incoming]
            known = {**self._known, **dict(zip(plan.incoming, uploaded, strict=True))}
            handles = {**self._claims.handles, **{slot: tensor._value.slot.number for slot, tensor in known.items()}}
            given = piece.run(session, [handles[slot] for slot in piece.reads])
            specs = dict(filter(None, plan.given))
            known |= {slot: _owned(session, specs[slot], handle)
                      for slot, handle in zip(piece.gives, given, strict=True)}
            home = iter(session.materialize([known[pair[0]] for pair in plan.given if pair is not None]))
        return [None if pair is None else next(home) for pair in plan.given]


def make_plan(recording: RecordedGraphCall, slots: Sequence[Slot]) -> RecordingPlan | None:
    """Prepare a recording for repetition.

    Args:
        recording: The recording. Its backward pass is recorded here, with zero gradients, and is executed only if it
            writes.
        slots: The slots of the operands' remote copies.

    Returns:
        The plan; ``None`` if each call must be recorded separately, because the operations depend on data.
    """
    operands = list(slots)
    wanted = [(tensor._value.spec, tensor._value.slot) for tensor in recording.results.wanted]
    backward, saved = None, set[Slot]()
    if recording.differentiable:
        backward = _plan_backward(recording, operands)
        if backward is None:
            return None
        saved = set(backward.saved)
    forward = make_piece(recording.session, recording.nodes, saved.union(slot for _, slot in wanted))
    constants = recording.constants
    if not is_repeatable(recording.session, recording.nodes, forward, set(operands), constants):
        return None
    operands += [tensor._value.slot for tensor in constants]
    positions = {slot: position for position, slot in enumerate(operands)}
    gives = {slot: position for position, slot in enumerate(forward.gives)}
    outside = {slot for _, slot in wanted}
    return RecordingPlan(
        forward, backward, operands, constants, [positions[slot] for slot in forward.reads],
        wanted=[(spec, gives[slot] if slot in gives else -1 - positions[slot]) for spec, slot in wanted],
        kept=[(slot, position) for slot, position in gives.items() if slot not in outside],
    )


def _plan_backward(recording: RecordedGraphCall, operands: list[Slot]) -> _Backward | None:
    session = recording.session
    outputs = [recording.results.wanted[position] for position in recording.differentiable]
    with torch.inference_mode(mode=False):
        zeros = [session.upload(like_result(tensor._value.spec, torch.zeros(tensor.shape, dtype=tensor.dtype,
                                                                             device="cpu"))) for tensor in outputs]
    gradients, nodes = listen(session, lambda: recording.gradients(zeros))
    given = [None if gradient is None else (gradient._value.slot, gradient._value.spec) for gradient in gradients]
    piece = make_piece(session, nodes, [pair[0] for pair in given if pair is not None])
    incoming = [tensor._value.slot for tensor in zeros]
    produced = {slot for node in recording.nodes for slot in node.outputs}
    known = {*operands, *incoming, *produced}
    passed_on = {pair[0] for pair in given if pair is not None} - set(piece.gives)
    if not passed_on <= set(incoming) or not is_repeatable(session, nodes, piece, known, recording.constants):
        return None
    return _Backward(piece, [slot for slot in piece.reads if slot in produced],
                     [slot for slot in piece.reads if slot not in produced], incoming, given)


def like_result(spec: TensorSpec, tensor: torch.Tensor) -> torch.Tensor:
    """Convert a tensor to a result's layout, for which the backward pass was recorded; sparse tensors become dense."""
    if not is_dense(tuple(spec.size), spec.stride):
        return tensor.contiguous()
    return tensor if tensor.stride() == spec.stride else torch.empty_strided(
        spec.size, spec.stride, dtype=tensor.dtype, device="cpu").copy_(tensor)


def _owned(session: Session, spec: TensorSpec, handle: int) -> LazyTensor:
    return wrap(spec, Value(Slot(handle, handle), spec, session.recorder.released))

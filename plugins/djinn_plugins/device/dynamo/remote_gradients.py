"""Captured graphs on remote tensors with gradients: forward and backward pass as known programs.

The backward pass is the one of PyTorch's own autograd: a template keeps its nodes, and each further call submits the
operations again that they recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import torch

from djinn.ir.value import Slot, Value
from djinn.record import devices
from djinn.record.tensor import LazyTensor, wrap
from djinn_plugins.device.dynamo.autograd_templates import MODIFIED, AutogradTemplate, is_plain_autograd
from djinn_plugins.device.dynamo.recording import listen, storages_written
from djinn_plugins.device.dynamo.remote_plans import RemotePlan, make_plan, may_run_again, recorded, state_of
from djinn_plugins.device.dynamo.segments import Segment, can_be_repeated, make_piece

if TYPE_CHECKING:
    from djinn.ir.spec import TensorSpec
    from djinn.ir.tape import Node
    from djinn.session.session import Session

Gradients: TypeAlias = Sequence[LazyTensor | None]
_plainly = torch._C.DisableTorchFunctionSubclass

_TWICE = """Trying to backward through the graph a second time (or directly access saved tensors after they have \
already been freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). \
Specify retain_graph=True if you need to backward through the graph a second time or if you need to access saved \
tensors after calling backward."""
_DOUBLE = """A graph of torch.compile has no gradient of its gradient with the backend djinn. Call the model \
uncompiled where create_graph is used."""
MAX_BACKWARDS = 16
"""Backward passes that a template keeps, one per set of incoming gradients."""


def look(
    session: Session, run: Callable[[], Sequence[Any]], operands: Sequence[LazyTensor]
) -> tuple[Sequence[Any], bool]:
    """Run a graph once as it is.

    Returns:
        Its results; and whether a template may be made of a further call.
    """
    before = [(state_of(operand), operand.requires_grad) for operand in operands]
    call = recorded(session, run, operands)
    if before != [(state_of(operand), operand.requires_grad) for operand in operands]:
        return call.returned, False
    trained = {operand._value.slot.storage for operand in operands if operand.requires_grad}
    plan = make_plan(session, call, operands, saved=())
    return call.returned, (
        plan is not None
        and not storages_written(call.nodes) & trained
        and may_run_again(session, plan, call, operands)
        and AutogradTemplate().prepare(*_ends(call.returned, operands))
    )


def _ends(
    returned: Sequence[Any], operands: Sequence[LazyTensor]
) -> tuple[list[LazyTensor], list[LazyTensor]]:
    """Return the results and the operands between which autograd has nodes."""
    given = {id(operand) for operand in operands}
    results = {id(result): result for result in returned
               if isinstance(result, LazyTensor) and result.requires_grad and id(result) not in given}
    return list(results.values()), [operand for operand in operands if operand.requires_grad]


@attrs.frozen
class _Given:
    """A gradient that the backward pass computes.

    Attributes:
        position: Its position among the values that the program gives.
        owner: Position of the value whose storage it shares; or, counted from -1 downwards, of a value that was read.
        spec: Its metadata.
    """

    position: int
    owner: int
    spec: TensorSpec


@attrs.frozen(eq=False)
class BackwardPlan:
    """A recorded backward pass, prepared for repetition.

    Attributes:
        segment: What to submit.
        reads: Positions, among the saved values and then the incoming gradients, of the values that it reads.
        outcomes: The gradients; a number stands for an incoming gradient that is passed on.
    """

    segment: Segment
    reads: tuple[int, ...]
    outcomes: tuple[_Given | int | None, ...]

    def run(self, session: Session, values: Sequence[Value], incoming: Sequence[LazyTensor]) -> Gradients:
        """Submit the program for other values, and return the gradients."""
        sources = [value.slot for value in values] + [gradient._value.slot for gradient in incoming]
        given = self.segment.run(session, [sources[position].number for position in self.reads])
        released = session.recorder.released
        made: dict[int, LazyTensor] = {}
        for form in self.outcomes:
            if isinstance(form, _Given) and form.position not in made:
                storage = given[form.owner] if form.owner >= 0 else sources[~form.owner].storage
                value = Value(Slot(given[form.position], storage), form.spec, released)
                made[form.position] = wrap(form.spec, value)
        return [made[form.position] if isinstance(form, _Given) else None if form is None else incoming[form]
                for form in self.outcomes]


@attrs.frozen(eq=False)
class TrainedCall:
    """One call, until its backward pass.

    Attributes:
        session: The session.
        plan: The plan that it repeats.
        values: The saved values.
        guarded: Operands that must not be written before the backward pass, with their versions.
    """

    session: Session
    plan: TrainedPlan
    values: list[Value]
    guarded: Sequence[tuple[torch.Tensor, int]]

    def backward(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """Submit the backward pass, or record it."""
        with _plainly():
            for operand, version in self.guarded:
                if operand._version != version:
                    raise RuntimeError(MODIFIED.format(shape=list(operand.shape)))
        session, template = self.session, self.plan.template
        if not any(gradient is not None for gradient in gradients):
            return [None] * len(self.plan.inputs)
        incoming = [gradient for gradient in gradients if gradient is not None]
        if not self._may_repeat(incoming):
            return template.differentiate(self.values, gradients)
        device = devices.logical_device().type
        key = (session.switches, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device),
               torch.is_inference_mode_enabled(),
               *[None if gradient is None else gradient._value.spec for gradient in gradients])
        with session.lock:
            if key not in template.backwards:
                differentiated, nodes = listen(session, lambda: template.differentiate(self.values, gradients))
                found: Sequence[Any] = differentiated
                if len(template.backwards) >= MAX_BACKWARDS:
                    template.backwards.clear()
                template.backwards[key] = self._prepared(found, nodes, incoming)
                return found
            plan = template.backwards[key]
            if plan is None:
                return template.differentiate(self.values, gradients)
            return plan.run(session, self.values, incoming)

    def _may_repeat(self, incoming: Sequence[Any]) -> bool:
        return (
            {*map(type, incoming)} == {LazyTensor}
            and not any(gradient.is_conj() or gradient.is_neg() for gradient in incoming)
            and is_plain_autograd()
            and not torch._C._len_torch_dispatch_stack()
            and self.session.recorder.append == self.session.tape.nodes.append
        )

    def _prepared(
        self, found: Sequence[Any], nodes: Sequence[Node], incoming: Sequence[LazyTensor]
    ) -> BackwardPlan | None:
        """Prepare a recorded backward pass for repetition; ``None`` if each has to be recorded."""
        first = len(self.values)
        values = [value.slot for value in self.values]
        sources: dict[Slot, int] = {}
        for position, slot in enumerate(values):
            sources.setdefault(slot, position)
        arriving = {gradient._value.slot: first + index for index, gradient in enumerate(incoming)}
        storages = {slot.storage: ~position for slot, position in {**sources, **arriving}.items()}
        if len(arriving) < len(incoming) or not arriving.keys().isdisjoint(sources):
            # Whether a value is a gradient or a saved one may be otherwise in another call.
            return None
        sources |= arriving
        produced = {slot for node in nodes for slot in node.outputs}
        if not all(gradient is None or type(gradient) is LazyTensor for gradient in found):
            return None
        given = [gradient._value.slot for gradient in found
                 if gradient is not None and gradient._value.slot in produced]
        segment = make_piece(self.session, nodes, given)
        if (
            not set(segment.reads) <= sources.keys()
            or storages_written(nodes) & storages.keys()
            or not can_be_repeated(self.session, nodes)
        ):
            return None
        gives = {slot: position for position, slot in enumerate(segment.gives)}
        outcomes: list[_Given | int | None] = []
        for gradient in found:
            if gradient is None:
                outcomes.append(None)
                continue
            slot = gradient._value.slot
            if slot in arriving:
                outcomes.append(arriving[slot] - first)
            elif slot not in produced or gradient.is_conj() or gradient.is_neg():
                return None
            else:
                owner = storages.setdefault(slot.storage, gives[slot])
                outcomes.append(_Given(gives[slot], owner, gradient._value.spec))
        return BackwardPlan(segment, tuple(sources[slot] for slot in segment.reads), tuple(outcomes))


@attrs.frozen(eq=False)
class TrainedPlan:
    """A recorded call with gradients, prepared for repetition.

    Attributes:
        forward: The forward pass.
        template: The autograd nodes.
        inputs: Positions of the operands that receive gradients.
        guarded: Positions of the operands that were saved.
        kept: Positions, among the values of the program that are kept, of the results with gradients.
        saved_results: Those of them whose memory was saved.
    """

    forward: RemotePlan
    template: AutogradTemplate
    inputs: tuple[int, ...]
    guarded: tuple[int, ...]
    kept: tuple[int, ...]
    saved_results: tuple[int, ...]

    @property
    def weight(self) -> int:
        """How many operations take as much memory as its forward pass."""
        return self.forward.weight

    @property
    def written(self) -> tuple[int, ...]:
        """Positions of the operands that it writes."""
        return self.forward.written

    def run(self, session: Session, operands: Sequence[LazyTensor]) -> list[Any]:
        """Submit the forward pass for other operands, and return the results."""
        forward = self.forward
        values = forward.values(session, operands, forward.submit(session, operands))
        return self.connected(session, operands, values, forward.values_saved(operands, values))

    def connected(
        self, session: Session, operands: Sequence[LazyTensor], values: dict[int, Value], saved: list[Value]
    ) -> list[Any]:
        """Make the results of a call, with one autograd node for all of them."""
        with _plainly():
            guarded = [(operands[index], operands[index]._version) for index in self.guarded]
        call = TrainedCall(session, self, saved, guarded)
        inputs = [operands[index] for index in self.inputs]
        made: tuple[Any, ...] = _Call.apply(call, values, *inputs) if self.kept else ()  # type: ignore[no-untyped-call]  # untyped there
        tensors = dict(zip(self.kept, made, strict=True))
        tensors |= {position: wrap(value.spec, value) for position, value in values.items() if position not in tensors}
        return self.forward.results(operands, tensors)


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: TrainedCall, values: dict[int, Value], *_: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call = call
        plan = call.plan
        made = {position: wrap(values[position].spec, values[position]) for position in plan.kept}
        ctx.save_for_backward(*[made[position] for position in plan.saved_results])
        return tuple(made.values())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        call = ctx.call
        if call is None:
            raise RuntimeError(_TWICE)
        if call.plan.saved_results:
            # Only for the check: this raises if a result has been written since.
            _ = ctx.saved_tensors
        with torch.no_grad():
            found = call.backward([None if item is None else item.detach() if item.requires_grad else item
                                   for item in gradients])
        if call.values and not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.call = None
        if torch.is_grad_enabled():
            # With `create_graph`. Without this, gradients of gradients would be silently incomplete.
            found = _Once.apply(torch.empty(0, device="cpu", requires_grad=True), *found)  # type: ignore[no-untyped-call]  # untyped there
        return (None, None, *found)


class _Once(torch.autograd.Function):
    """Refuses gradients of gradients, when the program asks for one."""

    @staticmethod
    def forward(_: Any, __: torch.Tensor, *gradients: Any) -> Any:
        return tuple(None if item is None else item.detach() for item in gradients)

    @staticmethod
    def backward(_: Any, *__: Any) -> Any:
        raise RuntimeError(_DOUBLE)


def record_trained(
    session: Session, run: Callable[[Sequence[LazyTensor]], Sequence[Any]], operands: Sequence[LazyTensor]
) -> tuple[Sequence[Any], TrainedPlan | None]:
    """Run a graph once, operation by operation, and keep the autograd nodes.

    Args:
        session: The session.
        run: Runs the graph with other tensors in place of the operands.
        operands: The operands, which `look` has seen.

    Returns:
        Its results; and the plan for further calls, or ``None`` if each call has to be recorded.
    """
    template = AutogradTemplate()
    leaves = [_leaf_like(operand) if operand.requires_grad else operand for operand in operands]
    with template.recording():
        recording = recorded(session, lambda: run(leaves), leaves)
    packed = template.packed
    forward = make_plan(session, recording, leaves, packed)
    roots, trained = _ends(recording.returned, leaves)
    if forward is None or not template.prepare(roots, trained):
        raise RuntimeError("A graph of torch.compile has other results in its second call than in its first one.")
    produced = {slot: position for position, slot in enumerate(forward.segment.gives)}
    kept = [produced[root._value.slot] for root in roots]
    storages = {tensor._value.slot.storage for tensor in packed}
    indices = [index for index, operand in enumerate(operands) if operand.requires_grad]
    plan = TrainedPlan(
        forward, template, inputs=tuple(indices[place] for place in template.inputs),
        guarded=tuple(index for index, leaf in enumerate(leaves) if leaf._value.slot.storage in storages),
        kept=tuple(kept),
        saved_results=tuple(place for root, place in zip(roots, kept, strict=True)
                            if root._value.slot.storage in storages))
    tensors = [tensor for tensor in (*recording.returned, *packed) if isinstance(tensor, LazyTensor)]
    values = {produced[tensor._value.slot]: tensor._value for tensor in tensors if tensor._value.slot in produced}
    saved = [tensor._value for tensor in packed]
    is_repeatable = may_run_again(session, forward, recording, leaves)
    template.keep(trained)
    return plan.connected(session, operands, values, saved), plan if is_repeatable else None


def _leaf_like(operand: LazyTensor) -> LazyTensor:
    """Stand for an operand in a template."""
    return wrap(operand._value.spec, operand._value).requires_grad_()  # type: ignore[return-value]  # stays lazy

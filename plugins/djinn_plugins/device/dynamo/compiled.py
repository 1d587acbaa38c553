"""A captured graph that runs remotely when it is called."""

from __future__ import annotations

import logging
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from djinn.session import runtime
from djinn.wire.tensors import is_dense
from djinn_plugins.device.dynamo.bridge import Crossing, GraphCall, fetch
from djinn_plugins.device.dynamo.plans import PlannedCall, RecordingPlan, make_plan
from djinn_plugins.device.dynamo.recording import RecordedGraphCall, record
from djinn_plugins.device.dynamo.results import Results
from djinn_plugins.device.dynamo.weights import RemoteWeights, check

if TYPE_CHECKING:
    from djinn.record.tensor import LazyTensor
    from djinn.session.session import Session

log = logging.getLogger("djinn.dynamo")

MAX_PLANS = 32
"""Plans that a compiled graph keeps, one per metadata of its operands; the least recently used is dropped first."""


@attrs.frozen(eq=False)
class _Known:
    """The state kept from the first call with some metadata."""

    plan: RecordingPlan | None
    results: Results
    written: dict[int, int]
    crossing: Crossing
    runs_here: bool


@attrs.frozen
class _Sorts:
    """Indices of arguments by kind, which never change, because Dynamo has made the graph for them.

    Attributes:
        given: Tensors that may differ between calls.
        fixed: Parameters and buffers.
        plain: Numbers.
    """

    given: list[int]
    fixed: list[int]
    plain: list[int]


class CompiledGraph:
    """The callable that Dynamo calls in place of the captured code.

    Concurrency:
        May be called from any thread.
    """

    def __init__(self, module: torch.fx.GraphModule) -> None:
        self._module = module
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        self._fixed = {index for index, node in enumerate(placeholders)
                       if node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")}
        self._numbers = {index for index, node in enumerate(placeholders) if _is_number(node)}
        self._state = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
        self._depends_on_data = any(
            free_unbacked_symbols(node.meta.get("example_value")) for node in module.graph.nodes)
        self._known: OrderedDict[tuple[Any, ...], _Known] = OrderedDict()
        self._copies = RemoteWeights()
        self._session: weakref.ref[Session] | None = None
        self._sorts: _Sorts | None = None

    def __call__(self, *arguments: Any) -> Sequence[Any]:
        """Run the graph.

        Raises:
            DjinnError: The session has failed.
            Exception: The error of the operation that should have computed a result.
        """
        session = self._current_session()
        sorts = self._sorts
        if sorts is None:
            sorts = self._sorts = self._sorted(arguments)
        given = [arguments[index] for index in sorts.given]
        fixed = [arguments[index] for index in sorts.fixed] + self._own()
        operands = given + fixed
        copies = self._copies
        copies.follow(session, fixed)
        sent = [_uploaded(session, tensor) for tensor in given]
        lazy = sent + copies.lazy
        plain = [arguments[index].item() if index in self._numbers else arguments[index] for index in sorts.plain]
        key = _key(plain, given, sent, copies.form)
        known = self._known.get(key)
        if known is None or (known.plan is None and not known.runs_here):
            known, call = self._first(session, arguments, operands, lazy)
            self._remember(key, known)
        else:
            self._known.move_to_end(key)
            call = None if known.plan is None else PlannedCall(
                session, known.plan, lazy, [tensor._value.slot.number for tensor in sent] + copies.handles)
        if call is None or (known.written and _shares_memory(operands, known.written.values())):
            return self._run_here(arguments, known)
        return self._finish(call, known, operands)

    def _sorted(self, arguments: Sequence[Any]) -> _Sorts:
        tensors = [index for index, item in enumerate(arguments)
                   if isinstance(item, torch.Tensor) and index not in self._numbers]
        return _Sorts(
            given=[index for index in tensors if index not in self._fixed],
            fixed=[index for index in tensors if index in self._fixed],
            plain=[index for index in range(len(arguments)) if index not in tensors],
        )

    def _current_session(self) -> Session:
        session = runtime.current()
        if self._session is None or self._session() is not session:
            self._known.clear()
            self._session = weakref.ref(session)
        return session

    def _own(self) -> list[torch.Tensor]:
        """The parameters and buffers that Dynamo has left within the graph."""
        return [*self._module.parameters(), *self._module.buffers()] if self._state else []

    def _first(
        self, session: Session, arguments: Sequence[Any], operands: Sequence[torch.Tensor],
        lazy: Sequence[LazyTensor],
    ) -> tuple[_Known, GraphCall | None]:
        """Record the first call with some metadata."""
        try:
            recording = record(session, lambda leaves: self._run_on(arguments, leaves), operands, lazy)
        except RuntimeError:
            if any(tensor.requires_grad and not tensor.is_leaf for tensor in operands):
                # Recording refuses writes to it, because the remote copy is a leaf. Run the call in eager mode to
                # decide.
                return _Known(None, Results([], []), {}, Crossing({}, [], []), runs_here=True), None
            raise
        slots = [tensor._value.slot for tensor in lazy]
        runs_here = _must_run_here(recording, operands)
        plan = None if runs_here or self._depends_on_data else make_plan(recording, slots)
        needed = () if plan is None or plan.backward is None else (*plan.backward.operands, *plan.backward.saved)
        guarded = {slot.storage for slot in needed}
        written = recording.written
        known = _Known(
            plan=plan,
            results=Results(recording.results.forms, []),
            written=written,
            crossing=Crossing(
                differentiable={position: recording.results.wanted[position]._value.spec
                                for position in recording.differentiable},
                trained=recording.trained if recording.differentiable else [],
                guarded=[index for index, slot in enumerate(slots)
                         if slot.storage in guarded and index not in written.values()],
            ),
            runs_here=runs_here,
        )
        return known, None if runs_here else recording

    def _remember(self, key: tuple[Any, ...], known: _Known) -> None:
        self._known[key] = known
        if len(self._known) > MAX_PLANS:
            self._known.popitem(last=False)

    def _run_on(self, arguments: Sequence[Any], leaves: Sequence[Any]) -> Sequence[Any]:
        """Run the captured code with other tensors in place of the operands."""
        assert self._sorts is not None
        replaced = list(arguments)
        indices = self._sorts.given + self._sorts.fixed
        for index, leaf in zip(indices, leaves, strict=False):
            replaced[index] = leaf
        if not self._state:
            return self._module(*replaced)  # type: ignore[no-any-return]  # a graph of Dynamo returns a sequence
        own = dict(zip(self._state, leaves[len(indices):], strict=True))
        made: Sequence[Any] = torch.func.functional_call(self._module, own, tuple(replaced))
        return made

    def _finish(self, call: GraphCall, known: _Known, operands: Sequence[torch.Tensor]) -> list[Any]:
        try:
            home = fetch(call, known.crossing, operands)
        except BaseException:
            self._forget(known.written.values())
            raise
        if known.written:
            first = len(self._sorts.given) if self._sorts else 0
            with torch.no_grad():
                for position, index in known.written.items():
                    operands[index].copy_(home[position])
                    if index >= first:
                        self._copies.written_on_both_sides(index - first, operands[index])
        return known.results.arrange(home, operands)

    def _run_here(self, arguments: Sequence[Any], known: _Known) -> Sequence[Any]:
        """Run the captured code on ordinary tensors, if its results or writes cannot be reproduced here."""
        log.warning("a graph of torch.compile runs in this process: it writes into tensors that share memory or take "
                    "part in gradients, or returns views of tensors that are not dense")
        self._copies.forget_all()
        made: Sequence[Any] = self._module(*arguments)
        return made

    def _forget(self, indices: Iterable[int]) -> None:
        first = len(self._sorts.given) if self._sorts else 0
        self._copies.forget(index - first for index in indices if index >= first)


def _uploaded(session: Session, tensor: torch.Tensor) -> LazyTensor:
    check(tensor)
    return session.upload(tensor)


def _is_number(placeholder: torch.fx.Node) -> bool:
    """Whether only a tensor's number is used, as Dynamo does for floats that vary between calls."""
    return bool(placeholder.users) and all(user.op == "call_method" and user.target == "item"
                                           for user in placeholder.users)


def _key(
    plain: Sequence[Any], given: Sequence[torch.Tensor], sent: Sequence[LazyTensor], form: int
) -> tuple[Any, ...]:
    """Everything that the recording of a graph may depend on, except data and the conditions that Dynamo guards."""
    return (
        form,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        tuple((type(item), item) for item in plain),
        tuple(tensor._value.spec for tensor in sent),
        tuple(tensor.requires_grad for tensor in given),
    )


def _must_run_here(recording: RecordedGraphCall, operands: Sequence[torch.Tensor]) -> bool:
    """Whether the aliasing of results or written operands in eager mode cannot be reproduced."""
    if recording.changes_metadata or any(recording.leaves[index].requires_grad for index in recording.written.values()):
        return True
    bases = [(view, operands[view.index]) for view in recording.results.views]
    return any(
        base.dtype != view.dtype or base.is_conj() or base.is_neg()
        or not is_dense(tuple(base.size()), tuple(base.stride())) for view, base in bases
    )


def _shares_memory(operands: Sequence[torch.Tensor], indices: Iterable[int]) -> bool:
    """Whether one of these operands shares memory with another operand."""
    owners = Counter(tensor.untyped_storage()._cdata for tensor in operands)
    return any(owners[operands[index].untyped_storage()._cdata] > 1 for index in indices)

"""Recording: converts an operator call to a node on the tape and lazy results.

The fast path, for an operation seen before with the same metadata, is `Recorder.dispatch` down to ``return``.
Everything else is off that path, in `djinn.record.call_plans` and the session.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import attrs
import torch

from djinn.ir.flush_policy import AdaptiveFlush
from djinn.ir.tape import Node, Tape
from djinn.ir.value import Slot, Value
from djinn.kinds.interop import HostInterop
from djinn.record.call_plans import Binding, CallPlan, change_metadata
from djinn.record.devices import logical_device
from djinn.record.tensor import LazyTensor, user_line, wrap

MAX_PLANS = 2048
"""Entries in each of the metadata cache's two generations; an entry not used for that many others is dropped."""

_device_type = torch.device
_inference_mode = torch._C._InferenceMode


class RecordingSession(Protocol):
    """The session of a `Recorder`, as far as that needs one."""

    tape: Tape
    released: deque[int]
    pace: AdaptiveFlush
    mixer: HostInterop

    def ask(self, plan: CallPlan, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], slots: Sequence[Slot],
            numbers: Sequence[Any]) -> tuple[Any, CallPlan | None]:
        """Run an operation at once whose results the executor alone can tell."""

    def stream(self) -> None:
        """Hand pending nodes over."""


class Recorder:
    """Records operations for one session.

    Args:
        session: The session.
        bind: Makes the binding of an operator.
        plan: Makes the plan of a call.
        is_debugging: Whether the users' lines are kept.

    Concurrency:
        `dispatch` may be called from any thread, also from autograd's.
    """

    def __init__(self, session: RecordingSession, bind: Callable[[Any], Binding], plan: Callable[..., CallPlan], *,
                 is_debugging: bool) -> None:
        self._session = session
        self._bind = bind
        self.plan = plan
        self.bindings: dict[int, Binding] = {}
        self._crossing: dict[Binding, Binding] = {}
        self._plans: dict[tuple[Any, ...], CallPlan] = {}
        self._older: dict[tuple[Any, ...], CallPlan] = {}
        self.numbers = itertools.count(1)
        self.append = session.tape.nodes.append
        self.released = session.released.append
        self.is_debugging = is_debugging
        self.misses = 0
        self._pace = session.pace
        self._pending = session.tape.nodes

    def dispatch(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute one operation on lazy tensors, or a factory on the logical device."""
        binding = self.bindings.get(id(operator)) or self.binding(operator)
        if binding.special is not None:
            result = binding.special(operator, args, kwargs)
            if result is not NotImplemented:
                return result
        return self.record(binding, operator, args, kwargs)

    def binding(self, operator: Any) -> Binding:
        """Return the facts about an operator.

        The lookup is by identity, because an operator's own hash is a Python function.
        """
        found = self.bindings.get(id(operator))
        return found or self.bindings.setdefault(id(operator), self._bind(operator))

    def record_across(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record an operation whose operands may be on different devices of the session."""
        plain = self.binding(operator)
        found = self._crossing.get(plain) or self._crossing.setdefault(plain, attrs.evolve(plain, crosses_devices=True))
        return self.record(found, operator, args, kwargs)

    def record(self, binding: Binding, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record an operation whose results have metadata that can be inferred."""
        key: list[Any] = [binding]
        slots: list[Slot] = []
        numbers: list[Any] = []
        local = scan(args, key, slots, numbers, binding.erases_floats)
        for name, item in kwargs.items():
            key.append(name)
            local = scan((item,), key, slots, numbers, binding.erases_floats) and local
        if not local:
            return self._session.mixer.carry_out(operator, args, kwargs)
        hashable = tuple(key)
        plan = self._plans.get(hashable) or self._recalled(hashable)
        if plan is None or (plan.single is None and plan.is_stale):
            self.misses += 1
            plan = self.plan(binding, operator, args, kwargs)
            if plan.asks:
                result, told = self._session.ask(plan, operator, args, kwargs, slots, numbers)
                if told is not None:
                    self._remember(hashable, told)
                return result
            self._remember(hashable, plan)
        return self.apply(plan, args, kwargs, slots, numbers)

    def _remember(self, key: tuple[Any, ...], plan: CallPlan) -> None:
        if len(self._plans) >= MAX_PLANS:
            self._plans, self._older = {}, self._plans
        self._plans[key] = plan

    def _recalled(self, key: tuple[Any, ...]) -> CallPlan | None:
        plan = self._older.pop(key, None)
        if plan is not None:
            self._remember(key, plan)
        return plan

    def take_apart(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Slot], list[Any]]:
        """List the operands and numbers of a call in which everything is lazy."""
        slots: list[Slot] = []
        numbers: list[Any] = []
        scan((*args, *kwargs.values()), [], slots, numbers, False)
        return slots, numbers

    def apply(
        self, plan: CallPlan, args: tuple[Any, ...], kwargs: dict[str, Any], slots: list[Slot], numbers: list[Any]
    ) -> Any:
        """Record a call whose plan is known; ``slots`` and ``numbers`` are the output of `scan`."""
        signature = plan.signature
        spec = plan.single
        if spec is not None:
            number = next(self.numbers)
            alias = signature.aliases[0]
            slot = Slot(number, slots[alias].storage if alias >= 0 else number)
            value = Value(slot, spec, self.released)
            if plan.may_be_view and torch.is_inference_mode_enabled() and not _is_inference(args):
                with _inference_mode(False):
                    result: Any = wrap(spec, value)
            else:
                result = wrap(spec, value)
            outputs: tuple[Slot, ...] = (slot,)
        else:
            outputs, made = self.new_results(plan, args, slots)
            result = plan.returned(made, args, kwargs)
        # The garbage collector stops tracking tuples that contain only untracked objects.
        node = Node(signature, tuple(slots), outputs, tuple(numbers))
        if self.is_debugging:
            node.origin = user_line()
        self.append(node)
        if plan.changes:
            change_metadata(args, kwargs, plan.changes)
        if len(self._pending) >= self._pace.limit:
            self._session.stream()
        return result

    def new_results(
        self, plan: CallPlan, args: tuple[Any, ...], slots: list[Slot]
    ) -> tuple[tuple[Slot, ...], list[LazyTensor | None]]:
        """Create slots and lazy tensors for the new results of an operation, ``None`` for absent ones."""
        outputs = []
        made: list[LazyTensor | None] = []
        with self.making(plan, args):
            for spec, alias in zip(plan.signature.results, plan.signature.aliases, strict=True):
                number = next(self.numbers)
                slot = Slot(number, slots[alias].storage if alias >= 0 else number)
                outputs.append(slot)
                if spec is None:
                    self.released(number)
                    made.append(None)
                else:
                    made.append(wrap(spec, Value(slot, spec, self.released)))
        return tuple(outputs), made

    @staticmethod
    def making(plan: CallPlan, args: tuple[Any, ...]) -> AbstractContextManager[Any]:
        """Return the context in which results are created: a view of an inference tensor must be one, too."""
        outside = plan.may_be_view and torch.is_inference_mode_enabled() and not _is_inference(args)
        return _inference_mode(False) if outside else nullcontext()


def _is_inference(args: tuple[Any, ...]) -> bool:
    """Whether the base of a view is an inference tensor; the view must be the same."""
    for item in args:
        if isinstance(item, torch.Tensor):
            return torch.is_inference(item)
        if isinstance(item, (list, tuple)) and item:
            return _is_inference(tuple(item))
    return True


def scan(items: Any, key: list[Any], slots: list[Slot], numbers: list[Any], erase: bool) -> bool:
    """Scan a call: append metadata and constants to the key, operands and numbers to lists.

    Args:
        items: Arguments.
        key: Receives everything that the results' metadata depends on.
        slots: Receives the tensors' slots.
        numbers: Receives the numbers.
        erase: Whether real numbers do not affect metadata.

    Returns:
        Whether all arguments belong to the session: no ordinary tensor, no other device, no generator.
    """
    ours = True
    for item in items:
        kind = type(item)
        if kind is LazyTensor:
            value = item._value
            key.append(value.spec)
            slots.append(value.slot)
        elif kind is int:
            key.append(item)
            numbers.append(item)
        elif item is None:
            key.append(None)
        elif kind is float or kind is complex:
            key.append(kind if erase else item)
            key.append(kind)
            numbers.append(item)
        elif kind is bool:
            key.append(item)
            key.append(bool)
        elif isinstance(item, (list, tuple)):
            first = type(item[0]) if item else None
            if (first is int or first is float) and len({*map(type, item)}) == 1:
                plain = tuple(item)  # The garbage collector stops tracking tuples of numbers.
                key += (plain, first)
                numbers.append(plain)
            else:
                key.append(len(item))
                key.append(list)
                ours = scan(item, key, slots, numbers, erase) and ours
        elif isinstance(item, LazyTensor):
            # A subclass may override this.
            value = item._value
            key.append((kind, value.spec))
            slots.append(value.slot)
        elif isinstance(item, (torch.Tensor, torch.Generator)):
            ours = False
        elif kind is _device_type and item.type != logical_device().type:
            ours = False
        else:
            key.append(item)
            if isinstance(item, (int, float, complex)):
                # A subclass, for example of an enumeration or from NumPy.
                key.append(kind)
                numbers.append(item)
    return ours

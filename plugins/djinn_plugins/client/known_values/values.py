"""The values that the client knows, computed when the program asks for one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import attrs
import torch

from djinn.ir.program import Program, Template
from djinn.ir.spec import TensorSpec
from djinn.ir.tape import Node
from djinn.ir.value import Slot
from djinn.wire.messages import Description
from djinn.wire.tensors import DTYPE_NAMES, to_dense_cpu
from djinn_plugins.client.known_values.arithmetic import KEPT_BYTES
from djinn_plugins.client.known_values.operators import (
    ABSORBING,
    absorbed,
    gives_new_shapes,
    is_followed_upload,
    is_integer_spec,
    is_real_number,
    overwrites,
    rounds,
)
from djinn_plugins.client.known_values.placing import (
    placed,
    restrided,
    seen_through,
    shares_elements,
    surrounds,
    usual_strides,
)
from djinn_plugins.common.calls.arguments import fill
from djinn_plugins.common.calls.binding import BoundCall, bind, results_of

__all__ = ("KnownValue", "KnownValues", "Unknown")

MAX_VALUES = 4096
"""Values that are known at once; the oldest are dropped."""
MAX_PENDING = 64
"""Operations that one value may still have to be computed of; then it is computed at once, or is unknown if large."""
MAX_ABSORBING = 256
"""Elements of a result that one operand may decide. To look at the operand takes time at each call."""
MAX_CALLS = 1024
"""Operators with their arguments that are kept ready."""
MAX_LACKING = 4
"""Values that may be fetched so that another one can be computed."""
_CPU = torch.device("cpu")
_PYTHON = torch._C.DispatchKeySet(torch._C.DispatchKey.Python) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.PythonTLSSnapshot)


class Unknown(Exception):  # noqa: N818  # no error: the executor is asked
    """The client cannot compute a value."""


@attrs.define(eq=False)
class _Call:
    """An operation that has not been computed, or the results.

    Attributes:
        run: Computes the results of those of the operands; ``None`` once it is computed.
        operands: The values that it takes.
        pending: How many operations are to be computed for it, at most.
        kind: The number of the operation's template.
        is_sure: Whether all operands were known when it was noted.
        results: Its results, once it is computed.
    """

    run: Callable[[Sequence[Any]], Sequence[Any]] | None
    operands: tuple[KnownValue, ...]
    pending: int = attrs.field(init=False)
    kind: int = 0
    is_sure: bool = attrs.field(init=False)
    results: Sequence[Any] = ()

    def __attrs_post_init__(self) -> None:
        self.is_sure = all(operand.is_sure for operand in self.operands)
        self.pending = 1 + sum(operand.call.pending for operand in self.operands if operand.call is not None)


@attrs.define(eq=False)
class KnownValue:
    """One value.

    Attributes:
        slot: Its name.
        storage: Number of the storage that it belonged to when it was made.
        call: The operation that makes it; ``None`` if it comes from elsewhere.
        position: Which of the operation's results it is.
        is_small: Whether it may be fetched for the sake of others.
        tensor: The value, if it was uploaded or fetched.
        spec: Its metadata, if it was recorded.
        kept_bytes: Bytes of the value, if it was uploaded.
    """

    slot: Slot
    storage: int
    call: _Call | None = None
    position: int = 0
    is_small: bool = False
    tensor: torch.Tensor | None = None
    spec: TensorSpec | None = None
    kept_bytes: int = 0

    @property
    def is_computed(self) -> bool:
        """Whether it is there."""
        return self.tensor is not None or (self.call is not None and self.call.run is None)


    @property
    def is_sure(self) -> bool:
        """Whether it is certain that nothing has to be fetched for it."""
        return self.tensor is not None or (self.call is not None and self.call.is_sure)


_Lacks: TypeAlias = "dict[int, KnownValue] | None"


class KnownValues:
    """Values by number, and the operations that they come from.

    A write makes the values of its storage unknown, unless the result of the write is known. An operation is computed
    when one of its results is asked for, from the operands as they were when it was recorded. Some operands may be
    values that only the executor knows: then it tells which of them are lacking.

    Args:
        limit_bytes: Size of the largest value that is computed before the program asks.

    Attributes:
        computes_alike: Whether executors compute all bits as this process does, also those of NaN.

    Concurrency:
        One thread at a time.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.computes_alike = False
        self._limit_bytes = limit_bytes
        self._values: OrderedDict[int, KnownValue] = OrderedDict()
        self._storages: dict[int, set[int]] = {}
        self._calls: dict[Template, BoundCall] = {}
        self._kept_bytes = 0

    def __len__(self) -> int:
        return len(self._values)

    def storage_of(self, number: int) -> int | None:
        """Return the storage of a value; ``None`` if it is not known."""
        value = self._values.get(number)
        return None if value is None else value.storage

    def put(self, number: int, tensor: torch.Tensor) -> None:
        """Take over the value of a new storage; earlier ones go if there are too many bytes."""
        spec = TensorSpec(tensor.size(), tensor.stride(), 0, tensor.dtype, _CPU)
        self._add(KnownValue(Slot(number, number), number, tensor=tensor, spec=spec, kept_bytes=tensor.nbytes))
        while self._kept_bytes > KEPT_BYTES:
            self._remove(next(earlier for earlier, value in self._values.items() if value.kept_bytes))

    def compute(self, node: Node) -> None:
        """Note an operation; its results are known if all its operands are, or if one of them decides."""
        signature = node.signature
        if signature.template.operator in ABSORBING and all(map(is_integer_spec, filter(None, signature.results))) and (
                self._absorb(node)):
            return
        operands = []
        for slot, spec in zip(node.inputs, node.signature.operands, strict=False):
            value = self._values.get(slot.number)
            if value is None:
                if not self.is_small(spec):
                    return
                value = self._add(KnownValue(slot, slot.storage, is_small=True, spec=spec))
            operands.append(value)
        if len(operands) < len(node.inputs):
            return
        # The slots of a node that is repeated change; the values do not.
        call = self._call(node, self._run, operands)
        if call is None:
            return
        for position, (slot, result) in enumerate(zip(node.outputs, node.signature.results, strict=True)):
            self._add(KnownValue(slot, slot.storage, call, position, result is not None and self.is_small(result),
                                 spec=result))

    def update(self, node: Node) -> bool:
        """Note an operation that writes, and return whether the written values are known.

        Other values of a storage that is written stay known if it is certain what a write of theirs changes.
        """
        specs, writes = node.signature.operands, node.signature.writes
        written = [node.inputs[place] for place in writes]
        storages = {slot.storage for slot in written}
        if len(storages) < len(written) or not storages.isdisjoint(
                slot.storage for place, slot in enumerate(node.inputs) if place not in writes):
            return False
        operands = []
        for place, (slot, spec) in enumerate(zip(node.inputs, specs, strict=True)):
            value = self._values.get(slot.number)
            if place in writes and overwrites(node.signature):
                value = KnownValue(slot, slot.storage, _Call(partial(_empty, spec), ()))
            if value is None or value.storage != slot.storage or not self._is_known(value):
                return False
            operands.append(value)
        call = self._call(node, self._run_on_copies, operands)
        if call is None:
            return False
        for position, (slot, place) in enumerate(zip(written, writes, strict=True)):
            made = KnownValue(slot, slot.storage, call, position, self.is_small(specs[place]), spec=specs[place])
            others = [self._values[number] for number in self._storages.get(slot.storage, ()) if number != slot.number]
            self.written_storage(slot.storage)
            self._remove(slot.number)
            self._add(made)
            # A value that contains the written one tells most about the others.
            whole = next((other for other in others if surrounds(other.spec, made.spec)), made)
            others = [other for other in others if other is not whole]
            changed = made if whole is made else self._see(whole, made)
            for other in others:
                if shares_elements(other.spec, made.spec):
                    self._see(other, changed or made)
                else:
                    self._add(other)
        return True

    def _see(self, other: KnownValue, made: KnownValue) -> KnownValue | None:
        """Compute another value of a storage after one of its values was written."""
        if other.spec is None or made.spec is None or not self._is_known(other):
            return None
        call = _Call(partial(seen_through, other.spec, made.spec), (other, made))
        return self._add(KnownValue(other.slot, other.storage, call, is_small=other.is_small, spec=other.spec))

    def move(self, node: Node) -> bool:
        """Note that a tensor was given a place in the storage of another one; return whether its value is known."""
        target, source = node.inputs
        base = self._values.get(source.number)
        if base is None or base.storage != source.storage or base.spec is None or (
                base.spec.dtype is not node.signature.operands[0].dtype):
            return False
        try:
            bound = self._bound(node.signature.template)
            _, _, offset, size, *rest = fill(bound.arguments, bound.keywords, node.inputs, node.numbers)[0]
        except Unknown:
            return False
        stride = tuple(rest[0]) if rest and rest[0] else usual_strides(size)
        spec = TensorSpec(torch.Size(size), stride, offset, base.spec.dtype, base.spec.device)
        if not (is_integer_spec(spec) or is_real_number(spec)) or spec.size_bytes > self._limit_bytes:
            return False
        self._remove(target.number)
        call = _Call(partial(placed, spec, base.spec), (base,))
        self._add(KnownValue(target, target.storage, call, is_small=self.is_small(spec), spec=spec))
        return True

    def _call(self, node: Node, run: Callable[[Node, Sequence[Any]], Sequence[Any]],
              operands: Sequence[KnownValue]) -> _Call | None:
        """Describe an operation; compute it if there is much to compute; return nothing if it cannot be computed."""
        call = _Call(partial(run, node), tuple(operands), node.signature.template_number)
        if call.pending > MAX_PENDING:
            specs = (*node.signature.results, *(node.signature.operands[place] for place in node.signature.writes))
            if any(spec is not None and spec.size_bytes > self._limit_bytes for spec in specs):
                return None
            try:
                self._finish(call)
            except Unknown:
                return None
        return call

    def _absorb(self, node: Node) -> bool:
        """Note the result of an operation that one operand decides: the end of a loop that has reached its length."""
        spec = node.signature.results[0]
        if spec is None or spec.size.numel() > MAX_ABSORBING:
            return False
        known = [value for slot in node.inputs if (value := self._values.get(slot.number)) is not None
                 and self._lacks(value, {}, may_lack=False) is not None]
        if len(known) != 1:
            return False
        try:
            element = absorbed(node.signature.template.operator, self._result(known[0]), spec)
        except Unknown:
            return False
        if element is None:
            return False
        with torch.inference_mode(mode=False):
            self.put(node.outputs[0].number, torch.full(spec.size, element, dtype=spec.dtype, device=_CPU))
        return True

    def read(self, slots: Sequence[Slot]) -> list[Any] | None:
        """Return values, which the caller then owns; ``None`` if one of them is not known."""
        found = [self._values.get(slot.number) for slot in slots]
        if not all(value is not None and self._lacks(value, {}, may_lack=False) is not None for value in found):
            return None
        try:
            return [_own(self._result(value)) for value in found if value is not None]
        except Unknown:
            return None

    def describe(self, slots: Sequence[Slot]) -> list[Description] | None:
        """Return the metadata of dense values; ``None`` if one of them is not known."""
        values = self.read(slots)
        if values is None or not all(isinstance(value, torch.Tensor) for value in values):
            return None
        return [self._description(slot, value) for slot, value in zip(slots, values, strict=True)]

    def _description(self, slot: Slot, value: torch.Tensor) -> Description:
        """Describe a value as it lies on the executor; one whose size depends on data lies as it does here."""
        spec = self._values[slot.number].spec
        stride, offset = (value.stride(), 0) if spec is None else (spec.stride, spec.storage_offset)
        return Description(DTYPE_NAMES[value.dtype], tuple(value.size()), tuple(stride), offset)

    def lacking(self, slot: Slot) -> list[KnownValue]:
        """List what would have to be fetched so that a value, and those made of the same, can be computed."""
        value = self._values.get(slot.number)
        found = None if value is None else self._lacks(value, {}, may_lack=True)
        return [] if not found or len(found) > MAX_LACKING else list(found.values())

    def kind_of(self, slot: Slot) -> tuple[int, ...]:
        """Return the operations that a value is computed by at last, by the numbers of their templates."""
        value = self._values.get(slot.number)
        calls = [] if value is None or value.call is None else [
            value.call, *(operand.call for operand in value.call.operands if operand.call is not None)]
        return tuple(0 if call.run is None else call.kind for call in calls)

    def learn(self, slot: Slot, fetched: object) -> None:
        """Note a value that was fetched; the tensor stays the caller's."""
        if not isinstance(fetched, torch.Tensor) or not is_followed_upload(fetched, self._limit_bytes):
            return
        value = self._values.get(slot.number) or self._add(KnownValue(slot, slot.storage))
        with torch.inference_mode(mode=False):
            value.tensor = fetched.detach().clone()

    def written(self, slot: Slot, spec: TensorSpec | None) -> None:
        """Drop the values of the storage that a value has, and of the one that it had.

        Args:
            slot: The value.
            spec: Its metadata, if it stays in its storage.
        """
        self.written_storage(slot.storage)
        value = self._values.get(slot.number)
        if value is not None:
            self.written_storage(value.storage)
        if spec is not None and self.is_small(spec):
            self._add(KnownValue(slot, slot.storage, is_small=True, spec=spec))

    def written_storage(self, storage: int, *, stays: bool = False) -> None:
        """Drop the values of a storage.

        Args:
            storage: Its number.
            stays: Whether the values, unknown from now on, still belong to it: then their next write touches no other.
        """
        for number in tuple(self._storages.get(storage, ())):
            value = self._values[number]
            self._remove(number)
            if stays:
                self._add(KnownValue(value.slot, storage, is_small=value.is_small, spec=value.spec))

    def release(self, numbers: Iterable[int]) -> None:
        """Drop values that the program no longer refers to."""
        values = self._values
        for number in numbers:
            if number in values:
                self._remove(number)

    def forget_reals(self) -> None:
        """Drop all real numbers."""
        for number, value in tuple(self._values.items()):
            if value.spec is None or not is_integer_spec(value.spec):
                self._remove(number)

    def is_small(self, spec: TensorSpec) -> bool:
        """Whether a value may be fetched so that others can be computed."""
        return is_integer_spec(spec) and spec.size_bytes <= self._limit_bytes

    def clear(self) -> None:
        """Drop everything."""
        self._values.clear()
        self._storages.clear()
        self._kept_bytes = 0

    def _add(self, value: KnownValue) -> KnownValue:
        number = value.slot.number
        self._values[number] = value
        self._kept_bytes += value.kept_bytes
        self._storages.setdefault(value.storage, set()).add(number)
        if len(self._values) > MAX_VALUES:
            self._remove(next(iter(self._values)))
        return value

    def _remove(self, number: int) -> None:
        value = self._values.pop(number, None)
        if value is None:
            return
        self._kept_bytes -= value.kept_bytes
        others = self._storages[value.storage]
        others.discard(number)
        if not others:
            del self._storages[value.storage]

    def _is_known(self, value: KnownValue) -> bool:
        return value.is_sure or self._lacks(value, {}, may_lack=False) is not None

    def _lacks(self, value: KnownValue, seen: dict[int, _Lacks], *, may_lack: bool) -> _Lacks:
        """Return the values to fetch so that another can be computed; ``None`` if that does not suffice."""
        if value.is_computed:
            return {}
        if id(value) in seen:
            return seen[id(value)]
        found: _Lacks = None if value.call is None else {}
        for operand in () if value.call is None else value.call.operands:
            more = self._lacks(operand, seen, may_lack=may_lack)
            if found is None or more is None:
                found = None
                break
            found = {**found, **more}
        if found is None and may_lack and value.is_small and self._values.get(value.slot.number) is value:
            found = {value.slot.number: value}
        seen[id(value)] = found
        return found

    def _result(self, value: KnownValue) -> Any:
        if value.tensor is not None:
            return value.tensor
        if value.call is None:
            raise Unknown
        if value.call.run is not None:
            self._finish(value.call)
        return value.call.results[value.position]

    def _finish(self, call: _Call) -> None:
        """Compute an operation, after those that it depends on.

        Raises:
            Unknown: It cannot be computed here.
        """
        run = call.run
        assert run is not None
        operands = [self._result(operand) for operand in call.operands]
        try:
            with (torch._C.DisableTorchFunction(), torch._C._ExcludeDispatchKeyGuard(_PYTHON),
                  torch.inference_mode(mode=False), torch.no_grad()):
                results = run(operands)
        except Exception as error:  # the executor raises the error, if there is one
            raise Unknown from error
        call.run, call.operands, call.pending, call.results = None, (), 0, results

    def _run(self, node: Node, operands: Sequence[Any]) -> Sequence[Any]:
        """Compute the results of an operation."""
        signature = node.signature
        bound = self._bound(signature.template)
        arguments, keywords = fill(bound.arguments, bound.keywords, operands, node.numbers)
        if signature.template.operator == "aten::as_strided":
            results = [restrided(signature.operands[0], *arguments)]
        else:
            results = results_of(bound, bound.function(*arguments, **keywords))
        if not gives_new_shapes(signature) and not all(map(_fits, results, signature.results)):
            raise Unknown
        self._check_bits(node, results)
        return results

    def _run_on_copies(self, node: Node, operands: Sequence[Any]) -> Sequence[Any]:
        """Compute what an operation writes."""
        bound = self._bound(node.signature.template)
        copies = [operand.clone() if place in node.signature.writes else operand
                  for place, operand in enumerate(operands)]
        arguments, keywords = fill(bound.arguments, bound.keywords, copies, node.numbers)
        bound.function(*arguments, **keywords)
        written = [copies[place] for place in node.signature.writes]
        self._check_bits(node, written)
        return written

    def _check_bits(self, node: Node, results: Sequence[Any]) -> None:
        """Leave NaN to the executor: its bits depend on the device.

        Raises:
            Unknown: A real number that was computed is NaN.
        """
        if not self.computes_alike and rounds(node.signature) and any(
                result.is_floating_point() and bool(result.isnan()) for result in results):
            raise Unknown

    def _bound(self, template: Template) -> BoundCall:
        if template.default_dtype not in ("", DTYPE_NAMES[torch.get_default_dtype()]):
            raise Unknown
        bound = self._calls.get(template)
        if bound is None:
            if len(self._calls) >= MAX_CALLS:
                self._calls.clear()
            bound = self._calls[template] = bind(Program((template,), (), 0, ()), _CPU)[0]
        return bound


def _empty(spec: TensorSpec, _: Sequence[Any]) -> list[torch.Tensor]:
    return [torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype, device=_CPU)]


def _fits(result: Any, spec: TensorSpec | None) -> bool:
    """Whether a result has the metadata that the program sees."""
    if spec is None:
        return isinstance(result, (int, float))
    return isinstance(result, torch.Tensor) and result.dtype is spec.dtype and result.size() == spec.size


def _own(result: Any) -> Any:
    """Return what an executor would send."""
    if not isinstance(result, torch.Tensor):
        return result
    with (torch._C.DisableTorchFunction(), torch._C._ExcludeDispatchKeyGuard(_PYTHON),
          torch.inference_mode(mode=False), torch.no_grad()):
        dense = to_dense_cpu(result)
        return dense.clone() if dense.data_ptr() == result.data_ptr() else dense

"""The values that the client knows, computed when somebody asks for one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import torch
from djinn_lib_torch.calls import BoundCall, bind, results_of
from djinn_lib_torch.interpreter import fill

from djinn.ir.program import Program, Template
from djinn.ir.spec import TensorSpec
from djinn.ir.tape import Node
from djinn.ir.value import Slot
from djinn.wire.tensors import DTYPE_NAMES, to_dense_cpu
from djinn_known_values.operators import ABSORBING, absorbed

__all__ = ("KnownValues", "Unknown")

MAX_VALUES = 4096
"""Values that are known at once; the oldest are dropped."""
MAX_PENDING = 64
"""Operations that one value may still have to be computed of; then it is computed at once, or is unknown if large."""
MAX_ABSORBING = 256
"""Elements of a result that one operand may decide. To look at the operand takes time at each call."""
MAX_CALLS = 1024
"""Operators with their arguments that are kept ready."""
_CPU = torch.device("cpu")
_PYTHON = torch._C.DispatchKeySet(torch._C.DispatchKey.Python) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.PythonTLSSnapshot)


class Unknown(Exception):  # noqa: N818  # no error: the executor is asked
    """The client cannot compute a value."""


@attrs.define(eq=False)
class _Call:
    """An operation on known values that has not been computed, or the results.

    Attributes:
        node: The operation; ``None`` once it is computed.
        operands: The values that it takes.
        results: Its results, once it is computed.
        pending: How many operations are to be computed for it, at most.
    """

    node: Node | None
    operands: tuple[_Value, ...]
    pending: int
    results: Sequence[Any] = ()


@attrs.frozen(eq=False)
class _Value:
    """One result of an operation.

    Attributes:
        call: The operation.
        position: Which of its results.
        storage: Number of the storage that it belongs to.
    """

    call: _Call
    position: int
    storage: int


class KnownValues:
    """Values by number, and the operations that they come from. A write makes the values of its storage unknown.

    An operation on known values is computed when one of its results is asked for, from what its operands were when it
    was recorded.

    Args:
        limit_bytes: Size of the largest value that is computed before anybody asks.

    Concurrency:
        One thread at a time.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._values: OrderedDict[int, _Value] = OrderedDict()
        self._storages: dict[int, set[int]] = {}
        self._calls: dict[Template, BoundCall] = {}

    def __len__(self) -> int:
        return len(self._values)

    def storage_of(self, number: int) -> int | None:
        """Return the storage of a value; ``None`` if it is not known."""
        value = self._values.get(number)
        return None if value is None else value.storage

    def put(self, number: int, tensor: torch.Tensor) -> None:
        """Take over the value of a new storage."""
        self._add(number, _Value(_Call(None, (), 0, (tensor,)), 0, number))

    def compute(self, node: Node) -> None:
        """Note an operation; its results are known if all its operands are, or if one of them decides."""
        operands = tuple([value for slot in node.inputs if (value := self._values.get(slot.number)) is not None])
        if len(operands) < len(node.inputs):
            if operands and node.signature.template.operator in ABSORBING:
                self._absorb(node, operands[0])
            return
        # The slots of a node that is repeated change; the values do not.
        call = _Call(node, operands, 1 + sum(operand.call.pending for operand in operands))
        if call.pending > MAX_PENDING:
            if any(spec is not None and spec.size_bytes > self._limit_bytes for spec in node.signature.results):
                return
            try:
                self._finish(call)
            except Unknown:
                return
        for position, slot in enumerate(node.outputs):
            self._add(slot.number, _Value(call, position, slot.storage))

    def _absorb(self, node: Node, operand: _Value) -> None:
        """Note the result of an operation that one operand decides: the end of a loop that has reached its length."""
        spec = node.signature.results[0]
        if spec is None or spec.size.numel() > MAX_ABSORBING:
            return
        try:
            element = absorbed(node.signature.template.operator, self._result(operand), spec)
        except Unknown:
            return
        if element is not None:
            with torch.inference_mode(mode=False):
                self.put(node.outputs[0].number, torch.full(spec.size, element, dtype=spec.dtype, device=_CPU))

    def read(self, slots: Sequence[Slot]) -> list[Any] | None:
        """Return values, which the caller then owns; ``None`` if one of them is not known."""
        found = [self._values.get(slot.number) for slot in slots]
        if not all(found):
            return None
        try:
            return [_own(self._result(value)) for value in found if value is not None]
        except Unknown:
            return None

    def written(self, slot: Slot) -> None:
        """Drop the values of the storage that a value has, and of the one that it had."""
        self.written_storage(slot.storage)
        value = self._values.get(slot.number)
        if value is not None:
            self.written_storage(value.storage)

    def written_storage(self, storage: int) -> None:
        """Drop the values of a storage."""
        for number in self._storages.pop(storage, ()):
            self._values.pop(number, None)

    def release(self, numbers: Iterable[int]) -> None:
        """Drop values that the program no longer refers to."""
        for number in numbers:
            self._remove(number)

    def clear(self) -> None:
        """Drop everything."""
        self._values.clear()
        self._storages.clear()

    def _add(self, number: int, value: _Value) -> None:
        self._values[number] = value
        self._storages.setdefault(value.storage, set()).add(number)
        if len(self._values) > MAX_VALUES:
            self._remove(next(iter(self._values)))

    def _remove(self, number: int) -> None:
        value = self._values.pop(number, None)
        if value is None:
            return
        others = self._storages[value.storage]
        others.discard(number)
        if not others:
            del self._storages[value.storage]

    def _result(self, value: _Value) -> Any:
        if value.call.node is not None:
            self._finish(value.call)
        return value.call.results[value.position]

    def _finish(self, call: _Call) -> None:
        """Compute an operation, after those that it depends on.

        Raises:
            Unknown: It cannot be computed here.
        """
        node = call.node
        assert node is not None
        operands = [self._result(operand) for operand in call.operands]
        try:
            with (torch._C.DisableTorchFunction(), torch._C._ExcludeDispatchKeyGuard(_PYTHON),
                  torch.inference_mode(mode=False), torch.no_grad()):
                bound = self._bound(node.signature.template)
                arguments, keywords = fill(bound, operands, node.numbers)
                results = results_of(bound, bound.function(*arguments, **keywords))
        except Exception as error:  # the executor raises what is wrong, if something is
            raise Unknown from error
        if not all(map(_fits, results, node.signature.results)):
            raise Unknown
        call.node, call.operands, call.pending, call.results = None, (), 0, results

    def _bound(self, template: Template) -> BoundCall:
        if template.default_dtype not in ("", DTYPE_NAMES[torch.get_default_dtype()]):
            raise Unknown
        bound = self._calls.get(template)
        if bound is None:
            if len(self._calls) >= MAX_CALLS:
                self._calls.clear()
            bound = self._calls[template] = bind(Program((template,), (), 0, ()), _CPU)[0]
        return bound


def _fits(result: Any, spec: TensorSpec | None) -> bool:
    """Whether a result has the metadata that the program sees."""
    if spec is None:
        return isinstance(result, int)
    return isinstance(result, torch.Tensor) and result.dtype is spec.dtype and result.size() == spec.size


def _own(result: Any) -> Any:
    """Return what an executor would send."""
    if not isinstance(result, torch.Tensor):
        return result
    with (torch._C.DisableTorchFunction(), torch._C._ExcludeDispatchKeyGuard(_PYTHON),
          torch.inference_mode(mode=False), torch.no_grad()):
        dense = to_dense_cpu(result)
        return dense.clone() if dense.data_ptr() == result.data_ptr() else dense

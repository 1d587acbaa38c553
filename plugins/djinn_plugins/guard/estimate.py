"""Estimates the memory of a run in advance: the metadata of each step, and the values that are alive at each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import attrs
import torch

from djinn.ir.program import (
    ConstantArgument,
    ListArgument,
    NumberArgument,
    TensorArgument,
    TorchArgument,
    count_tensors,
)
from djinn.ir.schema import ReturnKind, SchemaFacts
from djinn.ir.spec import tensors_in
from djinn.kinds import Inference, OutputSpec, ShapeInference
from djinn.wire.tensors import DTYPES
from djinn_plugins.common.operators.operators import is_as_declared
from djinn_plugins.guard.calls import CallChecker
from djinn_plugins.guard.fast_sizes import QUICK, Metadata
from djinn_plugins.guard.layouts import base_of
from djinn_plugins.guard.unknown_sizes import LARGEST

__all__ = ("UNKNOWN", "UNSIZED", "Answer", "Answers", "Called")

UNKNOWN = -1
"""Spec number of a value that is no tensor that a step can use: a number, or the poison of a failure."""
UNSIZED = -2
"""Spec number of a tensor whose size depends on elements: it counts as the largest one."""
MAX_SPECS = 2**12
MAX_ANSWERS = 2**11
"""Entries of each of two generations: an answer is evicted after that many others were used in the meantime."""
_marks = itertools.count()
"""Serial numbers for attributes of values."""


@attrs.frozen(eq=False)
class Called:
    """One template of a session, prepared for estimates.

    Attributes:
        number: Its number in the session.
        operator: The operator.
        facts: Facts from its schema.
        given: Forms of its arguments, by name and in order.
        positional: Number of arguments that are passed by position.
        check: Check before its calls.
        default_dtype: PyTorch's default dtype during recording, where results depend on it.
        aliases: For each return: positions, among the tensor operands, of those whose storage it may share.
        numbers: Number of numeric arguments.
        matters: The numeric arguments that metadata may depend on.
        has_device: Whether a device can be given by name.
    """

    number: int
    operator: torch._ops.OpOverload
    facts: SchemaFacts
    given: tuple[tuple[str, Any], ...]
    positional: int
    check: CallChecker | None
    default_dtype: str
    aliases: tuple[tuple[int, ...], ...]
    numbers: int
    matters: tuple[int, ...]
    has_device: bool

    @property
    def allocates(self) -> bool:
        """Whether it may take memory: it gives more than views, or resizes an argument."""
        facts = self.facts
        return facts.is_composite or facts.changes_metadata or not is_as_declared(self.operator) or any(
            kind in (ReturnKind.TENSOR, ReturnKind.LIST) and not alias
            for kind, alias in zip(facts.returns, facts.aliases, strict=True))


@attrs.frozen
class Answer:
    """The effect of one call on metadata.

    Attributes:
        results: Specs of its new results, flat.
        sizes_bytes: Additional memory of each result.
        total_bytes: Additional memory of all results.
        changes: New specs of operands, by position among them.
    """

    results: tuple[int, ...]
    sizes_bytes: tuple[int, ...]
    total_bytes: int
    changes: tuple[tuple[int, int], ...] = ()


class Answers:
    """The metadata seen in one session, and the cached results of calls on it.

    Args:
        shapes: Shape inference; where it gives no answer, the estimate uses the meta kernel.
    """

    def __init__(self, shapes: ShapeInference) -> None:
        self._shapes = shapes
        self._epoch, self._mark = _new_epoch()
        self._numbers: dict[Metadata, int] = {}
        self._specs: list[Metadata] = []
        self._known: dict[tuple[Any, ...], Answer] = {}
        self._older: dict[tuple[Any, ...], Answer] = {}

    def depends_on_reals(self, operator: torch._ops.OpOverload) -> bool:
        """Whether a real number among the arguments can change metadata."""
        return self._shapes.depends_on_numbers(operator)

    def begin(self) -> object:
        """Clear the cache if it is full.

        Returns:
            The epoch of the spec numbers: earlier numbers are valid as long as this is the same object.
        """
        if len(self._specs) >= MAX_SPECS:
            self._epoch, self._mark = _new_epoch()
            self._numbers, self._specs, self._known, self._older = {}, [], {}, {}
        return self._epoch

    def specs_of(self, values: Sequence[Any], *, may_change: bool) -> list[int]:
        """Return the spec numbers of values.

        A value keeps its number, so weights are examined once.

        Args:
            values: Tensors, and other objects.
            may_change: Whether the next run may change their metadata.
        """
        mark = self._mark
        try:
            made = [value.__dict__.get(mark) for value in values]
        except AttributeError:
            made = [None] * len(values)
        if None in made:
            made = [self._marked(value) if spec is None else spec for value, spec in zip(values, made, strict=True)]
        if may_change:
            for value in values:
                if isinstance(value, torch.Tensor):
                    value.__dict__.pop(mark, None)
        return made

    def _marked(self, value: Any) -> int:
        if not isinstance(value, torch.Tensor):
            return UNKNOWN
        spec = UNKNOWN
        if value.layout is torch.strided:
            spec = self._spec(tuple(value.shape), value.stride(), value.dtype)
        value.__dict__[self._mark] = spec
        return spec

    def _spec(self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> int:
        key = size, stride, dtype
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._specs)
            self._specs.append(key)
        return number

    def elements(self, spec: int) -> int:
        """Return the number of elements of a value."""
        return prod(self._specs[spec][0])

    def find(self, key: tuple[Any, ...]) -> Answer | None:
        """Look an answer up in the cache."""
        found = self._known.get(key)
        if found is None and key in self._older:
            found = self._older.pop(key)
            self._remember(key, found)
        return found

    def _remember(self, key: tuple[Any, ...], answer: Answer) -> None:
        if len(self._known) >= MAX_ANSWERS:
            self._known, self._older = {}, self._known
        self._known[key] = answer

    def ask(
        self, key: tuple[Any, ...], called: Called, operands: Sequence[int], numbers: Sequence[Any], results: int
    ) -> Answer:
        """Compute an answer and cache it.

        Args:
            key: Everything that it depends on.
            called: The template.
            operands: Specs of its tensors; all known.
            numbers: Its numbers.
            results: The announced number of results.
        """
        answer = self._work_out(called, operands, numbers, results)
        self._remember(key, answer)
        return answer

    def _work_out(self, called: Called, operands: Sequence[int], numbers: Sequence[Any], results: int) -> Answer:
        unknown = _unsized(called, [self._specs[operand] for operand in operands], results)
        quick = QUICK.get(called.facts.name)
        made = quick and quick([self._specs[operand] for operand in operands], numbers)
        if made:
            sizes_bytes = tuple(_reach(size, stride) * dtype.itemsize for size, stride, dtype in made)
            return Answer(tuple(self._spec(*spec) for spec in made), sizes_bytes, sum(sizes_bytes))
        try:
            inference = self._inferred(called, operands, numbers)
        except Exception:  # noqa: BLE001  # if this is a real error, the call itself raises it
            # A missing meta kernel and an invalid call look alike here; the kernel decides, and its result is unknown.
            return unknown
        if inference is None:
            return unknown
        specs: list[int] = []
        sizes: list[int] = []
        for index, (kind, result) in enumerate(zip(called.facts.returns, inference.results, strict=True)):
            if kind is ReturnKind.WRITTEN:
                continue
            for member in result if isinstance(result, tuple) else (result,):
                specs.append(UNKNOWN if member is None else self._spec(
                    tuple(member.size), tuple(member.stride), member.dtype))
                sizes.append(0 if member is None else self._taken(called, index, member, operands))
        if len(specs) != results:
            return unknown
        changes, grown = self._changed(inference, operands)
        return Answer(tuple(specs), tuple(sizes), sum(sizes) + grown, changes)

    def _taken(self, called: Called, index: int, made: OutputSpec, operands: Sequence[int]) -> int:
        """Return the additional bytes of a result: none if it is a view."""
        itemsize = made.dtype.itemsize
        if called.default_dtype and made.dtype is torch.get_default_dtype():
            itemsize = DTYPES[called.default_dtype].itemsize
        size_bytes = _reach(made.size, made.stride) * itemsize
        shared = called.aliases[index]
        if not shared:
            return size_bytes
        if not called.facts.is_composite:
            return 0
        # Some return their argument, a view, or a copy, depending on the layout: `contiguous`, `reshape`.
        size, stride, dtype = self._specs[operands[shared[0]]]
        is_copy = made.dtype is not dtype or prod(made.size) * itemsize > _reach(size, stride) * dtype.itemsize
        return size_bytes if is_copy else 0

    def _changed(self, inference: Inference, operands: Sequence[int]) -> tuple[tuple[tuple[int, int], ...], int]:
        changes, grown = [], 0
        for position, (before, after) in enumerate(zip(operands, inference.arguments, strict=False)):
            size, stride, dtype = self._specs[before]
            if tuple(after.size) != size or tuple(after.stride) != stride or after.dtype is not dtype:
                changes.append((position, self._spec(tuple(after.size), tuple(after.stride), after.dtype)))
                grown += max(_reach(after.size, after.stride) * after.dtype.itemsize
                             - _reach(size, stride) * dtype.itemsize, 0)
        return tuple(changes), grown

    def _inferred(self, called: Called, operands: Sequence[int], numbers: Sequence[Any]) -> Inference | None:
        if not operands and not called.has_device:
            # Without operands on the meta device, the call would really be executed.
            return None
        args, kwargs = self._arguments(called, operands, numbers)
        if called.check is not None:
            called.check.expect(args, kwargs)
        answer = self._shapes.infer(called.operator, args, kwargs)
        if answer is not None:
            return answer
        # A failed call may have written to the placeholders.
        args, kwargs = self._arguments(called, operands, numbers)
        return _tried(called, args, kwargs)

    def _arguments(
        self, called: Called, operands: Sequence[int], numbers: Sequence[Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        tensors, values = iter(operands), iter(numbers)
        made = [self._filled(form, tensors, values) for _, form in called.given]
        names = [name for name, _ in called.given[called.positional :]]
        kwargs = dict(zip(names, made[called.positional :], strict=True))
        if called.has_device and kwargs.get("device") is None:
            kwargs["device"] = torch.device("meta")
        return made[: called.positional], kwargs

    def _filled(self, form: Any, tensors: Iterator[int], numbers: Iterator[Any]) -> Any:
        if isinstance(form, TensorArgument):
            size, stride, dtype = self._specs[next(tensors)]
            with torch.inference_mode(mode=False):
                return torch.empty_strided(size, stride, dtype=dtype, device="meta")
        if isinstance(form, NumberArgument):
            return next(numbers)
        if isinstance(form, ListArgument):
            return [self._filled(item, tensors, numbers) for item in form.items]
        return form.value if isinstance(form, ConstantArgument) else _constant(form)


def _unsized(called: Called, tensors: Sequence[Metadata], results: int) -> Answer:
    """Return the answer for a call whose results have sizes that cannot be known in advance."""
    written = _written(called) if called.facts.changes_metadata else ()
    largest = LARGEST.get(base_of(called.operator)) if is_as_declared(called.operator) else None
    try:
        size_bytes = 0 if largest is None else largest(
            [tensor for position, tensor in enumerate(tensors) if position not in written])
    except (IndexError, RuntimeError):
        # The call itself raises.
        size_bytes = 0
    spec = UNKNOWN if ReturnKind.PLAIN in called.facts.returns else UNSIZED
    return Answer((spec,) * results, (size_bytes, *(0,) * (results - 1))[:results], size_bytes,
                  tuple((position, UNSIZED) for position in written))


def _written(called: Called) -> tuple[int, ...]:
    """Return which of its tensor operands a call writes."""
    names = [name for name, form in called.given for _ in range(count_tensors(form))]
    return tuple(position for position, name in enumerate(names) if name in called.facts.written)


def _new_epoch() -> tuple[object, str]:
    """Return an epoch, and the name of the attribute that stores the spec numbers of values."""
    return object(), f"djinn_guard_{next(_marks)}"


def _constant(form: TorchArgument) -> Any:
    if form.kind == "device":
        return torch.device("meta")
    return DTYPES[form.name] if form.kind == "dtype" else getattr(torch, form.name)


def _tried(called: Called, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Inference | None:
    """Run the meta kernel even if its result is unreliable: an estimate need not be exact."""
    with torch.inference_mode(mode=False), torch.no_grad():
        returned = called.operator(*args, **kwargs)
    kinds = called.facts.returns
    values = () if not kinds else (returned,) if len(kinds) == 1 else returned
    if any(kind is ReturnKind.PLAIN for kind in kinds) or not all(
        tensor.device.type == "meta" and tensor.layout is torch.strided for tensor in tensors_in(values)
    ):
        return None
    results = tuple(
        tuple(map(OutputSpec.of, value)) if kind is ReturnKind.LIST else None if value is None else OutputSpec.of(value)
        for kind, value in zip(kinds, values, strict=True))
    return Inference(results, tuple(map(OutputSpec.of, tensors_in((*args, *kwargs.values())))))


def _reach(size: Sequence[int], stride: Sequence[int]) -> int:
    """Return the distance in memory from a tensor's first element to its end, in elements."""
    if not prod(size):
        return 0
    return sum((extent - 1) * step for extent, step in zip(size, stride, strict=True)) + 1

"""Bindings and plans: facts computed once per operator, and once per operator and metadata."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import msgspec
import torch

from djinn.errors import UnsupportedTensorError
from djinn.ir.phase import ExecutionPhase
from djinn.ir.program import (
    Argument,
    ConstantArgument,
    ListArgument,
    NumberArgument,
    Template,
    TensorArgument,
    TorchArgument,
    count_tensors,
)
from djinn.ir.schema import ReturnKind, SchemaFacts
from djinn.ir.spec import SpecTable, TensorSpec, tensors_in
from djinn.ir.tape import Signature
from djinn.kinds import Inference, OperationClass, OutputSpec
from djinn.record.devices import checked_device
from djinn.record.tensor import LazyTensor, reshape_wrapper
from djinn.wire.tensors import DTYPE_NAMES


@attrs.frozen(eq=False)
class Binding:
    """Facts about one operator in one session.

    Attributes:
        operator: The operator; holding it here keeps its identity valid.
        facts: Facts from its schema.
        operation_class: How it is executed.
        special: Executes it, if it is not simply recorded; `NotImplemented` where it is, after all.
        erases_floats: Whether the value of a real number never affects metadata.
        is_random: Whether it draws random numbers.
        crosses_devices: Whether its operands may be on different logical devices.
        phase_of: Derives the execution phase from the sizes of its operands, if the operator can reveal it.
        switches: PyTorch's process-wide switches under which it is recorded; see `djinn.ir.program.Template`.
    """

    operator: torch._ops.OpOverload
    facts: SchemaFacts
    operation_class: OperationClass
    special: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None
    erases_floats: bool
    is_random: bool
    crosses_devices: bool = False
    phase_of: Callable[[Sequence[torch.Size]], ExecutionPhase] | None = None
    switches: tuple[tuple[str, str], ...] = ()


@attrs.frozen(eq=False)
class CallPlan:
    """How to handle a call whose metadata has been seen before.

    Attributes:
        signature: The part that all nodes of this call share.
        single: The spec, if the call returns exactly one new tensor regardless of PyTorch's default dtype.
        may_be_view: Whether a result may share storage with an argument.
        asks: Whether only the executor can determine the results.
        kinds: Kind of each return.
        lengths: Length of each return that is a list.
        written: Name and position of the argument that each written return gives back.
        changes: New metadata of arguments that the call changes in place, by position among the tensors.
    """

    signature: Signature
    single: TensorSpec | None
    may_be_view: bool
    asks: bool
    kinds: tuple[ReturnKind, ...]
    lengths: tuple[int, ...]
    written: tuple[tuple[str, int] | None, ...]
    changes: tuple[tuple[int, TensorSpec], ...] = ()

    @property
    def is_stale(self) -> bool:
        """Whether PyTorch's default dtype, which the results may depend on, has changed."""
        default_dtype = self.signature.template.default_dtype
        return default_dtype not in ("", DTYPE_NAMES[torch.get_default_dtype()])

    def told(self, results: tuple[TensorSpec | None, ...]) -> CallPlan:
        """Return the plan for later calls, now that the executor has reported the metadata of the results."""
        signature = attrs.evolve(self.signature, results=results)
        is_single = self.kinds == (ReturnKind.TENSOR,) and not signature.template.default_dtype
        return attrs.evolve(self, signature=signature, asks=False, single=results[0] if is_single else None)

    def returned(self, made: Sequence[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Arrange new results and written arguments in the form that the operator returns."""
        rest = iter(made)
        values: list[Any] = []
        for kind, length, written in zip(self.kinds, self.lengths, self.written, strict=True):
            if kind is ReturnKind.LIST:
                values.append([next(rest) for _ in range(length)])
            elif written is not None:
                name, position = written
                values.append(args[position] if position < len(args) else kwargs[name])
            else:
                values.append(next(rest))
        if not values:
            return None
        return values[0] if len(values) == 1 else tuple(values)


class Planner:
    """Creates plans. Keeps the session's templates and specs.

    Args:
        infer: The shape inference plugin.
        specs: The session's specs.
    """

    def __init__(
        self,
        infer: Callable[[Any, Sequence[Any], Mapping[str, Any]], Inference | None],
        specs: SpecTable,
        check_owner: Callable[[LazyTensor], None],
    ) -> None:
        self._infer = infer
        self._specs = specs
        self._check_owner = check_owner
        self._templates: dict[Template, int] = {}

    def plan(self, binding: Binding, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallPlan:
        """Infer a call's metadata and derive its plan."""
        tensors = lazy_tensors(args, kwargs)
        for tensor in tensors:
            self._check_owner(tensor)
        if not binding.crosses_devices:
            _check_devices(tensors)
        template, ranges = self._template(binding, args, kwargs)
        inference = None
        if binding.operation_class not in (OperationClass.DATA_DEPENDENT, OperationClass.TRIGGER):
            with torch._C.DisableTorchFunction():
                inference = self._infer(operator, on_meta(args), {k: on_meta(v) for k, v in kwargs.items()})
        template = msgspec.structs.replace(template, default_dtype=_default_dtype(tensors, kwargs, inference))
        if inference is None:
            return self._plan(binding, template, ranges, tensors, lengths=_guess_lengths(binding, args, kwargs))
        device = self._device_of(tensors, args, kwargs)
        return self._plan_inferred(binding, template, ranges, tensors, inference, device)

    def _plan_inferred(
        self, binding: Binding, template: Template, ranges: Mapping[str, range], tensors: Sequence[LazyTensor],
        inference: Inference, device: torch.device,
    ) -> CallPlan:
        flat: list[TensorSpec | None] = []
        lengths = []
        for kind, result in zip(binding.facts.returns, inference.results, strict=True):
            members = result if isinstance(result, tuple) else (result,)
            lengths.append(len(members))
            if kind is not ReturnKind.WRITTEN:
                flat += [None if member is None else self._intern(member, device) for member in members]
        changed = None
        if binding.facts.changes_metadata:
            changed = tuple(
                (index, spec) for index, spec in enumerate(self._intern(a, device) for a in inference.arguments)
                if spec is not tensors[index]._value.spec
            )
        return self._plan(binding, template, ranges, tensors, tuple(lengths), tuple(flat), changed)

    def _plan(
        self, binding: Binding, template: Template, ranges: Mapping[str, range], tensors: Sequence[LazyTensor],
        lengths: tuple[int, ...], flat: tuple[TensorSpec | None, ...] | None = None,
        changed: tuple[tuple[int, TensorSpec], ...] | None = None,
    ) -> CallPlan:
        facts = binding.facts
        asks = flat is None
        aliases: list[int] = []
        written: list[tuple[str, int] | None] = []
        for kind, alias, length in zip(facts.returns, facts.aliases, lengths, strict=True):
            operands = ranges.get(alias, range(0)) if alias is not None else range(0)
            is_written = kind is ReturnKind.WRITTEN and alias is not None
            written.append((alias, facts.argument_names.index(alias)) if is_written and alias is not None else None)
            if kind is not ReturnKind.WRITTEN:
                aliases += [operands[0] if operands else -1] * length
        specs = tuple(flat) if flat is not None else (None,) * len(aliases)
        writes = tuple(position for name in facts.argument_names if name in facts.written
                       for position in ranges.get(name, range(0)))
        read = tuple(tensor._value.spec for tensor in tensors)
        phase = None if binding.phase_of is None else binding.phase_of([spec.size for spec in read])
        number = self._templates.setdefault(template, len(self._templates))
        signature = Signature(template, number, specs, tuple(aliases), writes, binding.is_random, read, phase)
        is_single = (not asks and not template.default_dtype and facts.returns == (ReturnKind.TENSOR,)
                     and specs[0] is not None)
        return CallPlan(
            signature=signature,
            single=specs[0] if is_single else None,
            may_be_view=any(alias >= 0 for alias in aliases),
            asks=asks,
            kinds=facts.returns,
            lengths=lengths,
            written=tuple(written),
            changes=changed or (),
        )

    def _intern(self, spec: OutputSpec, device: torch.device) -> TensorSpec:
        return self._specs.intern(spec.size, spec.stride, spec.storage_offset, spec.dtype, device)

    def _device_of(
        self, tensors: Sequence[LazyTensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> torch.device:
        named = next((item for item in (*args, *kwargs.values()) if isinstance(item, torch.device)), None)
        if named is None and tensors:
            return tensors[0]._value.spec.device
        return checked_device(named)

    def _template(
        self, binding: Binding, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Template, dict[str, range]]:
        facts = binding.facts
        arguments = tuple(_form(item) for item in args)
        keywords = tuple((name, _form(item)) for name, item in kwargs.items())
        ranges: dict[str, range] = {}
        position = 0
        named = [*zip(facts.argument_names, arguments, strict=False), *keywords]
        for name, argument in named:
            width = count_tensors(argument)
            ranges[name] = range(position, position + width)
            position += width
        return Template(facts.name, facts.digest, arguments, keywords, switches=binding.switches), ranges


def _form(item: Any) -> Argument:
    """Describe an argument in the form in which the recorder scans it."""
    if isinstance(item, torch.Tensor):
        return TensorArgument()
    if item is None or isinstance(item, (bool, str)):
        return ConstantArgument(item)
    if isinstance(item, (int, float, complex)):
        return NumberArgument()
    if isinstance(item, (list, tuple)):
        first = type(item[0]) if item else None
        if first in (int, float) and all(type(member) is first for member in item):
            return NumberArgument()
        return ListArgument(tuple(_form(member) for member in item))
    if isinstance(item, torch.device):
        return TorchArgument("device", "")
    if (isinstance(item, torch.dtype) and item not in DTYPE_NAMES) or (isinstance(item, torch.layout) and (
        item is not torch.strided
    )):
        raise UnsupportedTensorError(f"Tensors of {item} have no remote form.",
                                     hint="Convert it to a dense tensor of an ordinary dtype first.")
    for kind, name in ((torch.dtype, "dtype"), (torch.layout, "layout"), (torch.memory_format, "memory_format")):
        if isinstance(item, kind):
            return TorchArgument(name, str(item).removeprefix("torch."))
    raise UnsupportedTensorError(f"An argument of type {type(item).__name__} cannot be sent to a remote accelerator.")


def on_meta(item: Any) -> Any:
    """Replace tensors by new placeholders and devices by meta, also in nested lists."""
    if isinstance(item, LazyTensor):
        return placeholder(item._value.spec)
    if isinstance(item, (list, tuple)):
        return [on_meta(member) for member in item]
    return torch.device("meta") if isinstance(item, torch.device) else item


def placeholder(spec: TensorSpec) -> torch.Tensor:
    """Create a meta tensor with this metadata."""
    with torch.inference_mode(mode=False):
        if not spec.storage_offset:
            return torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype, device="meta")
        reach = sum((extent - 1) * step for extent, step in zip(spec.size, spec.stride, strict=True) if extent)
        base = torch.empty(spec.storage_offset + reach + 1, dtype=spec.dtype, device="meta")
        return base.as_strided(spec.size, spec.stride, spec.storage_offset)


def lazy_tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[LazyTensor]:
    """List the lazy tensors of a call, in order."""
    return [tensor for tensor in tensors_in((args, tuple(kwargs.values()))) if isinstance(tensor, LazyTensor)]


def change_metadata(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], changed: Iterable[tuple[int, TensorSpec]]
) -> None:
    """Set the metadata that tensors of a call, by position among them, have after the call."""
    tensors = lazy_tensors(args, kwargs)
    for index, spec in changed:
        if spec is not tensors[index]._value.spec:
            reshape_wrapper(tensors[index], spec, tensors[index])


def _default_dtype(tensors: Sequence[LazyTensor], kwargs: Mapping[str, Any], inference: Inference | None) -> str:
    """Name PyTorch's default dtype if the results may depend on it, that is if only Python numbers are fractional."""
    if kwargs.get("dtype") is not None or any(_has_fraction(tensor.dtype) for tensor in tensors):
        return ""
    results = () if inference is None else inference.results
    made = [member for result in results for member in (result if isinstance(result, tuple) else (result,))]
    depends = inference is None or any(member is not None and _has_fraction(member.dtype) for member in made)
    return DTYPE_NAMES[torch.get_default_dtype()] if depends else ""


def _check_devices(tensors: Sequence[LazyTensor]) -> None:
    devices = {tensor._value.spec.device: None for tensor in tensors}
    if len(devices) > 1:
        one, other, *_ = devices
        raise RuntimeError("Expected all tensors to be on the same device, but found at least two devices, "
                           f"{one} and {other}!")


def _has_fraction(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _guess_lengths(binding: Binding, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Guess the lengths of list results that cannot be inferred: as long as the operator's first list argument."""
    first = next((item for item in (*args, *kwargs.values()) if isinstance(item, (list, tuple))), ())
    return tuple(len(first) if kind is ReturnKind.LIST else 1 for kind in binding.facts.returns)

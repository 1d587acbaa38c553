"""Shape inference on the meta device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from djinn.ir.schema import ReturnKind, SchemaFacts, facts_of
from djinn.ir.spec import tensors_in
from djinn.kinds import Inference, OutputSpec
from djinn_plugins.device.shapes import without_dynamo
from djinn_plugins.device.shapes.layouts import corrected
from djinn_plugins.device.shapes.refusals import decided_by_numbers, is_refused
from djinn_plugins.device.shapes.rules import absent_results, has_dimensions, is_believable, is_ordinary

_SIZED_BY_NUMBERS = ("aten::upsample_", "aten::_upsample_", "aten::arange", "aten::range", "aten::linspace",
                     "aten::logspace", "aten::histc", "aten::histogram")

_SCALARS = frozenset({"alpha", "beta", "value"})
"""Arguments that are numbers, unless an operator takes a tensor by that name."""
_NUMBERS = {int: (False, False, True), float: (False, True, True), complex: (True, True, True)}
"""Ranks of Python's numbers; see `_kind_of`."""


class MetaShapes:
    """Runs the operator itself on tensors without data.

    Meta kernels can be missing, or stricter than the real ones. Then there is no answer, and the executor is asked. The
    same applies to an invalid call, so its error is exactly the one that eager raises.
    """

    name = "meta"

    def __init__(self) -> None:
        without_dynamo.spare()

    def depends_on_numbers(self, operator: torch._ops.OpOverload) -> bool:
        """Whether a floating-point argument can change the result's metadata, or let eager refuse the call."""
        facts = facts_of(operator)
        takes_tensors = any("Tensor" in str(argument.type) for argument in operator._schema.arguments)
        return not takes_tensors or facts.name.startswith(_SIZED_BY_NUMBERS) or decided_by_numbers(facts)

    def infer(
        self, operator: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Inference | None:
        """Infer the result of ``operator(*args, **kwargs)``, or return ``None``."""
        facts = facts_of(operator)
        kwargs = {name: _number_like(item) if name in _SCALARS and isinstance(item, torch.Tensor) else item
                  for name, item in kwargs.items()}
        if not is_ordinary(facts, args, kwargs) or _is_unchecked(operator, facts, args, kwargs):
            return None
        args = [_number_like(item) if isinstance(item, torch.Tensor) and isinstance(argument.type, torch.NumberType)
                else item for argument, item in zip(operator._schema.arguments, args, strict=False)]
        arguments = tensors_in((args, tuple(kwargs.values())))
        if not is_believable(facts, arguments):
            return None
        before = [(tensor.size(), tensor.stride()) for tensor in arguments]
        try:
            with torch.inference_mode(mode=False), torch.no_grad():
                returned = operator(*args, **kwargs)
        except Exception:  # noqa: BLE001  # the executor is asked instead
            # This says nothing about the call: a missing meta kernel and a user's mistake look alike here. The executor
            # decides.
            return None
        if not facts.returns:
            values: Sequence[Any] = ()
        else:
            values = (returned,) if len(facts.returns) == 1 else returned
            absent = absent_results(facts, {**dict(zip(facts.argument_names, args, strict=False)), **kwargs})
            values = [None if place in absent else value for place, value in enumerate(values)] if absent else values
        results: list[OutputSpec | None | tuple[OutputSpec, ...]] = []
        for kind, value in zip(facts.returns, values, strict=True):
            if kind is ReturnKind.PLAIN:
                return None
            members = value if kind is ReturnKind.LIST else (value,)
            if not all(member is None or (_is_plain_meta(member) and _is_within_storage(member)) for member in members):
                return None
            specs = tuple(OutputSpec.of(member) for member in members if member is not None)
            results.append(specs if kind is ReturnKind.LIST else specs[0] if specs else None)
        if not all(map(_is_within_storage, arguments)) or _is_laid_out_anew(operator, arguments, before):
            return None
        laid_out = corrected(facts, args, kwargs, results)
        return None if laid_out is None else Inference(laid_out, tuple(map(OutputSpec.of, arguments)))


def _number_like(tensor: torch.Tensor) -> complex:
    """Return a number in the place of one that a step before reads from such a tensor."""
    return 2j if tensor.is_complex() else 2.0 if tensor.is_floating_point() else 2


def _is_unchecked(
    operator: torch._ops.OpOverload, facts: SchemaFacts, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Whether eager refuses the call for a reason that meta does not check."""
    named = {**dict(zip(facts.argument_names, args, strict=False)), **kwargs}
    written = tensors_in([named[name] for name in facts.written if name in named])
    overlaps_itself = any(extent > 1 and not step for tensor in written
                          for extent, step in zip(tensor.size(), tensor.stride(), strict=True))
    kinds = [_kind_of(item.dtype) for item in tensors_in(named.values())]
    kinds += [_NUMBERS[type(item)] for item in named.values() if type(item) in _NUMBERS]
    narrows = bool(written) and facts.name not in ("aten::copy_", "aten::fill_.Scalar") and (
        max(kinds) > min(_kind_of(tensor.dtype) for tensor in written))
    return (overlaps_itself or narrows or _converts_out(operator, named) or not has_dimensions(facts, named)
            or is_refused(facts, named))


def _converts_out(operator: torch._ops.OpOverload, named: Mapping[str, Any]) -> bool:
    """Whether results go to a destination with a dtype that no argument has: not every kernel converts."""
    outs = {argument.name for argument in operator._schema.arguments if argument.is_out}
    sources = {tensor.dtype for name, item in named.items() if name not in outs for tensor in tensors_in([item])}
    return bool(sources) and any(tensor.dtype not in sources for name in outs for tensor in tensors_in([named[name]]))


def _kind_of(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    """Rank a dtype as bool, integer, real or complex; results are never cast to a lower rank."""
    return dtype.is_complex, dtype.is_complex or dtype.is_floating_point, dtype is not torch.bool


def _is_laid_out_anew(
    operator: torch._ops.OpOverload, arguments: Sequence[torch.Tensor], before: Sequence[tuple[torch.Size, Any]]
) -> bool:
    """Whether an argument was resized that must not be, or one whose layout depends on others."""
    resized = [tensor.size() != size for tensor, (size, _) in zip(arguments, before, strict=True)]
    if not any(argument.is_out for argument in operator._schema.arguments):
        return any(resized) and not facts_of(operator).changes_metadata
    if any(tensor.size() == size and tensor.stride() != stride
           for tensor, (size, stride) in zip(arguments, before, strict=True)):
        return True
    return any(resized) and not all(
        tensor.is_contiguous() or is_new for tensor, is_new in zip(arguments, resized, strict=True))


def _is_within_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor is within the known extent of its storage; meta creates any view."""
    if not tensor.numel():
        return True
    reach = sum((extent - 1) * step for extent, step in zip(tensor.size(), tensor.stride(), strict=True))
    return (tensor.storage_offset() + reach + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes()


def _is_plain_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type == "meta"

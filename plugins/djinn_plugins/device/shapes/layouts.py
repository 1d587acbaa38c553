"""Strides of results, where Python meta kernels compute other strides than the kernels of devices.

For elementwise operators, PyTorch's iterator chooses the strides of new results. It considers all operands, in order,
including strides of dimensions with one element. This module reproduces its algorithm.

Source:
    ``compute_fast_setup_type``, ``reorder_dimensions`` and ``allocate_or_resize_outputs`` of
    aten/src/ATen/TensorIterator.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from djinn.ir.schema import SchemaFacts
from djinn.ir.spec import tensors_in
from djinn.kinds import OutputSpec

Strides = tuple[int, ...]
_NUMBERS = (bool, int, float, complex)

_NUMBER_IS_OPERAND = frozenset(
    "add sub rsub mul div eq ne lt le gt ge remainder fmod floor_divide where bitwise_and bitwise_or "
    "bitwise_xor".split())
"""Operators that convert a number operand to a tensor without dimensions."""
_REVERSED = frozenset(("rsub", "threshold_backward", "leaky_relu_backward"))
"""Operators that give the iterator their operands in reverse order."""
ELEMENTWISE = _NUMBER_IS_OPERAND | frozenset(
    "reciprocal neg abs sgn sign signbit exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan "
    "sinh cosh tanh asinh acosh atanh sigmoid relu gelu silu mish elu leaky_relu softplus hardswish hardsigmoid "
    "hardshrink softshrink threshold logit erf erfc erfinv lgamma digamma ceil floor round trunc frac i0 sinc pow "
    "square logical_not bitwise_not isnan isposinf isneginf clamp clamp_min clamp_max maximum minimum fmax fmin atan2 "
    "hypot copysign xlogy nextafter heaviside logaddexp logaddexp2 logical_and logical_or logical_xor lerp addcmul "
    "addcdiv mse_loss smooth_l1_loss tanh_backward gelu_backward sigmoid_backward silu_backward threshold_backward "
    "leaky_relu_backward elu_backward softplus_backward hardtanh_backward".split())
"""Operators whose result the iterator lays out by their operands."""
_LIKE = frozenset("empty_like zeros_like ones_like full_like rand_like randn_like".split())
CONTIGUOUS = frozenset("_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data masked_fill "
                       "native_layer_norm tril triu".split())
"""Operators whose result is contiguous, whatever their operands are."""


def _is_converted_first(
    facts: SchemaFacts, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Any]
) -> bool:
    """Whether a CPU copies an operand to another dtype before its strides are considered, which may change them."""
    if not results or not isinstance(results[0], OutputSpec) or _name_of(facts) not in ELEMENTWISE:
        return False
    operands = tensors_in((*args[_name_of(facts) == "where" :], *kwargs.values()))
    if all(map(_is_dense, operands)):
        return False
    made = results[0].dtype
    if made is torch.bool:
        return any(isinstance(item, float) and not operands[0].dtype.is_floating_point for item in args)
    return any(operand.dtype is not made for operand in operands)


def corrected(
    facts: SchemaFacts, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Any]
) -> tuple[Any, ...] | None:
    """Return the results that meta inferred, with the strides that device kernels choose; ``None`` if unknown."""
    if _is_converted_first(facts, args, kwargs, results):
        return None
    rule = _RULES.get(_name_of(facts))
    if rule is None or "out" in kwargs or not isinstance(results[0], OutputSpec):
        return tuple(results)
    first = results[0]
    stride = rule(facts, first, args, kwargs)
    return (first if stride is None else attrs.evolve(first, stride=stride), *results[1:])


def _name_of(facts: SchemaFacts) -> str:
    return facts.name.partition("::")[2].partition(".")[0]


def contiguous(size: Sequence[int]) -> Strides:
    """Return the strides of a new contiguous tensor."""
    strides: list[int] = []
    length = 1
    for extent in reversed(size):
        strides.append(length)
        length *= max(extent, 1)
    return tuple(reversed(strides))


def is_canonical(tensor: torch.Tensor) -> bool:
    """Whether a tensor has the strides of a new contiguous one, including dimensions with one element."""
    return tensor.stride() == contiguous(tensor.size())


def _always_contiguous(_: SchemaFacts, result: OutputSpec, *__: Any) -> Strides:
    return contiguous(result.size)


def _as_empty_like(
    _: SchemaFacts, result: OutputSpec, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Strides | None:
    asked = kwargs.get("memory_format")
    if asked not in (None, torch.preserve_format):
        return contiguous(result.size) if asked is torch.contiguous_format else None
    like = args[0]
    return like.stride() if _is_dense(like) else _ordered(result.size, [like.stride()])


def _elementwise(
    facts: SchemaFacts, result: OutputSpec, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Strides | None:
    operands = tensors_in((*args, *kwargs.values()))
    name = _name_of(facts)
    if facts.name == "aten::pow.Scalar":
        return contiguous(result.size)
    if any(operand.dim() > len(result.size) for operand in operands):
        return None  # a loss that is reduced
    takes_number = name in _NUMBER_IS_OPERAND and any(isinstance(item, _NUMBERS) for item in args[1:3])
    return _iterated(result.size, operands[::-1] if name in _REVERSED else operands, has_number=takes_number)


def _iterated(size: Sequence[int], operands: Sequence[torch.Tensor], *, has_number: bool = False) -> Strides:
    """Return the strides that the iterator chooses for a new result of operands, one of which may be a number."""
    if all(operand.shape == size for operand in operands) and not (has_number and len(size)):
        if all(operand.is_contiguous() for operand in operands):
            return contiguous(size)
        if len(size) == 4 and all(operand.is_contiguous(memory_format=torch.channels_last) for operand in operands):
            return torch.empty(size, device="meta", memory_format=torch.channels_last).stride()
        if len({operand.stride() for operand in operands}) == 1 and _is_dense(operands[0]):
            return operands[0].stride()
    return _ordered(size, [_broadcast(operand, size) for operand in operands])


def _masked_gradient(_: SchemaFacts, result: OutputSpec, args: Sequence[Any], __: Mapping[str, Any]) -> Strides:
    """Scale a mask and multiply a gradient by it, as ``native_dropout_backward`` of a CPU does."""
    gradient, mask = args[:2]
    scaled = torch.empty_strided(mask.shape, _iterated(mask.shape, [mask], has_number=True), device="meta")
    return _iterated(result.size, [gradient, scaled])


def _is_dense(tensor: torch.Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def _broadcast(operand: torch.Tensor, size: Sequence[int]) -> Strides:
    lacking = len(size) - operand.dim()
    return (*[0] * lacking, *(0 if extent == 1 and wide != 1 else step for extent, wide, step in zip(
        operand.shape, size[lacking:], operand.stride(), strict=True)))


def _ordered(size: Sequence[int], strides: Sequence[Strides]) -> Strides:
    """Return a layout with the order of dimensions that most operands have."""
    def compare(one: int, other: int) -> int:
        for steps in strides:
            mine, theirs = steps[one], steps[other]
            if not mine or not theirs:
                continue
            if mine != theirs:
                return -1 if mine < theirs else 1
            if size[one] > size[other]:
                return 1
        return 0

    order = list(reversed(range(len(size))))
    for start in range(1, len(order)):
        later = start
        for earlier in reversed(range(start)):
            comparison = compare(order[earlier], order[later])
            if comparison > 0:
                order[earlier], order[later] = order[later], order[earlier]
                later = earlier
            elif comparison < 0:
                break
    if order == list(reversed(range(len(size)))):
        return contiguous(size)
    made = [0] * len(size)
    length = 1
    for dim in order:
        made[dim] = length
        length *= size[dim]
    return tuple(made)


_RULES: Mapping[str, Callable[..., Strides | None]] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(_LIKE, _as_empty_like),
    **dict.fromkeys(CONTIGUOUS, _always_contiguous),
    "native_dropout_backward": _masked_gradient,
}

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

_NUMBER_IS_OPERAND = frozenset("add sub rsub mul div eq ne lt le gt ge".split())
"""Operators that convert a number operand to a tensor without dimensions."""
_ELEMENTWISE = _NUMBER_IS_OPERAND | frozenset(
    "reciprocal neg abs sgn exp log sqrt rsqrt sin cos tanh sigmoid relu gelu silu erf pow square where logical_not "
    "bitwise_not clamp clamp_min clamp_max lerp addcmul addcdiv isnan tanh_backward gelu_backward sigmoid_backward "
    "silu_backward".split())
_LIKE = frozenset("empty_like zeros_like ones_like full_like rand_like randn_like".split())
_CONTIGUOUS = frozenset("_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data masked_fill "
                        "native_layer_norm".split())


def corrected(
    facts: SchemaFacts, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Any]
) -> tuple[Any, ...]:
    """Return the results that meta inferred, with the strides that device kernels choose."""
    name = facts.name.partition("::")[2].partition(".")[0]
    rule = _RULES.get(name)
    if rule is None or "out" in kwargs or not isinstance(results[0], OutputSpec):
        return tuple(results)
    first = results[0]
    stride = rule(facts, first, args, kwargs)
    return (first if stride is None else attrs.evolve(first, stride=stride), *results[1:])


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
    name = facts.name.partition("::")[2].partition(".")[0]
    takes_number = facts.name == "aten::pow.Scalar" or (name in _NUMBER_IS_OPERAND and isinstance(args[1], _NUMBERS))
    return _iterated(result.size, operands[::-1] if name == "rsub" else operands, has_number=takes_number)


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
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(_LIKE, _as_empty_like),
    **dict.fromkeys(_CONTIGUOUS, _always_contiguous),
    "native_dropout_backward": _masked_gradient,
}

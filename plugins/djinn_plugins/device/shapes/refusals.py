"""Calls that eager refuses for reasons that metadata and numbers show, and that meta kernels do not check.

Inference gives no answer to them; the executor is asked, and raises what eager raises, at the user's line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from djinn.ir.schema import SchemaFacts
from djinn.ir.spec import tensors_in
from djinn_plugins.device.shapes.dtypes import has_kernel

__all__ = ("decided_by_numbers", "is_refused")

_Check = Callable[[Mapping[str, Any]], bool]
"""Whether a call with these arguments, by name, may be refused."""
_MASKS = (torch.bool, torch.uint8)
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_MAX_CATEGORIES = 2**24
_MAX_DIMENSIONS = 64
_SAMPLE_DIMENSIONS = 3


def is_refused(facts: SchemaFacts, named: Mapping[str, Any]) -> bool:
    """Whether eager may refuse a call for a reason that is known here."""
    check = _CHECKS.get(facts.name) or _CHECKS.get(_base_of(facts))
    return _has_wrong_alpha(named) or (check is not None and check(named)) or not has_kernel(
        _base_of(facts), tensors_in(named.values()))


def decided_by_numbers(facts: SchemaFacts) -> bool:
    """Whether eager refuses some real numbers as arguments of an operator."""
    return _base_of(facts) in _DISTRIBUTIONS


def _base_of(facts: SchemaFacts) -> str:
    return facts.name.partition("::")[2].partition(".")[0].rstrip("_")


def _has_wrong_alpha(named: Mapping[str, Any]) -> bool:
    alpha = named.get("alpha")
    if alpha is None or type(alpha) is int:
        return False
    dtypes = [tensor.dtype for tensor in tensors_in(named.values())]
    if isinstance(alpha, bool):
        return any(dtype is not torch.bool for dtype in dtypes)
    has_fraction = any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes) or isinstance(
        named.get("other"), (float, complex))
    return not has_fraction


def _indexed_size(named: Mapping[str, Any]) -> torch.Size | None:
    """Return the size of what indices choose, if no mask is among them."""
    tensor, indices = named["self"], [index for index in named["indices"] if index is not None]
    if not indices or any(index.dtype in _MASKS for index in indices):
        return None
    chosen: torch.Tensor = torch.ops.aten.index.Tensor(tensor, named["indices"])
    return chosen.size()


def _index(named: Mapping[str, Any]) -> bool:
    """Look for an index into a dimension without elements."""
    tensor, indices = named["self"], named["indices"]
    if len(indices) > tensor.dim() or any(index is not None and index.dtype in _MASKS for index in indices):
        return False
    return any(index is not None and index.numel() and not extent
               for index, extent in zip(indices, tensor.shape, strict=False))


def _differ_in_size(indices: Sequence[torch.Tensor]) -> bool:
    """Look for indices that cannot be broadcast to each other; what a mask chooses is not known."""
    if any(index.dtype in _MASKS for index in indices):
        return False
    try:
        torch.broadcast_shapes(*(index.shape for index in indices))
    except RuntimeError:
        return True
    return False


def _index_put(named: Mapping[str, Any]) -> bool:
    tensor, values = named["self"], named.get("values")
    indices = [index for index in named["indices"] if index is not None]
    # A mask of bytes makes the kernel warn, or refuse.
    if any(index.dtype is torch.uint8 for index in indices):
        return True
    if not indices or not isinstance(values, torch.Tensor) or values.dtype != tensor.dtype or _index(named):
        return True
    if _differ_in_size(indices):
        return True
    chosen = None if values.numel() == 1 and not values.dim() else _indexed_size(named)
    if chosen is None:
        return False
    lacking = len(chosen) - values.dim()
    # Leading dimensions with one element are left out.
    shape = values.shape if lacking >= 0 else values.shape[-lacking:]
    return math.prod(values.shape[:max(-lacking, 0)]) != 1 or any(
        extent not in (1, wide) for extent, wide in zip(reversed(shape), reversed(chosen), strict=False))


def _masked(named: Mapping[str, Any]) -> bool:
    return named["mask"].dtype is not torch.bool


def _bucketize(named: Mapping[str, Any]) -> bool:
    boundaries = named["boundaries"]
    return not isinstance(boundaries, torch.Tensor) or boundaries.dim() != 1 or _searchsorted(
        {**named, "sorted_sequence": boundaries})


def _searchsorted(named: Mapping[str, Any]) -> bool:
    """Look for arguments that do not fit each other.

    Source:
        ``searchsorted_pre_check`` in aten/src/ATen/native/BucketizationUtils.h.
    """
    rows, values, sorter, out = (named.get(name) for name in ("sorted_sequence", "self", "sorter", "out"))
    is_number = not isinstance(values, torch.Tensor) or (not values.dim() and values.numel() == 1)
    if not isinstance(rows, torch.Tensor) or not rows.dim() or named.get("side") not in (None, "left", "right"):
        return True
    if rows.dim() > 1 and (is_number or values is None or values.shape[:-1] != rows.shape[:-1]):
        return True
    wanted = torch.int32 if named.get("out_int32") else torch.int64
    return bool(named.get("right") and named.get("side") == "left") or (out is not None and out.dtype != wanted) or (
        sorter is not None and (sorter.shape != rows.shape or sorter.dtype != torch.int64))


def _extreme_place(named: Mapping[str, Any]) -> bool:
    return bool(named["self"].dim() > _MAX_DIMENSIONS)


def _power(named: Mapping[str, Any]) -> bool:
    base, exponent = named["self"], named["exponent"]
    return isinstance(base, torch.Tensor) and type(exponent) is int and exponent < 0 and not (
        base.dtype.is_floating_point or base.dtype.is_complex)


def _division(named: Mapping[str, Any]) -> bool:
    """Look for integers that are divided by zero; a divisor that is a tensor is not known here."""
    divided, divisor = named["self"], named["other"]
    return type(divisor) in (int, bool) and not divisor and isinstance(divided, torch.Tensor) and bool(
        divided.numel()) and not (divided.dtype.is_floating_point or divided.dtype.is_complex)


def _has_no_quotient(named: Mapping[str, Any]) -> bool:
    """Look for operands that cannot be divided and rounded."""
    tensors = tensors_in(named.values())
    return _only_bools(named) or any(tensor.dtype.is_complex for tensor in tensors)


def _randperm(named: Mapping[str, Any]) -> bool:
    out = named.get("out")
    dtype = named.get("dtype") or (torch.int64 if out is None else out.dtype)
    if dtype.is_complex or dtype is torch.bool:
        return True
    largest = 2 / torch.finfo(dtype).eps + 1 if dtype.is_floating_point else torch.iinfo(dtype).max
    return not 0 <= named["n"] <= largest


def _multinomial(named: Mapping[str, Any]) -> bool:
    weights, count = named["self"], named["num_samples"]
    if not 1 <= weights.dim() <= 2 or not weights.dtype.is_floating_point:
        return True
    categories = weights.shape[-1]
    return count <= 0 or not 0 < categories <= _MAX_CATEGORIES or (
        not named.get("replacement", False) and count > categories)


def _random(named: Mapping[str, Any]) -> bool:
    dtype = named["self"].dtype
    if dtype.is_complex:
        return True
    if dtype.is_floating_point:
        largest = 2 / torch.finfo(dtype).eps
        smallest = -largest
    else:
        limits = None if dtype is torch.bool else torch.iinfo(dtype)
        smallest, largest = (0, 1) if limits is None else (limits.min, limits.max)
    begin, end = named.get("from", 0), named.get("to")
    return begin is not None and (not smallest <= begin <= largest or (
        end is not None and not begin < end <= largest + 1))


def _same_dtypes(named: Mapping[str, Any]) -> bool:
    return len({tensor.dtype for tensor in tensors_in(named.values())}) > 1


def _no_fractions(named: Mapping[str, Any]) -> bool:
    return not any(tensor.dtype.is_floating_point or tensor.dtype.is_complex for tensor in tensors_in(named.values()))


def _only_bools(named: Mapping[str, Any]) -> bool:
    return all(tensor.dtype is torch.bool for tensor in tensors_in(named.values()))


def _uniform(named: Mapping[str, Any]) -> bool:
    begin, end = named.get("from", 0.0), named.get("to", 1.0)
    dtype = named["self"].dtype
    return not dtype.is_floating_point or not (
        begin <= end and max(abs(begin), abs(end), end - begin) <= torch.finfo(dtype).max)


def _positive(name: str, default: float) -> _Check:
    return lambda named: not named.get(name, default) > 0


def _probability(named: Mapping[str, Any]) -> bool:
    chance = named.get("p", 0.5)
    return bool(named["self"].dtype.is_complex) or (isinstance(chance, (int, float)) and not 0 <= chance <= 1)


def _own_probabilities(named: Mapping[str, Any]) -> bool:
    return not named["self"].dtype.is_floating_point


def _normal(named: Mapping[str, Any]) -> bool:
    deviation = named.get("std", 1.0)
    return isinstance(deviation, (int, float)) and not deviation >= 0


def _pool(named: Mapping[str, Any], *, takes_halves: bool = True) -> bool:
    """Look for what only some kernels pool: integers, halves in three dimensions, and nothing."""
    pooled = named["self"]
    return pooled.dtype not in (_FLOATS if takes_halves else _FLOATS[:2]) or not pooled.numel()


def _fractional_pool(named: Mapping[str, Any]) -> bool:
    """Look for samples that do not fit the tensor that is pooled.

    Source:
        ``fractional_max_pool_check_shape`` in aten/src/ATen/native/FractionalMaxPooling.h.
    """
    pooled, samples = named["self"], named["random_samples"]
    return _pool(named) or samples.dtype != pooled.dtype or samples.dim() != _SAMPLE_DIMENSIONS or (
        samples.shape[0] < math.prod(pooled.shape[:-4]) or tuple(samples.shape[1:]) != (*pooled.shape[-4:-3], 3))


_DISTRIBUTIONS: Mapping[str, _Check] = {
    "bernoulli": _probability,
    "cauchy": _positive("sigma", 1.0),
    "exponential": _positive("lambd", 1.0),
    "geometric": lambda named: not 0 < named["p"] < 1,
    "log_normal": _positive("std", 2.0),
    "normal": _normal,
    "uniform": _uniform,
}
_CHECKS: Mapping[str, _Check] = {
    **_DISTRIBUTIONS,
    "aten::bernoulli": _own_probabilities,
    "index": _index,
    "_unsafe_index": _index,
    **dict.fromkeys(("masked_fill", "masked_scatter", "masked_select"), _masked),
    "index_put": _index_put,
    "_index_put_impl": _index_put,
    "_unsafe_index_put": _index_put,
    "bucketize": _bucketize,
    "searchsorted": _searchsorted,
    **dict.fromkeys(("argmax", "argmin"), _extreme_place),
    "pow": _power,
    "randperm": _randperm,
    "multinomial": _multinomial,
    "random": _random,
    **dict.fromkeys(("heaviside", "polar"), _same_dtypes),
    "linalg_cross": lambda named: _same_dtypes(named) or _only_bools(named),
    **dict.fromkeys(("hypot", "nextafter", "logaddexp", "logaddexp2"), _no_fractions),
    "floor_divide": _division,
    "div": lambda named: named.get("rounding_mode") is not None and (_division(named) or _has_no_quotient(named)),
    **dict.fromkeys(("remainder", "fmod"), lambda named: _only_bools(named) or _division(named)),
    **dict.fromkeys("gcd lcm bitwise_left_shift bitwise_right_shift dot vdot".split(), _only_bools),
    "ldexp": lambda named: named["other"].dtype is torch.bool,
    **dict.fromkeys(
        "adaptive_avg_pool2d _adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool3d adaptive_max_pool2d "
        "adaptive_max_pool3d avg_pool2d max_pool1d max_pool2d_with_indices max_pool3d_with_indices "
        "fractional_max_pool2d".split(),
        _pool),
    "avg_pool3d": partial(_pool, takes_halves=False),
    "fractional_max_pool3d": _fractional_pool,
}

"""Conditions for kernels of quantization: for training with it, and for products of scaled matrices."""

from __future__ import annotations

from collections.abc import Mapping

from djinn_plugins.guard.fused_kernels import Rule
from djinn_plugins.guard.preconditions import Named, expect, numel_is

__all__ = ("QUANTIZATION", "observed", "scaled_product", "with_parameters")

_FOR_ALL, _FOR_EACH = 0, 1
"""Kinds of scales, of `torch.nn.functional.ScalingType`: one for a matrix, one for each of its rows or columns."""


def with_parameters(named: Named) -> None:
    """Check that scale, zero point and switch are single numbers."""
    for name in ("scale", "zero_point", "fake_quant_enabled"):
        numel_is(named, name, 1)


def observed(named: Named) -> None:
    """Check that ranges and parameters have a number for each row, or one for the tensor.

    The kernel would resize empty ones. A client that resizes them itself knows their sizes.

    Source:
        aten/src/ATen/native/quantized/cpu/fused_obs_fake_quant.cpp, cuda/FusedObsFakeQuant.cu.
    """
    tensor, axis = named["self"], named["ch_axis"]
    for name in ("observer_on", "fake_quant_on"):
        numel_is(named, name, 1)
    # A kernel divides by the number of rows.
    expect(tensor.numel() > 0, "self is empty")
    rows = 1
    if named["per_row_fake_quant"]:
        expect(0 <= axis < tensor.dim(), f"axis {axis} of a tensor of {tensor.dim()} dimensions")
        # Of matrices, kernels look for the range of each row, whichever axis they are given.
        expect(tensor.dim() != 2 or axis == 0, f"axis {axis} of a matrix")
        rows = tensor.shape[axis]
    for name in ("running_min", "running_max", "scale", "zero_point"):
        numel_is(named, name, rows)


def scaled_product(named: Named) -> None:
    """Check a product of matrices with one scale for each, or one for each row and column; nothing else is proven."""
    left, right = named["self"], named["mat2"]
    expect(left.dim() == right.dim() == 2 and left.shape[1] == right.shape[0], "self and mat2 do not fit")
    for name, count, one in (("a", left.shape[0], 0), ("b", right.shape[1], 1)):
        scales, recipes = named[f"scale_{name}"], _numbers(named[f"recipe_{name}"])
        expect(recipes in ([_FOR_ALL], [_FOR_EACH]) and recipes == _numbers(named["recipe_a"]) and len(scales) == 1
               and not any(_numbers(named[f"swizzle_{name}"])), f"scales of kinds that are not run: {recipes}")
        if recipes == [_FOR_ALL]:
            expect(scales[0].numel() == 1, f"scale_{name} has {scales[0].numel()} elements, not 1")
        else:
            size = [count, 1] if not one else [1, count]
            expect(list(scales[0].shape) == size, f"scale_{name} has the size {list(scales[0].shape)}, not {size}")
    if named["bias"] is not None:
        expect(list(named["bias"].shape) == [right.shape[1]], "bias does not fit mat2")


def _numbers(item: object) -> list[object]:
    return list(item) if isinstance(item, (list, tuple)) else [item]


QUANTIZATION: Mapping[str, Rule] = {
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": with_parameters,
    **dict.fromkeys(("_fused_moving_avg_obs_fq_helper", "fused_moving_avg_obs_fake_quant"), observed),
    "_scaled_mm_v2": scaled_product,
}
"""Rules by operator name, without overload."""

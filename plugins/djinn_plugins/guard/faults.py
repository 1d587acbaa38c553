"""Conditions for kernels that fail on ordinary tensors, with processor signals or on sizes that they do not compare."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from djinn_plugins.guard.fused_kernels import Rule
from djinn_plugins.guard.preconditions import Named, expect, expect_as_eager, has_elements, same_size, size_is

__all__ = ("FAULTS", "INTO_OUT")

LARGEST_INDEX = 2**31
"""Maximum pixels of a source that is resampled; kernels count them with integers of this size."""


def _whole(named: Named) -> tuple[torch.Tensor, torch.Tensor, int] | None:
    """Return the operands and the minimum of their dtype, if CPU kernels divide them as integers.

    Integers of less than 32 bits are divided as 32-bit integers.
    """
    left, right = torch.as_tensor(named["self"]), torch.as_tensor(named["other"])
    dtype = torch.result_type(left, right)
    if left.device.type != "cpu" or right.device.type != "cpu" or dtype not in (torch.int32, torch.int64):
        return None
    # Comparing a tensor of fewer bits with a number outside its dtype gives wrong results.
    return left.to(dtype), right.to(dtype), torch.iinfo(dtype).min


def _truncated_division(named: Named) -> None:
    """Check that every quotient fits its dtype; otherwise the processor raises a signal."""
    operands = _whole(named) if named["rounding_mode"] == "trunc" else None
    if operands is not None:
        left, right, least = operands
        expect(not bool(((right == -1) & (left == least)).any()), f"{least} / -1 does not fit")


def _common_multiple(named: Named) -> None:
    """Check that no integer has a negation that overflows: a value that may be -1 divides it."""
    operands = _whole(named)
    if operands is not None:
        left, right, least = operands
        expect(not bool((left == least).any()) and not bool((right == least).any()), f"a multiple of {least}")


def _masked_softmax(named: Named) -> None:
    """Check that the mask has the size of the input, or, in a transformer, of the sequences or of their padding."""
    tensor, mask, kind = named["self"], named["mask"], named["mask_type"]
    expect(mask.dtype is torch.bool, "mask is not boolean")
    dim = -1 if named["dim"] is None else named["dim"]
    is_empty = -tensor.dim() <= dim < tensor.dim() and tensor.shape[dim] == 0
    expect(not is_empty, f"dim {dim} is empty")
    if tensor.dim() == 4 and mask.dim() == 2 and kind in (0, 1):
        size_is(named, "mask", tensor.shape[2:] if kind == 0 else (tensor.shape[0], tensor.shape[3]))
    else:
        same_size(named, "self", "mask")


def _linear_combination(named: Named) -> None:
    tensor, coefficients = named["input"], named["coefficients"]
    expect(tensor.dim() > 0 and coefficients.dim() == 2 and coefficients.shape[1] == tensor.shape[0],
           f"coefficients of the size {list(coefficients.shape)} for {list(tensor.shape)}")
    expect(tensor.dtype is coefficients.dtype, "input and coefficients of other dtypes")
    if "out" in named:
        size_is(named, "out", (coefficients.shape[0], *tensor.shape[1:]))
        expect(named["out"].dtype is tensor.dtype, "input and out of other dtypes")


def _joined(named: Named) -> None:
    """Check that `out` has no zero strides, even in dimensions of one element: the kernel divides by them."""
    out = named.get("out")
    expect(out is None or min(out.stride(), default=1) > 0, "out has a stride of 0")


def _steps(named: Named) -> None:
    """Check that a step that is not 0 is none as an integer either: kernels of PyTorch 2.12 and earlier divide by that.

    Later kernels say so themselves, and all find a step of 0.
    """
    is_divided_by = named["out"].dtype is torch.int64 and torch.__version__ < "2.13"
    expect_as_eager(not (is_divided_by and 0 < abs(named.get("step", 1)) < 1), "step must be nonzero")


def _copied_lists(named: Named) -> None:
    tensors, sources = named["self"], named["src"]
    expect(len(tensors) == len(sources), f"{len(tensors)} and {len(sources)} tensors")


def _resampled(named: Named) -> None:
    """Check that pixels can be counted with the given scales; without scales, kernels use the sizes."""
    wanted = named.get("output_size")
    scales = [named.get(name) for name in ("scales", "scales_d", "scales_h", "scales_w") if name in named]
    for scale, extent in zip(scales, wanted or (), strict=False):
        expect(scale is None or not scale > 0 or (extent + 1) / scale < LARGEST_INDEX, f"a scale of {scale}")


def _solution(named: Named) -> None:
    """Check that there are factors for each right-hand side; the kernel advances to the next factor for each."""
    factors, sides = named["LD"], named["B"]
    expect(factors.dim() >= 2 and sides.dim() >= 2, "LD and B have not 2 dimensions")
    batch = torch.broadcast_shapes(factors.shape[:-2], sides.shape[:-2])
    expect(batch == factors.shape[:-2], f"B of the size {list(sides.shape)} for {list(factors.shape)}")


def _least_squares(named: Named) -> None:
    left, right = named["self"], named["b"]
    is_empty = right.dim() > 0 and right.shape[-1] == 0 and left.numel() > 0
    expect(named.get("driver") != "gelss" or not is_empty, "b has no columns")


def _noise(named: Named) -> None:
    same_size(named, "self", *(name for name in ("noise", "out") if name in named))


def _averaged(named: Named) -> None:
    gradient, tensor = named["grad_output"], named["self"]
    expect(gradient.dim() == tensor.dim() and gradient.shape[:-3] == tensor.shape[:-3], "grad_output of other planes")
    expect(not gradient.numel() or tensor.numel() > 0, "a gradient for nothing")


def _weight_norm(named: Named) -> None:
    weight, dim = named["v"], named["dim"]
    if weight.dim() and dim in (0, weight.dim() - 1):
        expect(named["g"].numel() == weight.shape[dim] > 0, "g does not fit v")


def _unpacked(named: Named) -> None:
    """Check that batches do not grow, and that there are enough rows: each batch is written behind the previous one."""
    data, sizes = named["data"], named["batch_sizes"]
    expect(sizes.dim() == 1 and sizes.numel() > 0 and data.dim() > 0, "batch_sizes has not 1 dimension, or no elements")
    if not has_elements(sizes):
        return
    batches = [int(size) for size in sizes]
    expect(batches == sorted(batches, reverse=True) and batches[-1] > 0 and sum(batches) == data.shape[0],
           f"batch_sizes {batches[:8]} for {data.shape[0]} rows")


def _sized_pool(named: Named) -> None:
    """Check the size of the result: the kernel gives it to an `out` first. PyTorch keeps pointers in sizes, too."""
    size = [named["output_size"]] if isinstance(named["output_size"], int) else named["output_size"]
    least = min(size, default=0)
    expect_as_eager(least >= 0, f"Trying to create tensor with negative dimension {least}")
    expect(prod(max(extent, 0) for extent in size) < 2**40, f"the size {list(size)}")


def _fractional_pool(named: Named) -> None:
    """Check the window, too, which the kernel counts with integers of 32 bits."""
    window = named["kernel_size"]
    sizes = [window] if isinstance(window, int) else window
    expect(all(0 <= extent < 2**31 for extent in sizes), f"a window of the size {list(sizes)}")
    _sized_pool(named)


def _powers(named: Named) -> None:
    """Check that complex numbers are summed in a complex dtype, as `linalg_vector_norm` does; this kernel does not."""
    tensors, dtype = named["self"], named["dtype"]
    for tensor in tensors if isinstance(tensors, (list, tuple)) else (tensors,):
        expect(dtype is None or dtype.is_complex or not tensor.is_complex(), f"{tensor.dtype} summed as {dtype}")


def _eigenvalues(named: Named) -> None:
    """Check that numbers are finite, as `linalg_eig` does: LAPACK goes on with sizes that it has not set."""
    tensor = named["self"]
    expect_as_eager(not has_elements(tensor) or bool(torch.isfinite(tensor).all()),
                    "torch.linalg.eigvals: input tensor should not contain infs or NaNs.")


def _distances(named: Named) -> None:
    expect_as_eager(named["self"].dim() == 2, f"pdist only supports 2D tensors, got: {named['self'].dim()}D")


def _sums_into(named: Named) -> None:
    """Check that sums are written to a tensor of their own dtype: only the public operator sees to that."""
    if "out" in named:
        expect(named["out"].dtype is named["self"].dtype, f"{named['self'].dtype} written as {named['out'].dtype}")


_RESAMPLING = [f"{kind}d{suffix}" for suffix in ("", "_backward") for kind in (
    *(f"upsample_{kind}" for kind in ("nearest1", "nearest2", "nearest3", "linear1", "bilinear2", "trilinear3",
                                      "bicubic2")),
    *(f"_upsample_nearest_exact{rank}" for rank in (1, 2, 3)))]

_JOINING = (
    "cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "row_stack", "column_stack", "_chunk_cat")
INTO_OUT = frozenset((*_JOINING, "arange"))
"""Of these operators, only overloads with an argument `out` have a rule."""

FAULTS: Mapping[str, Rule] = {
    **dict.fromkeys(("div", "div_", "divide", "divide_"), _truncated_division),
    **dict.fromkeys(("lcm", "lcm_"), _common_multiple),
    "_masked_softmax": _masked_softmax,
    "_compute_linear_combination": _linear_combination,
    "_foreach_copy": _copied_lists,
    "_pad_packed_sequence": _unpacked,
    **dict.fromkeys(_JOINING, _joined),
    "arange": _steps,
    **dict.fromkeys(_RESAMPLING, _resampled),
    "linalg_lstsq": _least_squares,
    **dict.fromkeys(("rrelu_with_noise", "rrelu_with_noise_"), _noise),
    "_weight_norm": _weight_norm,
    "linalg_ldl_solve": _solution,
    "adaptive_avg_pool3d_backward": _averaged,
    **dict.fromkeys(("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "adaptive_avg_pool3d",
                     "_adaptive_avg_pool3d"), _sized_pool),
    **dict.fromkeys(("fractional_max_pool2d", "fractional_max_pool3d"), _fractional_pool),
    **dict.fromkeys(("linalg_eigvals", "_linalg_eigvals"), _eigenvalues),
    "_logcumsumexp": _sums_into,
    "_pdist_forward": _distances,
    **dict.fromkeys(("linalg__powsum", "_foreach_powsum"), _powers),
}
"""Rules by operator name, without overload."""

"""Dtypes that no kernel of an operator takes, or not each device's, though meta takes them.

Only the first operand counts, by which eager chooses the kernel. Inference gives no answer to such a call; the executor
is asked, and raises what eager raises, at the user's line. It is asked once per metadata, so what only some devices
refuse is here, too. Found by calls of all operators of PyTorch's own tests with dtypes that they do not list.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

__all__ = ("has_kernel",)

_SINGLE = frozenset((torch.float32, torch.float64))
_FLOATS = _SINGLE | {torch.float16, torch.bfloat16}
_COMPLEX = frozenset((torch.complex64, torch.complex128))
_INTEGERS = frozenset((torch.int8, torch.int16, torch.int32, torch.int64))
_PIXELS = _FLOATS | {torch.uint8}
_NUMBERS = _FLOATS | _COMPLEX | _INTEGERS | {torch.uint8}

_TAKEN: Mapping[str, frozenset[torch.dtype]] = {
    "abs addcmul bucketize searchsorted ceil floor trunc clamp clamp_min clamp_max index_reduce median nanmedian "
    "mvlgamma reflection_pad1d reflection_pad2d reflection_pad3d round relu threshold trace _trilinear": _NUMBERS,
    "convolution _convolution": _FLOATS | _COMPLEX | _INTEGERS,
    "addcdiv frac im2col lerp logcumsumexp mish prelu _prelu_kernel silu std std_mean var var_mean "
    "mse_loss": _FLOATS | _COMPLEX,
    "binary_cross_entropy celu elu gelu glu grid_sampler_2d grid_sampler_3d hardshrink hardsigmoid hardswish "
    "huber_loss igamma igammac log_sigmoid_forward max_pool2d_with_indices_backward max_unpool2d max_unpool3d "
    "multi_margin_loss nll_loss_forward nll_loss2d_forward rrelu_with_noise segment_reduce smooth_l1_loss "
    "soft_margin_loss softplus upsample_linear1d upsample_trilinear3d": _FLOATS,
    "upsample_(nearest|bilinear|bicubic).* _upsample_.*": _PIXELS,
    "_?cholesky(_inverse|_solve|_solve_helper)? geqrf _linalg_(?!check_errors)[a-z_]* triangular_solve "
    "linalg_(cholesky|eigh|eig|householder|inv|ldl|lu|qr|solve)[a-z_]*": _SINGLE | _COMPLEX,
    "_cdist_forward _pdist_forward": _SINGLE,
    # They compute integers in float32.
    r"special_(airy_ai|erfcx|log_ndtr|ndtri|zeta) special_[a-z_]*(bessel|polynomial)_[a-z0-9_]*": (
        _NUMBERS | {torch.bool}) - {torch.float16, torch.bfloat16},
}
_PATTERNS = tuple((re.compile("|".join(names.split())), dtypes) for names, dtypes in _TAKEN.items())


def has_kernel(base: str, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether each device runs an operator, by its name without overload, on these operands' dtypes."""
    if not tensors:
        return True
    return all(tensors[0].dtype in dtypes for pattern, dtypes in _PATTERNS if pattern.fullmatch(base))

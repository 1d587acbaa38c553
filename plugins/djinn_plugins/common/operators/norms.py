"""Batch norm and RMS norm on a device that has kernels for them, as operators of the namespace ``djinn``.

On a CUDA device PyTorch computes batch norm with cuDNN or with its own kernels, by the metadata of the call and by
switches. These operators let it choose where they run.

cuDNN's forward pass leaves a reserve for the backward pass, whose size only cuDNN knows. The reserve does not leave
these operators: where there is one, the backward operator runs the forward pass again, without running statistics,
which gives the same reserve. So a client knows the metadata of each result without a question, and a server need not
trust bytes that cuDNN would take for granted.

RMS norm with gradients has a fused kernel each way on a CUDA device. Elsewhere these operators compute its formula.

Source:
    ``_select_batch_norm_backend`` and ``_batch_norm_impl_index`` of aten/src/ATen/native/Normalization.cpp;
    ``_get_cudnn_batch_norm_reserve_space_size`` of aten/src/ATen/native/cudnn/BatchNorm.cpp; ``rms_norm_symint`` of
    aten/src/ATen/native/layer_norm.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch._prims_common import suggest_memory_format

from djinn_plugins.common.once import once
from djinn_plugins.common.operators.own import define_operators

__all__ = ("NORM_OPERATORS", "NormOperators", "dtype_of_rms", "norm_operators", "rms_gradients", "size_of_rms")

_TRAINING, _INFERENCE, _BACKWARD = "batch_norm_training", "batch_norm_inference", "batch_norm_gradients"
_RMS, _RMS_BACKWARD = "rms_norm_training", "rms_norm_gradients"
_SCHEMAS = {
    _TRAINING: "(Tensor input, Tensor weight, Tensor bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
               "float momentum, float eps) -> (Tensor, Tensor, Tensor)",
    _INFERENCE: "(Tensor input, Tensor weight, Tensor bias, Tensor mean, Tensor variance, float eps) "
                "-> (Tensor, Tensor, Tensor)",
    _BACKWARD: "(Tensor grad_out, Tensor input, Tensor weight, Tensor save_mean, Tensor save_invstd, float eps) "
               "-> (Tensor, Tensor, Tensor)",
    _RMS: "(Tensor input, int[] normalized_shape, Tensor? weight, float? eps) -> (Tensor, Tensor)",
    _RMS_BACKWARD: "(Tensor grad_out, Tensor input, int[] normalized_shape, Tensor rstd, Tensor? weight) "
                   "-> (Tensor, Tensor)",
}
NORM_OPERATORS = frozenset(f"djinn::{name}" for name in _SCHEMAS)
"""Their names."""
aten = torch.ops.aten


class NormOperators(NamedTuple):
    """The operators.

    Attributes:
        training: Returns the result, and mean and inverse standard deviation of each channel.
        inference: Returns the result, and two empty tensors.
        backward: Returns the gradients of input, weight and bias, in training.
        rms_training: RMS norm; returns the result, and the inverse root mean squares.
        rms_backward: Returns the gradients of its input and its weight; an empty one, if there is no weight.
    """

    training: Any
    inference: Any
    backward: Any
    rms_training: Any
    rms_backward: Any


@once
def norm_operators() -> NormOperators:
    """Return the operators; the first call defines them."""
    kernels = {_TRAINING: (_training, _training_meta), _INFERENCE: (_inference, _inference_meta),
               _BACKWARD: (_backward, _backward_meta), _RMS: (_rms, _rms_meta),
               _RMS_BACKWARD: (_rms_backward, _rms_backward_meta)}
    return NormOperators(*define_operators(_SCHEMAS, kernels))


def _dense(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=suggest_memory_format(like))


def _training(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor,  # noqa: A002  # PyTorch's name
    running_mean: torch.Tensor | None, running_var: torch.Tensor | None, momentum: float, eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    found, mean, invstd, *_ = aten._batch_norm_impl_index(
        _dense(input, input), weight, bias, running_mean, running_var, True, momentum, eps, True)
    return found, mean.to(weight.dtype), invstd.to(weight.dtype)


def _training_meta(
    input: torch.Tensor, weight: torch.Tensor, *_: Any  # noqa: A002  # PyTorch's name
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _empty(input), weight.new_empty(input.shape[1]), weight.new_empty(input.shape[1])


def _inference(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor,  # noqa: A002  # PyTorch's name
    mean: torch.Tensor, variance: torch.Tensor, eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    found = aten._batch_norm_impl_index(_dense(input, input), weight, bias, mean, variance, False, 0.0, eps, True)[0]
    return found, weight.new_empty(0), weight.new_empty(0)


def _inference_meta(
    input: torch.Tensor, weight: torch.Tensor, *_: Any  # noqa: A002  # PyTorch's name
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _empty(input), weight.new_empty(0), weight.new_empty(0)


def _backward(
    grad_out: torch.Tensor, input: torch.Tensor, weight: torch.Tensor,  # noqa: A002  # PyTorch's name
    save_mean: torch.Tensor, save_invstd: torch.Tensor, eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dense, weight = _dense(input, input), weight.contiguous()
    index, reserve = 0, torch.empty(0, dtype=torch.uint8, device=input.device)
    if input.is_cuda and _is_for_cudnn(dense, weight, save_mean, save_invstd, eps):
        index = 1
        if torch._C._get_cudnn_batch_norm_reserve_space_size(dense, True):  # type: ignore[attr-defined]  # not in stubs
            reserve = aten._batch_norm_impl_index(dense, weight, weight, None, None, True, 0.0, eps, True)[3]
    found = aten._batch_norm_impl_index_backward(
        index, dense, _dense(grad_out, dense), weight, None, None, save_mean, save_invstd, True, eps, [True] * 3,
        reserve)
    return found[0], found[1].to(weight.dtype), found[2].to(weight.dtype)


def _is_for_cudnn(
    tensor: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, eps: float
) -> bool:
    # PyTorch only looks whether there are statistics, and any tensors will do for them, and for the bias.
    chosen = torch._C._select_batch_norm_backend(tensor, weight, weight, mean, variance, True, eps)
    return bool(chosen == torch._C._BatchNormBackend.Cudnn)  # type: ignore[attr-defined]  # has another name in stubs


def _backward_meta(
    grad_out: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, *_: Any,  # noqa: A002  # PyTorch's name
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _empty(input), weight.new_empty(weight.shape), weight.new_empty(weight.shape)


def _empty(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device, memory_format=suggest_memory_format(like))


def size_of_rms(tensor: torch.Tensor, normalized_shape: Sequence[int]) -> tuple[int, ...]:
    """Return the size of the inverse root mean squares of a tensor."""
    return (*tensor.shape[: tensor.dim() - len(normalized_shape)], *(1 for _ in normalized_shape))


def dtype_of_rms(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the inverse root mean squares of a tensor of some dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_gradients(
    grad_out: torch.Tensor, input: torch.Tensor, normalized_shape: Sequence[int],  # noqa: A002  # PyTorch's name
    rstd: torch.Tensor, weight: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of RMS norm with respect to its input and its weight, by their formula."""
    outer = list(range(input.dim() - len(normalized_shape)))
    inner = list(range(len(outer), input.dim()))
    scaled, given = input.to(rstd.dtype) * rstd, grad_out.to(rstd.dtype)
    onward = given if weight is None else given * weight
    found = rstd * (onward - scaled * (onward * scaled).mean(inner, keepdim=True))
    of_weight = input.new_empty(0) if weight is None else (given * scaled).sum(outer).to(weight.dtype) if outer else (
        (given * scaled).to(weight.dtype))
    return found.to(input.dtype), of_weight


def _rms(
    input: torch.Tensor, normalized_shape: Sequence[int],  # noqa: A002  # PyTorch's name
    weight: torch.Tensor | None, eps: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    found, rstd = aten._fused_rms_norm(input, normalized_shape, weight, eps)
    return found.contiguous(), rstd.to(dtype_of_rms(input.dtype)).contiguous()


def _rms_meta(
    input: torch.Tensor, normalized_shape: Sequence[int], *_: Any  # noqa: A002  # PyTorch's name
) -> tuple[torch.Tensor, torch.Tensor]:
    return input.new_empty(input.shape), input.new_empty(
        size_of_rms(input, normalized_shape), dtype=dtype_of_rms(input.dtype))


def _rms_backward(
    grad_out: torch.Tensor, input: torch.Tensor, normalized_shape: Sequence[int],  # noqa: A002  # PyTorch's name
    rstd: torch.Tensor, weight: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if input.is_cuda:
        found, of_weight = aten._fused_rms_norm_backward(
            grad_out, input, normalized_shape, rstd, weight, [True, weight is not None])
        of_weight = input.new_empty(0) if weight is None else of_weight
    else:
        found, of_weight = rms_gradients(grad_out, input, normalized_shape, rstd, weight)
    return found.contiguous(), of_weight.contiguous()


def _rms_backward_meta(
    grad_out: torch.Tensor, input: torch.Tensor, normalized_shape: Sequence[int],  # noqa: A002  # PyTorch's name
    rstd: torch.Tensor, weight: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return input.new_empty(input.shape), input.new_empty(0) if weight is None else weight.new_empty(weight.shape)

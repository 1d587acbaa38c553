"""Batch norm on a device whose library has kernels for it, as operators of the namespace ``djinn``.

On a CUDA device PyTorch computes batch norm with cuDNN or with its own kernels, by the metadata of the call and by
switches. These operators let it choose where they run.

cuDNN's forward pass leaves a reserve for the backward pass, whose size only cuDNN knows. The reserve does not leave
these operators: where there is one, the backward operator runs the forward pass again, without running statistics,
which gives the same reserve. So a client knows the metadata of each result without a question, and a server need not
trust bytes that cuDNN would take for granted.

Source:
    ``_select_batch_norm_backend`` and ``_batch_norm_impl_index`` of aten/src/ATen/native/Normalization.cpp;
    ``_get_cudnn_batch_norm_reserve_space_size`` of aten/src/ATen/native/cudnn/BatchNorm.cpp.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch._prims_common import suggest_memory_format

from djinn_lib_service.own_operators import define_operators

__all__ = ("NORM_OPERATORS", "NormOperators", "norm_operators")

_TRAINING, _INFERENCE, _BACKWARD = "batch_norm_training", "batch_norm_inference", "batch_norm_gradients"
_SCHEMAS = {
    _TRAINING: "(Tensor input, Tensor weight, Tensor bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
               "float momentum, float eps) -> (Tensor, Tensor, Tensor)",
    _INFERENCE: "(Tensor input, Tensor weight, Tensor bias, Tensor mean, Tensor variance, float eps) "
                "-> (Tensor, Tensor, Tensor)",
    _BACKWARD: "(Tensor grad_out, Tensor input, Tensor weight, Tensor save_mean, Tensor save_invstd, float eps) "
               "-> (Tensor, Tensor, Tensor)",
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
    """

    training: Any
    inference: Any
    backward: Any


@cache
def norm_operators() -> NormOperators:
    """Return the operators; the first call defines them."""
    kernels = {_TRAINING: (_training, _training_meta), _INFERENCE: (_inference, _inference_meta),
               _BACKWARD: (_backward, _backward_meta)}
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

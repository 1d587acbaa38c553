"""Batch norm and RMS norm by the kernels of the executor's device, where local PyTorch on such a device takes these.

Source:
    ``_select_batch_norm_backend`` of aten/src/ATen/native/Normalization.cpp; ``rms_norm_symint`` of
    aten/src/ATen/native/layer_norm.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._prims_common import suggest_memory_format

from djinn.record import devices
from djinn.record.tensor import LazyTensor
from djinn_plugins.common.device_report import device_of
from djinn_plugins.common.operators.norms import norm_operators, rms_gradients
from djinn_plugins.device.interceptor import gradients

if TYPE_CHECKING:
    from djinn.session.session import Session

__all__ = ("batch_norm", "batch_norm_backward", "rms_norm")

_MAX_BATCH = {True: 880_801, False: 65_535}
"""Most samples that cuDNN takes in training and in inference."""
_DTYPES = {torch.float16: torch.float32, torch.float32: torch.float32, torch.float64: torch.float64}
"""Dtypes of inputs that cuDNN takes, and those of their weights."""
_RMS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes for which there is a kernel of RMS norm."""


def batch_norm(
    session: Session, tensor: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float,
    eps: float,
) -> Any:
    """Record a forward pass; ``NotImplemented`` if PyTorch takes its own kernel."""
    statistics = [given for given in (mean, variance) if given is not None]
    if len(statistics) == 1 or not (statistics or training):
        return NotImplemented
    if not _is_for_cudnn(session, tensor, (weight, bias, *statistics), training=training):
        return NotImplemented
    if training:
        return _recorded(session, norm_operators().training, tensor, weight, bias, mean, variance, momentum, eps)
    return _recorded(session, norm_operators().inference, tensor, weight, bias, mean, variance, eps)


def batch_norm_backward(
    session: Session, gradient: Any, tensor: Any, weight: Any, mean: Any, variance: Any, save_mean: Any,
    save_invstd: Any, train: bool, eps: float, mask: Sequence[bool],
) -> Any:
    """Record a backward pass; ``NotImplemented`` if PyTorch takes its own kernel, as always in inference."""
    if not train or not isinstance(gradient, LazyTensor) or gradient.dtype != tensor.dtype or (
            not _is_for_cudnn(session, tensor, (weight, save_mean, save_invstd), training=True)):
        return NotImplemented
    gradients = _recorded(session, norm_operators().backward, gradient, tensor, weight, save_mean, save_invstd, eps)
    return tuple(made if wanted else None for made, wanted in zip(gradients, mask, strict=True))


class _RmsNorm(torch.autograd.Function):
    """RMS norm with the kernels of the executor's device for both passes."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, weight: torch.Tensor | None, size: Sequence[int], eps: float | None
    ) -> Any:
        found, rstd = norm_operators().rms_training(tensor, size, weight, eps)
        ctx.save_for_backward(tensor, weight, rstd)
        ctx.size = size
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensor, weight, rstd = ctx.saved_tensors
        if torch.is_grad_enabled():
            # Gradients of these gradients need operations that autograd knows; the numbers stay those of the kernel.
            inner = list(range(tensor.dim() - len(ctx.size), tensor.dim()))
            mean = tensor.to(rstd.dtype).square().mean(inner, keepdim=True)
            again = (mean + (rstd.pow(-2) - mean).detach()).rsqrt()
            found, of_weight = rms_gradients(gradient, tensor, ctx.size, again, weight)
        else:
            found, of_weight = norm_operators().rms_backward(gradient, tensor, ctx.size, rstd, weight)
        return found, None if weight is None else of_weight, None, None


def rms_norm(
    session: Session, input: Any, normalized_shape: Sequence[int],  # noqa: A002  # PyTorch's name
    weight: Any = None, eps: float | None = None,
) -> Any:
    """Record a forward pass whose gradients are needed; ``NotImplemented`` if PyTorch decomposes the call."""
    if device_of(session.backend.welcome).kind != "cuda" or gradients.is_transformed() or (
            torch.is_autocast_enabled(devices.logical_device().type)):
        return NotImplemented
    tensors = (input,) if weight is None else (input, weight)
    if input.dtype not in _RMS or not all(
            isinstance(given, LazyTensor) and given.dtype == input.dtype for given in tensors):
        return NotImplemented
    size = list(normalized_shape)
    fits = 0 < len(size) <= input.dim() and list(input.shape[-len(size):]) == size and input.numel() > 0 and (
        weight is None or list(weight.shape) == size)
    if not fits or suggest_memory_format(input) != torch.contiguous_format:
        return NotImplemented
    return _RmsNorm.apply(input, weight, size, eps)  # type: ignore[no-untyped-call]  # untyped there


def _recorded(session: Session, operator: Any, *args: Any) -> Any:
    return session.recorder.record(session.recorder.binding(operator), operator, args, {})


def _is_for_cudnn(session: Session, tensor: Any, channels: Sequence[Any], *, training: bool) -> bool:
    if not all(isinstance(given, LazyTensor) for given in (tensor, *channels)) or tensor.dim() < 3:
        return False
    device = device_of(session.backend.welcome)
    return (
        bool(device.kind == "cuda" and device.cudnn and torch.backends.cudnn.enabled)
        and all(given.dtype == _DTYPES.get(tensor.dtype) and given.shape == (tensor.shape[1],) for given in channels)
        and tensor.shape[0] <= _MAX_BATCH[training] and 0 < tensor.numel() < 2**31 - 1)

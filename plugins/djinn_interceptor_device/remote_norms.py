"""Batch norm by the executor's own choice of a kernel, where local PyTorch on such a device takes one of cuDNN's.

Source:
    ``_select_batch_norm_backend`` of aten/src/ATen/native/Normalization.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from djinn_lib_service.device_report import device_of
from djinn_lib_service.norm_operators import norm_operators

from djinn.record.tensor import LazyTensor

if TYPE_CHECKING:
    from djinn.session.session import Session

__all__ = ("batch_norm", "batch_norm_backward")

_MAX_BATCH = {True: 880_801, False: 65_535}
"""Most samples that cuDNN takes in training and in inference."""
_DTYPES = {torch.float16: torch.float32, torch.float32: torch.float32, torch.float64: torch.float64}
"""Dtypes of inputs that cuDNN takes, and those of their weights."""


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
    return _recorded(session, norm_operators().backward, gradient, tensor, weight, save_mean, save_invstd, eps)


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

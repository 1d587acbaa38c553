"""DLPack: a tensor on the device has no memory here to share, but a consumer may ask for a copy on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.dlpack import DLDeviceType

from djinn.errors import UnsupportedTensorError
from djinn.kinds.interceptor import FunctionHandler

_CPU = (int(DLDeviceType.kDLCPU), 0)


class NoMemoryError(UnsupportedTensorError, BufferError):
    """A consumer asks for the memory of a remote tensor. By the protocol, a refusal is a ``BufferError``."""


def _export(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle ``Tensor.__dlpack__``.

    Raises:
        BufferError: The tensor needs gradients or is conjugated, in PyTorch's words; or what is asked for is no copy on
            the CPU.
    """
    (tensor,), wanted = args, kwargs.get("dl_device")
    if tensor.requires_grad:
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
    if tensor.is_conj():
        raise BufferError("Can't export tensors with the conjugate bit set")
    if wanted is None or tuple(map(int, wanted)) != _CPU or kwargs.get("copy") is False:
        raise NoMemoryError("A tensor on a remote accelerator has no memory here to share.",
                            hint="Use tensor.cpu() to bring its data home.")
    # What is downloaded may be kept as the value of the tensor: the consumer, which may write, has a copy of its own.
    return tensor.cpu().clone().__dlpack__(max_version=kwargs.get("max_version"))


def _device(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int]:
    """Handle ``Tensor.__dlpack_device__``: DLPack has one type for all devices that it does not know."""
    return DLDeviceType.kDLExtDev, args[0].device.index or 0


FUNCTIONS: Mapping[Callable[..., Any], FunctionHandler] = {
    torch.Tensor.__dlpack__: _export,
    torch.Tensor.__dlpack_device__: _device,
}

"""Modes for recording a captured graph: they redirect its use of the CPU to the remote accelerator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from djinn.record import devices
from djinn.record.tensor import LazyTensor

_NAMES_A_DEVICE = frozenset({torch.Tensor.to, torch.amp.autocast_mode._enter_autocast})
"""Functions that take a device, or its type, as a positional string."""


class _RemoteInsteadOfCpu(TorchFunctionMode):
    """Redirects factories and moves to the CPU; on the CPU, ``cpu()`` returns the tensor itself.

    Attributes:
        made: The tensors that the factories made.
    """

    def __init__(self) -> None:
        self._device = devices.logical_device()
        self.made: list[LazyTensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cpu:
            return args[0]
        if any(isinstance(item, (str, torch.device)) for item in args):
            args = tuple(self._redirected(item, is_text=func in _NAMES_A_DEVICE) for item in args)
        for name in ("device", "device_type"):
            if name in kwargs:
                kwargs[name] = self._redirected(kwargs[name], is_text=True)
        if func not in _device_constructors():
            return func(*args, **kwargs)
        if kwargs.get("device") is None:
            kwargs["device"] = self._device
        result = func(*args, **kwargs)
        if isinstance(result, LazyTensor):
            self.made.append(result)
        return result

    def _redirected(self, item: Any, *, is_text: bool) -> Any:
        if isinstance(item, torch.device):
            return self._device if item.type == "cpu" else item
        return self._device.type if is_text and item == "cpu" else item


@contextlib.contextmanager
def recording_remotely() -> Iterator[list[LazyTensor]]:
    """Run a captured graph on lazy tensors as if on ordinary ones here; yields the tensors of its factories."""
    with contextlib.ExitStack() as stack:
        if torch.is_autocast_enabled("cpu"):
            # Without the cache: a cast from an earlier recording would be missing in this one.
            stack.enter_context(torch.autocast(devices.logical_device().type, torch.get_autocast_dtype("cpu"),
                                               cache_enabled=False))
        mode = _RemoteInsteadOfCpu()
        stack.enter_context(mode)
        yield mode.made

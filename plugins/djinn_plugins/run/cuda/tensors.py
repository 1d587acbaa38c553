"""Methods and functions that name a device, and that do not reach the dispatcher with it."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nested._internal.nested_tensor import NestedTensor
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]  # missing from its __all__
from torch.utils import _device

from djinn.record import devices
from djinn.record.tensor import LazyTensor
from djinn_plugins.common.imports import follow_imports
from djinn_plugins.device.accelerator.patches import Patches
from djinn_plugins.device.sparse.tensor import LazySparse
from djinn_plugins.run.cuda.classes import class_like
from djinn_plugins.run.cuda.translation import remote_device, translated, with_device

__all__ = ("replace",)

_FUNCTIONS = (
    "as_tensor asarray sparse_bsc_tensor sparse_bsr_tensor sparse_compressed_tensor sparse_coo_tensor "
    "sparse_csc_tensor sparse_csr_tensor tensor"
).split()
_PRIORITY = 5
"""Before CPU storages, whose turn is at 10: `_tag` and `_load` leave these alone."""


def replace(patches: Patches) -> None:
    """Replace them until the patches are closed."""
    for name in _FUNCTIONS:
        patches.set_function(name, translated(getattr(torch, name)))
    patches.set(torch.Tensor, "to", _to(torch.Tensor.to))
    uninitialized = UninitializedTensorMixin
    patches.set(uninitialized, "_allowed_methods", [*uninitialized._allowed_methods, torch.Tensor.to])
    patches.set(torch.Tensor, "new_tensor", translated(torch.Tensor.new_tensor))
    patches.set(torch.Tensor, "pin_memory", _pin_memory(torch.Tensor.pin_memory))
    patches.set(torch.Tensor, "is_pinned", _pin_memory(torch.Tensor.is_pinned))
    patches.set(torch.Tensor, "cuda", _cuda)
    for kind in (LazyTensor, LazySparse, NestedTensor):
        patches.set(kind, "is_cuda", _IS_CUDA)
    watch = follow_imports(("torch.distributed.tensor._api",),
                           lambda module: patches.set(module.DTensor, "is_cuda", _IS_CUDA))
    patches.on_close(sys.meta_path.remove, watch)
    patches.set(_device.DeviceContext, "__init__", _device_context(_device.DeviceContext.__init__))
    patches.set(FakeTensorMode, "dispatch", _dispatch_fake(FakeTensorMode.dispatch))
    patches.set(torch.jit, "load", _jit_load(torch.jit.load))
    for name in ("Event", "Generator", "Stream"):
        patches.set(torch, name, _of_device(getattr(torch, name)))
    registry = torch.serialization._package_registry
    torch.serialization.register_package(_PRIORITY, _tag, _load)
    patches.on_close(registry.remove, (_PRIORITY, _tag, _load))


_IS_CUDA = property(lambda self: self.device.type == devices.logical_device().type)


def _to(original: Any) -> Any:
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As ``torch.Tensor.to``; CUDA is the remote device."""
        if args:
            first = args[0]  # few are CUDA's, and calls are many
            if first.startswith("cuda") if type(first) is str else type(first) is torch.device and first.type == "cuda":
                args = (remote_device(first), *args[1:])
        elif "device" in kwargs:
            kwargs["device"] = remote_device(kwargs["device"])
        if type(self) is LazyTensor and not torch._C._is_torch_function_mode_enabled():
            # Otherwise PyTorch would look the function up, find this one, and call it again.
            return LazyTensor.__torch_function__(original, (LazyTensor,), (self, *args), kwargs)
        return original(self, *args, **kwargs)

    return to


def _cuda(self: torch.Tensor, device: Any = None, non_blocking: bool = False,
          memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
    """Return the tensor on the remote device."""
    return self.to(with_device(device), non_blocking=non_blocking, memory_format=memory_format)


def _pin_memory(original: Any) -> Any:
    def call(self: torch.Tensor, device: Any = None) -> Any:
        """As the original; CUDA is the remote device, which is the accelerator of this process."""
        if device is None or torch.device(remote_device(device)).type == devices.logical_device().type:
            return original(self)
        return original(self, device)

    return call


def _jit_load(original: Any) -> Any:
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As the original, whose C++ code can load to the CPU; a module that belongs elsewhere moves then."""
        device = remote_device(map_location)
        if device is map_location:
            return original(f, map_location, *args, **kwargs)
        return original(f, "cpu", *args, **kwargs).to(device)

    return load


def _dispatch_fake(original: Any) -> Any:
    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As the original; fake tensors on CUDA are on the remote device."""
        if kwargs and "device" in kwargs:
            kwargs = {**kwargs, "device": remote_device(kwargs["device"])}
        return original(self, func, types, args, kwargs)

    return dispatch


def _device_context(original: Any) -> Any:
    def __init__(self: Any, device: Any) -> None:  # noqa: N807  # replaces that method
        original(self, remote_device(device))

    return __init__


def _of_device(original: Any) -> Any:
    """Make a class like the original, whose first argument is a device."""
    def make(*args: Any, **kwargs: Any) -> Any:
        if args:
            args = (remote_device(args[0]), *args[1:])
        elif "device" in kwargs:
            kwargs["device"] = remote_device(kwargs["device"])
        return original(*args, **kwargs)

    return class_like(original, make)


def _tag(storage: Any) -> str | None:
    """Save remote storages as CUDA writes them, so that the script loads them to where they were."""
    device = storage.device
    return f"cuda:{device.index or 0}" if device.type == devices.logical_device().type else None


def _load(storage: Any, location: str) -> Any:
    """Load a storage that ``map_location``, or the file, maps to CUDA."""
    if not location.startswith("cuda"):
        return None
    device = torch.serialization._validate_device(location, "cuda")
    return torch.serialization.default_restore_location(storage, str(remote_device(device)))

"""Autocast of ``cuda``: it is that of the remote device, whose lists are those of the executor's device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from djinn.record import devices
from djinn_plugins.device.accelerator.patches import Patches

__all__ = ("replace",)

_BY_TYPE = "is_autocast_enabled set_autocast_enabled get_autocast_dtype set_autocast_dtype".split()


def replace(patches: Patches) -> None:
    """Replace the functions until the patches are closed."""
    for name in _BY_TYPE:
        patches.set_function(name, _by_type(getattr(torch, name)))
    patches.set_function("get_autocast_gpu_dtype", functools.partial(torch.get_autocast_dtype, "cuda"))
    patches.set_function("set_autocast_gpu_dtype", functools.partial(torch.set_autocast_dtype, "cuda"))
    autocast = torch.amp.autocast_mode.autocast
    patches.set(autocast, "__init__", _init(autocast.__init__))


def _remote_type(device_type: str) -> str:
    return devices.logical_device().type if device_type == "cuda" else device_type


def _by_type(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any) -> Any:
        # Older programs name no type, and mean CUDA.
        named = args if args and isinstance(args[0], str) else ("cuda", *args)
        return original(_remote_type(named[0]), *named[1:])

    return call


def _init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, device_type: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # replaces that method
        original(self, _remote_type(device_type), *args, **kwargs)

    return __init__

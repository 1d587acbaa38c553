"""PyTorch's profiler: the activity CUDA measures the remote device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from djinn.record import devices
from djinn_plugins.device.accelerator.patches import Patches

__all__ = ("replace",)


def replace(patches: Patches) -> None:
    """Replace the constructor of the profiler until the patches are closed."""
    profiler = torch.autograd.profiler.profile
    patches.set(profiler, "__init__", _init(profiler.__init__))


def _init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, enabled: Any = True, **kwargs: Any) -> None:  # noqa: N807  # replaces that method
        if kwargs.pop("use_cuda", False) or kwargs.get("use_device") == "cuda":
            kwargs["use_device"] = devices.logical_device().type
        original(self, enabled, **kwargs)

    return __init__

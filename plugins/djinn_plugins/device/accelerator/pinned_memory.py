"""Pinned memory while the remote device is the accelerator: ordinary memory with a mark.

Uploads read both equally fast. PyTorch's functions that make pinned tensors ask the device for an allocator, which can
only be implemented in C++, so those of Python's interface are replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from djinn_plugins.device.accelerator.patches import Patches

__all__ = ("is_marked", "marked", "pinned_factories")

_FACTORIES = (
    "arange empty empty_like empty_permuted empty_strided eye full full_like linspace logspace ones ones_like rand "
    "rand_like randint randint_like randn randn_like randperm zeros zeros_like"
).split()


def marked(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a tensor's memory as pinned, and return the tensor."""
    # PyTorch keeps the Python object of a storage as long as the storage.
    tensor.untyped_storage()._is_pinned_for_remote = True  # type: ignore[attr-defined]  # our mark
    return tensor


def is_marked(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is marked."""
    return hasattr(tensor.untyped_storage(), "_is_pinned_for_remote")


def pinned_factories() -> Patches:
    """Let ``torch.empty(..., pin_memory=True)`` and others work until the result is closed."""
    patches = Patches()
    if not torch.cuda.is_available():  # otherwise this machine pins memory itself
        for name in _FACTORIES:
            patches.set_function(name, _pinning(getattr(torch, name)))
    return patches


def _pinning(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> torch.Tensor:
        if not kwargs.get("pin_memory"):
            return original(*args, **kwargs)
        made = original(*args, **{**kwargs, "pin_memory": False})
        return marked(made) if made.device.type == "cpu" else made

    return factory

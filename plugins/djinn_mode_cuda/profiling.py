"""PyTorch's profiler, told to measure CUDA, measures this process: recording, sending and waiting."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from djinn_mode_cuda.patches import Patches

__all__ = ("replace",)


def replace(patches: Patches) -> None:
    """Replace the constructor of the profiler until the patches are closed."""
    profiler = torch.autograd.profiler.profile
    patches.set(profiler, "__init__", _init(profiler.__init__))


def _init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, enabled: Any = True, **kwargs: Any) -> None:  # noqa: N807  # replaces that method
        is_asked = kwargs.pop("use_cuda", False) or kwargs.get("use_device") == "cuda"
        if is_asked:
            kwargs["use_device"] = None
            warnings.warn("The profiler cannot see the remote CUDA device: it measures this process. djinn trace shows "
                          "when the server ran what.", stacklevel=2)
        original(self, enabled, **kwargs)

    return __init__

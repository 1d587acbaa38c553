"""``torch.compile``, whose compiler for CUDA is made of triton and NVIDIA's own, which are not there."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from djinn_plugins.device.accelerator.patches import Patches

__all__ = ("replace",)

_FOR_CUDA = "inductor"


def replace(patches: Patches) -> None:
    """Replace the function until the patches are closed."""
    patches.set(torch, "compile", _compile(torch.compile))


def _compile(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compile_(model: Any = None, **kwargs: Any) -> Any:
        if kwargs.get("backend", _FOR_CUDA) != _FOR_CUDA:
            return original(model, **kwargs)
        warnings.warn("Not compiled: the compiler of CUDA programs is not there for a remote device. The program runs "
                      "as without torch.compile; the backend 'djinn' compiles.", stacklevel=2)
        return _not_compiled if model is None else _not_compiled(model)

    return compile_


def _not_compiled(model: Any) -> Any:
    # Programs find a compiled module, and the module that it was made of, by PyTorch's own wrapper.
    return torch.compiler.disable(model) if isinstance(model, torch.nn.Module) else model

"""TorchScript modules on the device are saved as copies on the CPU: PyTorch writes them from their memory, in C++."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch

from djinn.record.tensor import LazyTensor

__all__ = ("install",)

_SAVES = ("save", "save_to_buffer", "_save_for_lite_interpreter", "_save_to_buffer_for_lite_interpreter")


def install() -> None:
    """Replace the methods that save a module."""
    # Traced modules are of the second class, which has copies of the methods of the first.
    for kind in (torch.jit._script.RecursiveScriptModule, torch.jit.ScriptModule):
        for name in _SAVES:
            setattr(kind, name, _saving(getattr(kind, name)))


def _saving(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def save_copy(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_remote = any(isinstance(tensor, LazyTensor) for tensor in chain(self.parameters(), self.buffers()))
        return save(_copied(self) if is_remote else self, *args, **kwargs)

    return save_copy


def _copied(module: Any) -> Any:
    with torch.no_grad():
        made = copy.deepcopy(module).cpu()
    for parameter, original in zip(made.parameters(), module.parameters(), strict=True):
        parameter.requires_grad_(original.requires_grad)
    return made

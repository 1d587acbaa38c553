"""Pinned memory of ordinary tensors, with the same behaviour as before the device was registered.

PyTorch requests pinned memory from a registered spare device even if there are other accelerators. These two kernels
use the machine's own accelerator instead.
"""

from __future__ import annotations

from typing import Any

import torch

_original: dict[str, Any] = {}


def register(library: torch.library.Library) -> None:
    """Register kernels for CPU tensors that take precedence over PyTorch's own."""
    for name, kernel in (("_pin_memory", _pin_memory), ("is_pinned", _is_pinned)):
        _original[name] = torch.library.get_kernel(f"aten::{name}", "CPU")
        library.impl(name, kernel, "CPU", with_keyset=True)


def _pin_memory(keyset: Any, tensor: torch.Tensor, device: Any = None) -> Any:
    if device is None and not torch.cuda.is_available():
        raise RuntimeError("Cannot access accelerator device when none is available.")
    return _original["_pin_memory"].call_boxed(keyset, tensor, device or torch.device("cuda"))


def _is_pinned(keyset: Any, tensor: torch.Tensor, device: Any = None) -> Any:
    if device is None and not torch.cuda.is_available():
        return False
    return _original["is_pinned"].call_boxed(keyset, tensor, device or torch.device("cuda"))

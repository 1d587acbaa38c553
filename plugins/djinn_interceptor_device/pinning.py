"""Pinned memory of ordinary tensors, as it was before the device was registered.

PyTorch asks a registered spare device for pinned memory, whatever other accelerators there are. These two kernels ask
the machine's own accelerator instead.
"""

from __future__ import annotations

from typing import Any

import torch

_original: dict[str, Any] = {}


def register(library: torch.library.Library) -> None:
    """Put the kernels in front of PyTorch's own, for CPU tensors."""
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

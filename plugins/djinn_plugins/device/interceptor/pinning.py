"""Pinned memory of ordinary tensors, with the same behaviour as before the device was registered.

PyTorch requests pinned memory from a registered spare device even if there are other accelerators. These two kernels
use the machine's own accelerator instead.

If the remote device is the accelerator of this process and the machine has no CUDA, pinned memory is ordinary memory
with a mark, by which ``is_pinned`` answers as for any accelerator.
"""

from __future__ import annotations

from typing import Any

import torch

from djinn.record import devices
from djinn_plugins.device.accelerator import availability
from djinn_plugins.device.accelerator.pinned_memory import is_marked, marked

_original: dict[str, Any] = {}
_machine_has_cuda = torch.cuda.is_available
"""Not looked up later: a run mode may make CUDA a name of the remote device."""


def register(library: torch.library.Library) -> None:
    """Register kernels for CPU tensors that take precedence over PyTorch's own."""
    for name, kernel in (("_pin_memory", _pin_memory), ("is_pinned", _is_pinned)):
        _original[name] = torch.library.get_kernel(f"aten::{name}", "CPU")
        library.impl(name, kernel, "CPU", with_keyset=True)


def _pin_memory(keyset: Any, tensor: torch.Tensor, device: Any = None) -> Any:
    if _is_for_us(device):
        return tensor if is_marked(tensor) else marked(tensor.clone())
    if device is None and not _machine_has_cuda():
        raise RuntimeError("Cannot access accelerator device when none is available.")
    return _original["_pin_memory"].call_boxed(keyset, tensor, device or torch.device("cuda"))


def _is_pinned(keyset: Any, tensor: torch.Tensor, device: Any = None) -> Any:
    if _is_for_us(device):
        return is_marked(tensor)
    if device is None and not _machine_has_cuda():
        return False
    return _original["is_pinned"].call_boxed(keyset, tensor, device or torch.device("cuda"))


def _is_for_us(device: Any) -> bool:
    """Whether memory is to be pinned for the remote device, and not for a device of this machine."""
    if _machine_has_cuda() or not availability.is_available():
        return False
    return device is None or torch.device(device).type == devices.logical_device().type

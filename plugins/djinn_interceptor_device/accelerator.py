"""``torch.accelerator``: refers to the remote device while that is available, and otherwise to what it did before.

The functions of ``torch.accelerator`` call functions of ``torch._C``, which ask PyTorch's device guard and allocator. A
device that is registered from Python cannot implement these. So the functions of ``torch._C`` are replaced.
"""

from __future__ import annotations

from typing import Any

import torch
from djinn_lib_accelerator import availability

from djinn.record import devices

__all__ = ("install",)


def install(before: torch.device | None) -> None:
    """Replace the functions.

    Args:
        before: The accelerator that PyTorch was built for, before the device was registered.
    """
    def accelerator() -> Any:
        return torch.device(devices.logical_device().type) if availability.is_available() else before

    torch._C._accelerator_getAccelerator = accelerator

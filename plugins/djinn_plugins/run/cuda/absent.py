"""Packages that need NVIDIA's own runtime in this process: here they are not installed.

``None`` in `sys.modules` makes ``import`` raise `ImportError` and `importlib.util.find_spec` return ``None``, which is
how libraries look for them. Packages that are already imported stay.
"""

from __future__ import annotations

import sys

from torch.utils import _triton

from djinn_plugins.device.accelerator.patches import Patches

__all__ = ("PACKAGES", "hide")

PACKAGES = ("bitsandbytes", "flash_attn", "flash_attn_interface", "triton", "xformers")
_QUESTIONS = ("has_triton", "has_triton_package")


def hide(patches: Patches) -> None:
    """Hide the packages until the patches are closed."""
    for name in PACKAGES:
        patches.add(sys.modules, name, None)
    for name in _QUESTIONS:
        # PyTorch remembers the answer.
        patches.set(_triton, name, lambda: False)

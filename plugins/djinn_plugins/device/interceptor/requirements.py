"""The parts of PyTorch that the device needs. A release without them is refused before anything is registered."""

from __future__ import annotations

from operator import attrgetter

import torch
import torch.utils.backend_registration

from djinn.errors import UnsupportedTorchError

__all__ = ("FIRST_RELEASE", "require")

FIRST_RELEASE = "2.10"
"""The first release of PyTorch with all of them."""
_NEEDED = ("torch.utils.backend_registration._setup_privateuseone_for_python_backend",
           "torch._C._acc.PrivateUse1Hooks", "torch._C._acc.DeviceGuard")


def _is_there(name: str) -> bool:
    try:
        attrgetter(name.removeprefix("torch."))(torch)
    except AttributeError:
        return False
    return True


def require() -> None:
    """Check that the installed PyTorch has these parts.

    Raises:
        UnsupportedTorchError: Parts are missing; the error names them.
    """
    lacking = [name for name in _NEEDED if not _is_there(name)]
    if lacking:
        raise UnsupportedTorchError(
            f"PyTorch {torch.__version__} lacks {', '.join(lacking)}: it cannot have the device remote_accelerator.",
            hint=f"Install a later release: pip install 'torch>={FIRST_RELEASE}'.")

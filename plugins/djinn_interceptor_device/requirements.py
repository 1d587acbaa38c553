"""What the device needs of PyTorch. A release that lacks it is refused before anything is registered."""

from __future__ import annotations

from operator import attrgetter

import torch
import torch.utils.backend_registration

from djinn.errors import UnsupportedTorchError

__all__ = ("FIRST_RELEASE", "require")

FIRST_RELEASE = "2.10"
"""The first release of PyTorch that has all of it."""
_NEEDED = ("torch.utils.backend_registration._setup_privateuseone_for_python_backend",
           "torch._C._acc.PrivateUse1Hooks", "torch._C._acc.DeviceGuard")


def _is_there(name: str) -> bool:
    try:
        attrgetter(name.removeprefix("torch."))(torch)
    except AttributeError:
        return False
    return True


def require() -> None:
    """Check that the installed PyTorch has what the device is made of.

    Raises:
        UnsupportedTorchError: It has not; says what is missing.
    """
    lacking = [name for name in _NEEDED if not _is_there(name)]
    if lacking:
        raise UnsupportedTorchError(
            f"PyTorch {torch.__version__} lacks {', '.join(lacking)}: it cannot have the device remote_accelerator.",
            hint=f"Install a later release: pip install 'torch>={FIRST_RELEASE}'.")

"""Storages on ``cuda``: those of the remote device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from djinn.record import devices
from djinn_plugins.device.accelerator.patches import Patches
from djinn_plugins.run.cuda.translation import remote_device, with_device

__all__ = ("replace",)


def replace(patches: Patches) -> None:
    """Replace constructors and methods until the patches are closed."""
    untyped: Any = torch.UntypedStorage
    patches.set(untyped, "__new__", _new(untyped.__new__))
    patches.set(untyped, "cuda", _cuda)
    for kind in (untyped, torch.storage.TypedStorage):
        patches.set(kind, "is_cuda", property(lambda self: self.device.type == devices.logical_device().type))


def _new(original: Callable[..., Any]) -> Callable[..., Any]:
    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807  # replaces that method
        if kwargs.get("device") is not None:
            kwargs["device"] = remote_device(kwargs["device"])
        return original(cls, *args, **kwargs)

    return __new__


def _cuda(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
    """Return the storage, or a copy of it, on the remote device."""
    where = with_device(device)
    return self if self.device == where else torch.serialization.default_restore_location(self, str(where))

"""Classes of PyTorch whose constructors take a device: ``torch.Stream``, ``torch.Event``, ``torch.Generator``.

Their constructors, written in C, ask the device's backend, which can only be implemented in C++. So each class is
replaced by a subclass whose call makes an object of another class if the device is the remote one. To ``isinstance``,
the subclass is the class that it replaces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from djinn.record import devices
from djinn_plugins.device.accelerator import availability

__all__ = ("substitute",)


def substitute(name: str, remote: type, default: Callable[[], torch.device]) -> None:
    """Replace ``torch.<name>``.

    Args:
        name: Name of the class.
        remote: A subclass of it, whose objects belong to the remote device; called with the same arguments.
        default: Returns the device of objects for which none is given, while the remote device is not available.
    """
    original: Any = getattr(torch, name)

    class Substitute(type(original)):  # type: ignore[misc]  # the metaclass is `type`, but untyped
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if cls is not replacement or "device_type" in kwargs:
                return type.__call__(original if cls is replacement else cls, *args, **kwargs)
            device = args[0] if args else kwargs.pop("device", None)
            if device is None:
                logical = devices.logical_device()
                chosen = logical if availability.is_available() and name != "Generator" else default()
            else:
                chosen = _as_device(device)
            made = remote if chosen.type == devices.logical_device().type else original
            return made(chosen, *args[1:], **kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original) if cls is replacement else type.__instancecheck__(cls, instance)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, original) if cls is replacement else type.__subclasscheck__(cls, subclass)

    replacement = Substitute(name, (original,), {"__module__": "torch", "__doc__": original.__doc__})
    setattr(torch, name, replacement)


def _as_device(named: Any) -> torch.device:
    if isinstance(named, int):
        return torch.device(str(torch.accelerator.current_accelerator() or "cuda"), named)
    return torch.device(named)

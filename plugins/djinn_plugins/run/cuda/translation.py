"""Translation of devices: the device ``cuda`` is the remote device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from djinn.record import devices

__all__ = ("remote_device", "remote_index", "translated", "with_device")


def remote_device(device: Any) -> Any:
    """Return the remote device for a CUDA device, given as an object or a string; return everything else unchanged.

    Raises:
        torch.AcceleratorError: There is no CUDA device of that index.
    """
    if type(device) is str:
        if not device.startswith("cuda"):
            return device
        device = torch.device(device)
    if type(device) is not torch.device or device.type != "cuda":
        return device
    return remote_index(device.index)


def remote_index(index: int | None) -> torch.device:
    """Return the remote device for the index of a CUDA device; ``None`` means the current one.

    Raises:
        torch.AcceleratorError: There is no CUDA device of that index.
    """
    first = devices.logical_device()
    if not index:
        return first
    if not 0 < index < devices.device_count():
        raise torch.AcceleratorError("CUDA error: invalid device ordinal")
    return torch.device(first.type, index)


def with_device(device: Any) -> torch.device:
    """As `remote_device`, for functions of ``torch.cuda``, which also take an index or nothing.

    Raises:
        ValueError: It is the device of another kind.
    """
    if device is None or isinstance(device, int):
        return remote_index(None if device is None or device < 0 else device)
    made = torch.device(remote_device(device))
    if made.type != devices.logical_device().type:
        raise ValueError(f"Expected a cuda device, but got: {device}")
    return made


def translated(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that takes a keyword ``device``."""
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None:
            kwargs["device"] = remote_device(device)
        return function(*args, **kwargs)

    return call

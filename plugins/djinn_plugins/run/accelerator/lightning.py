"""The accelerator ``djinn`` of Lightning, in each of the packages that it is distributed as."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from djinn.record import devices
from djinn_plugins.run.replacing import Replacement

__all__ = ("FAMILIES", "NAME", "register", "replacements")

NAME = "djinn"
FAMILIES = (("lightning.fabric", "lightning.pytorch"), ("lightning_fabric", "pytorch_lightning"))
"""Lightning as one package, and as two."""


def register(module: ModuleType) -> Callable[[], None]:
    """Register the accelerator with a registry.

    Args:
        module: One of the modules ``accelerators``.

    Returns:
        A function that takes it back.
    """
    registry: Any = getattr(module, "ACCELERATOR_REGISTRY", None) or module.AcceleratorRegistry
    registry.register(NAME, _accelerator(module.Accelerator), description="the remote device")
    return lambda: registry.pop(NAME, None)


def replacements(device: torch.device) -> list[Replacement]:
    """List the functions to replace: those that choose an accelerator, a strategy and a precision.

    Args:
        device: The remote device.
    """
    found = []
    for fabric, pytorch in FAMILIES:
        for module, connector in ((f"{fabric}.connector", "_Connector"),
                                  (f"{pytorch}.trainer.connectors.accelerator_connector", "_AcceleratorConnector")):
            found += [Replacement(module, f"{connector}._choose_auto_accelerator", _ours),
                      Replacement(module, f"{connector}._choose_gpu_accelerator_backend", _ours),
                      Replacement(module, f"{connector}._choose_strategy", _choose_strategy)]
        found += [Replacement(f"{package}.plugins.precision.amp", "MixedPrecision.__init__",
                              functools.partial(_mixed_precision, device)) for package in (fabric, pytorch)]
    return found


def _accelerator(base: Any) -> type:
    """Make the class; its base exists only once Lightning is imported."""
    def setup_device(self: Any, device: torch.device) -> None:
        if device.type != devices.logical_device().type:
            raise ValueError(f"The device should be {devices.logical_device()}, and is {device}.")

    def parse_devices(devices: Any) -> list[int]:
        if isinstance(devices, (list, tuple)):
            return [int(index) for index in devices]
        return list(range(_count() if devices in ("auto", -1, "-1") else int(devices)))

    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device(_kind(), index) for index in devices]

    def get_device_stats(self: Any, device: Any) -> dict[str, Any]:
        module: Any = torch.get_device_module(_kind())
        return dict(module.memory_stats(device))

    return type("DjinnAccelerator", (base,), {
        "__doc__": "The remote device.", "setup_device": setup_device, "get_device_stats": get_device_stats,
        "teardown": lambda self: None, "parse_devices": staticmethod(parse_devices),
        "get_parallel_devices": staticmethod(get_parallel_devices), "auto_device_count": staticmethod(_count),
        "is_available": staticmethod(torch.accelerator.is_available), "name": staticmethod(lambda: NAME)})


def _count() -> int:
    return devices.device_count()


def _kind() -> str:
    return devices.logical_device().type


def _ours(original: Any) -> Any:
    return staticmethod(lambda *args: NAME)


def _choose_strategy(original: Any) -> Any:
    """One device needs its own strategy object; Lightning makes it for its own accelerators and for the CPU."""
    @functools.wraps(original)
    def choose(self: Any) -> Any:
        places = self._parallel_devices
        if len(places) != 1 or places[0].type != _kind():
            return original(self)
        module: Any = sys.modules[original.__module__]
        return module.SingleDeviceStrategy(device=places[0])

    return choose


def _mixed_precision(place: torch.device, original: Any) -> Any:
    """Lightning names CUDA for all accelerators that it does not know."""
    @functools.wraps(original)
    def init(self: Any, precision: Any, device: str, *args: Any, **kwargs: Any) -> None:
        original(self, precision, place.type if device == "cuda" else device, *args, **kwargs)

    return init

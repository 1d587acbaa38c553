"""Makes ``remote_accelerator`` a device of PyTorch, in Python alone and without replacing any function."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    from djinn.kinds import Interceptor


@hookimpl
def djinn_register_interceptors(register: Callable[[Interceptor], None]) -> None:
    """Register the plugin's interceptor.

    Raises:
        UnsupportedTorchError: This PyTorch cannot have the device.
    """
    from djinn_plugins.device.interceptor.requirements import require

    require()
    from djinn_plugins.device.interceptor.interceptor import DeviceInterceptor

    register(DeviceInterceptor())

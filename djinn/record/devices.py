"""The logical device of lazy tensors, and the session that runs their operations.

Recording asks here for the session, which is composed of recording: so the session itself is installed from above.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from djinn.errors import ConfigurationError, DeviceNameTakenError, DjinnError

__all__ = ("checked_device", "current_session", "device_count", "device_problem", "install_failed", "logical_device",
           "running_session", "use_device", "use_sessions")

_device: torch.device | None = None
_device_problem: DeviceNameTakenError | None = None
_install_problem: DjinnError | None = None
_current: Callable[[], Any]
_running: Callable[[], Any]


def use_sessions(current: Callable[[], Any], running: Callable[[], Any]) -> None:
    """Set how to find the session.

    Args:
        current: Returns the running `djinn.session.session.Session`, and starts one if there is none.
        running: Returns it, or ``None``.
    """
    global _current, _running
    _current, _running = current, running


def current_session() -> Any:
    """Return the running `djinn.session.session.Session`; start one if there is none."""
    return _current()


def running_session() -> Any:
    """Return the running `djinn.session.session.Session`, or ``None``."""
    return _running()


def use_device(install: Callable[[], torch.device]) -> None:
    """Set the logical device: what an interceptor's ``install`` returns, or ``meta`` if the name is taken."""
    global _device, _device_problem
    try:
        _device = install()
    except DeviceNameTakenError as problem:
        warnings.warn(str(problem), stacklevel=3)
        _device_problem = problem
        _device = torch.device("meta", 0)


def install_failed(problem: DjinnError) -> None:
    """Note why there is no interceptor. `logical_device` raises it."""
    global _install_problem
    _install_problem = problem
    warnings.warn(f"remote_accelerator is no device here: {problem}", stacklevel=3)


def logical_device() -> torch.device:
    """Return the device of new lazy tensors.

    Raises:
        PluginError, ConfigurationError: No interceptor could be installed.
    """
    if _install_problem is not None:
        raise _install_problem
    if _device is None:
        raise ConfigurationError("No interceptor is installed.",
                                 hint="Enable the plugin djinn-interceptor-device and import djinn again.")
    return _device


def device_problem() -> DeviceNameTakenError | None:
    """Return why ``remote_accelerator`` is no device here, if it is none."""
    return _device_problem


def device_count() -> int:
    """Return the number of logical devices: one, unless a session has several executors and leaves them to the user."""
    session = running_session()
    return 1 if session is None else int(session.backend.device_count)


def checked_device(named: torch.device | None) -> torch.device:
    """Complete a device that the user named, and check that it exists.

    Raises:
        RuntimeError: There is no device of that index, as for any accelerator.
    """
    device = logical_device()
    if not (named and named.index):
        return device
    count = device_count()
    if named.index >= count:
        there = f"there is 1 remote accelerator, {device}" if count == 1 else f"there are {count} remote accelerators"
        raise RuntimeError(f"{named} does not exist: {there}.")
    return named

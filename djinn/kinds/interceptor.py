"""Interceptors route PyTorch's operations to a session."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

import torch

Session: TypeAlias = Any
"""A `djinn.session.session.Session`, which is built on this contract."""
Handler: TypeAlias = Callable[[Any, torch._ops.OpOverload, tuple[Any, ...], dict[str, Any]], Any]
"""Executes an operator itself: ``handler(session, operator, args, kwargs)``.

It returns `NotImplemented` for a call that is to be recorded like any other.
"""
FunctionHandler: TypeAlias = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Executes a function of PyTorch's Python API: ``handler(function, args, kwargs)``."""


class Interceptor(Protocol):
    """Connects PyTorch to djinn, once per process."""

    name: str
    """Name in the configuration."""

    def install(self) -> torch.device:
        """Register the logical device with PyTorch. Called on ``import djinn``; opens nothing, starts nothing.

        Returns:
            The device of new lazy tensors.

        Raises:
            DeviceNameTakenError: Another package has taken PyTorch's spare device.

        Laws:
            interceptor.local_unchanged, interceptor.idempotent, interceptor.opens_nothing, interceptor.device_real
        """

    def handlers(self, session: Session) -> Mapping[torch._ops.OpOverload, Handler]:
        """Operators that need special handling, such as copies between devices.

        Laws:
            interceptor.operations_arrive, interceptor.fakes_real
        """

    def functions(self) -> Mapping[Callable[..., Any], FunctionHandler]:
        """Functions of PyTorch's Python API that need special handling."""

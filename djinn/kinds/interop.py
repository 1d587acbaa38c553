"""What happens when an operation has ordinary tensors beside lazy ones."""

from __future__ import annotations

from typing import Any

import torch

from djinn.errors import UnsupportedTensorError
from djinn.kinds.interceptor import Session

__all__ = ("HostInterop",)


class HostInterop:
    """Handles operations with tensors of this process. This base class refuses to mix.

    Args:
        session: Its session.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def carry_out(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute an operation whose arguments are not all lazy tensors of one device.

        Raises:
            UnsupportedTensorError: It cannot be executed.
        """
        raise UnsupportedTensorError(f"{operator} cannot be recorded with these arguments: tensors are not mixed.")

    def trigger(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that returns Python values on the executor."""
        return self._session.trigger(operator, args, kwargs)

    def upload(self, tensor: torch.Tensor) -> Any:
        """Upload an ordinary tensor, and return the lazy one."""
        return self._session.upload(tensor)

    def uploaded(self, tensor: torch.Tensor) -> Any:
        """Return the upload of an ordinary tensor, if it was uploaded. Uploads nothing."""

    def forget(self, tensor: torch.Tensor) -> None:
        """Note that an ordinary tensor has changed in a way that PyTorch does not tell."""

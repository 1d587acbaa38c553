"""Files that a program reads into ordinary tensors: if these move to a server that has the file, they are not sent."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from djinn.record import devices
from djinn_plugins.models import noted_files

if TYPE_CHECKING:
    from djinn.session.session import Session

__all__ = ("install", "stored")

MIN_BYTES = 2**16
"""Smaller tensors are sent."""


def install() -> None:
    """Note files as PyTorch maps them, for itself, safetensors or any other library; once in a process."""
    storages: Any = torch.UntypedStorage
    storages.from_file = staticmethod(_noting(storages.from_file))


def _noting(map_file: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(map_file)
    def from_file(filename: Any, shared: bool = False, *args: Any, **options: Any) -> Any:
        if not shared:
            # Otherwise, writes to the tensors would change the file.
            noted_files.note(filename)
        return map_file(filename, shared, *args, **options)

    return from_file


def stored(session: Session, tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor | None:
    """Return a tensor of the server's store in place of an ordinary one that was read from the same file."""
    if noted_files.is_empty() or tensor.nbytes < MIN_BYTES or tensor.device.type != "cpu":
        return None
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    # Most programs need neither.
    from djinn_plugins.common.tracing.waits import WaitLedger
    from djinn_plugins.models import moved_weights

    with session.shared(WaitLedger).asking():
        return moved_weights.stored(session, tensor, devices.checked_device(device))

"""How a connection handles an interrupt of its user."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from djinn.errors import DjinnError
from djinn.wire.messages import Batch, Command, Upload
from djinn_plugins.common.interrupts import Interruption, deferral
from djinn_plugins.common.memory.tensor_bytes import size_bytes
from djinn_plugins.transport.resumption import MAX_BUFFERED_BYTES

__all__ = ("is_interrupted", "is_thrown_in", "without_large")


def is_interrupted(error: BaseException | None = None) -> bool:
    """Whether an interrupt is deferred, or the error is the deferred interrupt."""
    deferred = deferral()
    return deferred is not None and deferred.error is not None and (error is None or deferred.error is error)


def is_thrown_in(error: BaseException) -> bool:
    """Whether an exception comes from elsewhere, such as one that `PyThreadState_SetAsyncExc` raises in a thread."""
    return not isinstance(error, (Interruption, DjinnError, OSError, EOFError))


def without_large(batch: Batch, tensors: Sequence[torch.Tensor]) -> tuple[Batch, Sequence[torch.Tensor]]:
    """Remove large tensors, which take long to send, from a batch. Their uploads have failed, so no step uses them.

    Small tensors, which were queued to be sent with the batch, are in use already.
    """
    if sum(tensor.nbytes for tensor in tensors) <= MAX_BUFFERED_BYTES:
        return batch, tensors
    commands: list[Command] = [command for command in batch.commands if not _is_large(command)]
    return (msgspec.structs.replace(batch, commands=commands),
            [tensor for tensor in tensors if tensor.nbytes <= MAX_BUFFERED_BYTES])


def _is_large(command: Command) -> bool:
    return isinstance(command, Upload) and size_bytes(command.tensor) > MAX_BUFFERED_BYTES

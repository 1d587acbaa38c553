"""``djinn.models``: which models a server has, and their tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import torch
from djinn_lib_service.stored_models import StoreAnswer, StoredModel, StoredTensor, stored_operators
from djinn_lib_service.tensor_bytes import buffer_of

import djinn
from djinn.errors import ConfigurationError, ProtocolError
from djinn.record.devices import logical_device
from djinn.wire.tensors import dtype_named

if TYPE_CHECKING:
    import builtins

__all__ = ("list", "load", "made", "tensors_of")


def list(device: Any = None) -> builtins.list[StoredModel]:  # noqa: A001  # always called as djinn.models.list
    """List the models of the server, those that it cannot use included.

    Args:
        device: A device of the server; the current one by default.

    Raises:
        ConfigurationError: The server has no store.
    """
    return [*_asked(device, "").models]


def load(name: str, *, revision: str = "", dtype: torch.dtype | None = None, device: Any = None
         ) -> dict[str, torch.Tensor]:
    """Return the tensors of a model, which stay on the server.

    Args:
        name: The model's name, as listed.
        revision: Its revision or digest; needed only if the server has several.
        dtype: If given, tensors of real and complex floating point are converted to it.
        device: A device of the server; the current one by default.

    Raises:
        ConfigurationError: The server has no such model, or cannot use it.
    """
    like = _like(device)
    found = {tensor.name: made(like, tensor) for tensor in tensors_of(name, revision, device).tensors}
    if dtype is None:
        return found
    return {name: tensor.to(dtype) if tensor.is_floating_point() or tensor.is_complex() else tensor
            for name, tensor in found.items()}


def tensors_of(name: str, revision: str = "", device: Any = None) -> StoreAnswer:
    """Return the description of a model and of its tensors.

    Raises:
        ConfigurationError: The server has no such model, or cannot use it.
    """
    return _asked(device, f"{name}\n{revision}")


def made(like: torch.Tensor, tensor: StoredTensor) -> torch.Tensor:
    """Record the operation that makes a value of a stored tensor, on the device of another one."""
    result: torch.Tensor = stored_operators().tensor(
        like, tensor.file, tensor.name, [*tensor.size], dtype=dtype_named(tensor.dtype))
    return result


def _like(device: Any) -> torch.Tensor:
    djinn.ensure_initialized()
    return torch.empty(0, device=logical_device() if device is None else device)


def _asked(device: Any, request: str) -> StoreAnswer:
    answer = stored_operators().models(_like(device), request).cpu()
    try:
        found = msgspec.msgpack.decode(buffer_of(answer), type=StoreAnswer)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"The server describes its models wrongly: {error}.") from None
    if found.problem:
        raise ConfigurationError(found.problem)
    return found

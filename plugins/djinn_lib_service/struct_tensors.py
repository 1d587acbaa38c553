"""Structures that an operator answers with: as bytes in a tensor."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import torch

from djinn.errors import ProtocolError
from djinn_lib_service.tensor_bytes import buffer_of

__all__ = ("decoded", "encoded")

_Answer = TypeVar("_Answer", bound=msgspec.Struct)


def encoded(answer: msgspec.Struct, like: torch.Tensor) -> torch.Tensor:
    """Return a structure as a tensor of bytes, on the device of another tensor."""
    return torch.frombuffer(bytearray(msgspec.msgpack.encode(answer)), dtype=torch.uint8).to(like.device)


def decoded(answer: torch.Tensor, decoder: msgspec.msgpack.Decoder[_Answer]) -> _Answer:
    """Read a structure from a CPU tensor.

    Raises:
        ProtocolError: It has another form.
    """
    try:
        return decoder.decode(buffer_of(answer))
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"The server's answer is malformed: {error}.") from None

"""Structures that an operator answers with: as bytes in a tensor."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import torch

from djinn.errors import ProtocolError
from djinn_plugins.common.memory.tensor_bytes import buffer_of
from djinn_plugins.common.net.terminal_text import harmless

__all__ = ("decoded", "encoded")

_Answer = TypeVar("_Answer", bound=msgspec.Struct)


def encoded(answer: msgspec.Struct, like: torch.Tensor) -> torch.Tensor:
    """Return a structure as a tensor of bytes, on the device of another tensor."""
    return torch.frombuffer(bytearray(msgspec.msgpack.encode(answer)), dtype=torch.uint8).to(like.device)


def decoded(answer: torch.Tensor, decoder: msgspec.msgpack.Decoder[_Answer]) -> _Answer:
    """Read a structure from a CPU tensor. Its texts are harmless to a terminal, but for a class's ``own_texts``.

    Raises:
        ProtocolError: It has another form.
    """
    try:
        made: _Answer = _harmless(decoder.decode(buffer_of(answer.contiguous())))
    except (ValueError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"The server's answer is malformed: {error}.") from None
    return made


def _harmless(value: Any) -> Any:
    if isinstance(value, str):
        return harmless(value)
    if isinstance(value, tuple):
        return tuple(map(_harmless, value))
    if isinstance(value, msgspec.Struct):
        own = getattr(value, "own_texts", ())
        return msgspec.structs.replace(value, **{name: _harmless(getattr(value, name))
                                                 for name in value.__struct_fields__ if name not in own})
    return value

"""How a value that is kept is made of tensors: nested dicts, lists and tuples, with plain values between them.

It travels as nested lists of a kind and its content, which are read without running anything.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from djinn.errors import ProtocolError

__all__ = ("put_together", "taken_apart")

_TENSOR, _LOCAL, _DICT, _LIST, _TUPLE, _PLAIN = range(6)
_PLAIN_TYPES = (type(None), bool, int, float, str)


def taken_apart(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Return the structure of a value, and its tensors, each once.

    Raises:
        TypeError: It contains something else.
    """
    tensors: dict[int, tuple[int, torch.Tensor]] = {}

    def form(part: Any) -> list[Any]:
        if isinstance(part, torch.Tensor):
            number, _ = tensors.setdefault(id(part), (len(tensors), part))
            return [_LOCAL if part.device.type == "cpu" else _TENSOR, number]
        if type(part) in (dict, OrderedDict):
            if not all(type(key) in _PLAIN_TYPES for key in part):
                raise TypeError("Keys of dicts that are kept are text, numbers or None.")
            return [_DICT, [[key, form(item)] for key, item in part.items()]]
        if type(part) in (list, tuple):
            return [_LIST if type(part) is list else _TUPLE, [form(item) for item in part]]
        if type(part) in _PLAIN_TYPES:
            return [_PLAIN, part]
        raise TypeError(f"A {type(part).__name__} cannot be kept: tensors, dicts, lists, tuples, text, numbers and "
                        "None can.")

    structure = msgspec.msgpack.encode(form(value))
    return structure, [tensor for _, tensor in tensors.values()]


def put_together(structure: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """Make a value of its structure and its tensors.

    Raises:
        ProtocolError: The structure is malformed.
    """
    local: dict[int, torch.Tensor] = {}

    def made(part: Any) -> Any:
        kind, content = part
        if kind == _TENSOR:
            return tensors[content]
        if kind == _LOCAL:
            if content not in local:
                local[content] = tensors[content].cpu()
            return local[content]
        if kind == _DICT:
            return {key: made(item) for key, item in content}
        if kind in (_LIST, _TUPLE):
            items = [made(item) for item in content]
            return items if kind == _LIST else tuple(items)
        if kind != _PLAIN or type(content) not in _PLAIN_TYPES:
            raise ValueError
        return content

    try:
        return made(msgspec.msgpack.decode(structure))
    except (msgspec.MsgspecError, ValueError, TypeError, IndexError, RecursionError):
        raise ProtocolError("The server describes a value that is kept wrongly.") from None

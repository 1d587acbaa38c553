"""A server that lies: its messages are changed in one place before the client looks at them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from djinn.wire import messages
from djinn.wire.messages import Message
from djinn_plugins.transport.tcp.stream import FrameStream

EVIL = "\x1b]0;title\x07\x9b31m\u202e"
"""What a terminal would obey."""
NUMBERS = (-1, 0, 1, 2, 7, 2**31, 2**62, 2**63, 2**64 - 1)


class Liar:
    """Changes what is read.

    Args:
        seed: Decides which of the next messages is changed, and how.
        first: How many messages of each connection are left as they are.

    Attributes:
        lies: What was changed.
    """

    def __init__(self, seed: int, first: int = 1) -> None:
        self._random = random.Random(seed)
        self._left = first + self._random.randrange(4)
        self.lies: list[str] = []
        self._read = FrameStream.read

    def read(self, frames: FrameStream) -> tuple[int, Message, list[torch.Tensor]] | None:
        received = self._read(frames)
        self._left -= 1
        if received is None or self._left >= 0 or self.lies:
            return received
        return self._changed(*received)

    def _changed(self, sequence: int, message: Message, tensors: list[torch.Tensor]
                 ) -> tuple[int, Message, list[torch.Tensor]]:
        if self._random.random() < 0.1:
            self.lies.append(f"number of {type(message).__name__}")
            return self._random.choice(NUMBERS), message, tensors
        if tensors and self._random.random() < 0.6:
            return sequence, message, [self._other(tensor) for tensor in tensors]
        tree = messages.encode(message)
        for _ in range(100):
            built = msgspec.msgpack.decode(tree)
            lie = self._change(built)
            try:
                other = messages.decode(msgspec.msgpack.encode(built))
            except (ValueError, RecursionError, OverflowError):
                continue  # the decoder refuses it
            if other != message:
                self.lies.append(f"{type(message).__name__}: {lie}")
                return sequence, other, tensors
        return sequence, message, tensors

    def _other(self, tensor: torch.Tensor) -> torch.Tensor:
        """Change a tensor: a structure in it, its size, its dtype or its bytes."""
        try:
            built = msgspec.msgpack.decode(bytes(tensor.tolist())) if tensor.dtype == torch.uint8 else None
        except (ValueError, TypeError):
            built = None
        if isinstance(built, (dict, list)) and self._random.random() < 0.9:
            self.lies.append(f"structure: {self._change(built)}")
            return torch.frombuffer(bytearray(msgspec.msgpack.encode(built)), dtype=torch.uint8)
        kind = self._random.randrange(4)
        self.lies.append(f"tensor: {kind}")
        if kind == 0:
            return tensor.reshape(-1)[:-1].clone()
        if kind == 1:
            return tensor.to(torch.float64)
        if kind == 2:
            return tensor.unsqueeze(0)
        return torch.randint(0, 256, (max(1, tensor.numel() * tensor.itemsize),), dtype=torch.uint8)

    def _change(self, tree: Any) -> str:
        """Change one place of a tree of lists, dicts and plain values."""
        holder, place = self._random.choice(list(_places(tree)) or [([None], 0)])
        before = holder[place]
        if self._random.random() < 0.15:
            if isinstance(holder, list) and self._random.random() < 0.5:
                holder.insert(place, before)
                return f"{place} twice"
            del holder[place]
            return f"{place} is left out"
        holder[place] = self._lie(before)
        return f"{place}: {str(before)[:40]!r} is {str(holder[place])[:40]!r}"

    def _lie(self, value: Any) -> Any:
        choose = self._random.choice
        if self._random.random() < 0.2:
            return choose([None, [], {}, 1, "", b"", True, 1.5, [[1]], {"real": 1.0}])
        if isinstance(value, bool):
            return not value
        if isinstance(value, (int, float)) and isinstance(value, float) | (self._random.random() < 0.1):
            return choose([-1.0, math.nan, math.inf, -math.inf, 1e308])
        if isinstance(value, int):
            return choose(NUMBERS)
        if isinstance(value, str):
            return choose([EVIL + value, "", "x" * 1000, value[:-1], value + "\n" + EVIL])
        if isinstance(value, bytes):
            return choose([b"", value[:-1], bytes(len(value)), value + b"x"])
        return choose([[], None, {}, [value]])


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    for place in range(len(tree)) if isinstance(tree, list) else list(tree) if isinstance(tree, dict) else ():
        yield tree, place
        yield from _places(tree[place])

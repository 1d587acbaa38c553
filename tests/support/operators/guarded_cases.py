"""Reaches beyond memory in each way that guarded_memory.c must notice; started with it preloaded.

Prints, for each case, how a process ended that did it, and what was written down.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable
from typing import Any

import torch
from support.operators.memory import GuardedMemory, described

BACK, FRONT, ALIGNED = range(3)
SIZE = 12
"""Bytes of the blocks: no multiple of an alignment."""


def tensor() -> torch.Tensor:
    return torch.ones(SIZE // 4)


def peek(address: int) -> int:
    return ctypes.c_uint8.from_address(address).value


def poke(address: int) -> None:
    ctypes.c_uint8.from_address(address).value = 1


def touched(touch: Callable[[int], Any], offset: int) -> Callable[[], None]:
    def case() -> None:
        made = tensor()
        touch(made.data_ptr() + offset)

    return case


def freed() -> None:
    made = tensor()
    address = made.data_ptr()
    del made
    peek(address)


def expanded() -> None:
    """Read a tensor of one element by a view that is longer than its storage."""
    made = torch.ones(1)
    ctypes.string_at(made.data_ptr(), 64)


def allocated_elsewhere() -> None:
    """Read beyond a block of malloc's."""
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    peek(library.malloc(16) + 16)


def noticed_at_the_end(memory: GuardedMemory, place: Callable[[torch.Tensor], int]) -> Callable[[], None]:
    def case() -> None:
        made = tensor()
        poke(place(made))
        if memory.broken():
            os._exit(86)

    return case


def noticed_when_freed() -> None:
    made = tensor()
    poke(made.data_ptr() + SIZE)
    del made


def main() -> None:
    memory = GuardedMemory()
    memory.open()
    cases: dict[str, tuple[int, Callable[[], None]]] = {
        "right": (BACK, lambda: (tensor() + tensor()).sum().item() == 6 or os._exit(1)),
        "read beyond": (BACK, touched(peek, SIZE)),
        "write beyond": (BACK, touched(poke, SIZE)),
        "read before": (FRONT, touched(peek, -1)),
        "write beside": (FRONT, noticed_at_the_end(memory, lambda made: made.data_ptr() + SIZE)),
        "write before": (BACK, noticed_at_the_end(memory, lambda made: made.data_ptr() - 1)),
        "write into slack": (ALIGNED, noticed_when_freed),
        "freed": (BACK, freed),
        "expanded": (BACK, expanded),
        "malloc": (BACK, allocated_elsewhere),
        "too long": (BACK, lambda: memory.limit(0.05) or [None for _ in iter(int, 1)]),
    }
    found = {}
    for name, (place, case) in cases.items():
        memory.clear()
        child = os.fork()
        if not child:
            memory.open()
            memory.arm(3, place, 0)
            case()
            memory.arm(0, place, 0)
            os._exit(1 if memory.broken() else 0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found[name] = [status, described(memory.fault())]
    print(json.dumps(found))


if __name__ == "__main__":
    main()

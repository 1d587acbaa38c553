"""What a process does once, whichever of its threads needs it first."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch

__all__ = ("once", "registering")

_P = ParamSpec("_P")
_R = TypeVar("_R")
_lasting: list[torch.library.Library] = []
"""Registrations are valid for the lifetime of these objects."""


def once(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let a function run once for equal arguments; later calls return its result.

    Threads that call it meanwhile wait. A call that raises does not count. Unlike this, `functools.cache` lets two
    threads run a function twice.
    """
    made: dict[tuple[Any, ...], Any] = {}
    lock = threading.RLock()

    def call(*args: Any) -> Any:
        with lock:
            if args not in made:
                made[args] = function(*args)  # type: ignore[call-arg]  # the function's own
            return made[args]

    def renew() -> None:
        # The thread that held it is not in the child.
        nonlocal lock
        lock = threading.RLock()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=renew)
    # Answers in C what is done already.
    cached: Any = functools.cache(functools.wraps(function)(call))
    return cached  # type: ignore[no-any-return]  # of the same type


@contextmanager
def registering(namespace: str, kind: str) -> Iterator[torch.library.Library]:
    """Give a library whose registrations last as long as the process; none of them, if the block raises."""
    library = torch.library.Library(namespace, kind)
    try:
        yield library
    except BaseException:
        library._destroy()
        raise
    _lasting.append(library)

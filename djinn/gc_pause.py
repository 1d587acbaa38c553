"""Pauses the garbage collector while djinn is imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collection() -> Iterator[None]:
    """Disable garbage collection for the length of a block.

    An import creates no garbage worth collecting. A collection during the import would traverse all objects that
    PyTorch has created, which takes longer than importing djinn.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

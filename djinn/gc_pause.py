"""The garbage collector, while djinn is imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collection() -> Iterator[None]:
    """Let no garbage be collected meanwhile.

    There is none, and a collection that happens to fall into an import walks through all that PyTorch has made, which
    takes longer than importing djinn.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

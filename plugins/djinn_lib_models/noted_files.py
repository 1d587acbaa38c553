"""Files that a program has read into ordinary tensors. Only their paths are kept, of the latest ones."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

__all__ = ("MAX_FILES", "note", "noted", "take_new")

MAX_FILES = 1000
_paths: dict[str, None] = {}
"""In the order of the last time that they were read."""
_new: set[str] = set()
_lock = threading.Lock()


def note(path: Any) -> None:
    """Note that a file is being read. It is not opened here, and a name that no file can have is ignored."""
    try:
        found = str(Path(os.fsdecode(path)).absolute())
    except (TypeError, ValueError, OSError):
        return
    with _lock:
        _paths.pop(found, None)
        _paths[found] = None
        _new.add(found)
        if len(_paths) > MAX_FILES:
            oldest = next(iter(_paths))
            del _paths[oldest]
            _new.discard(oldest)


def noted() -> dict[str, None]:
    """Return the paths, the latest last. The caller does not change them."""
    return _paths


def take_new() -> set[str]:
    """Return the paths that were noted since the last call."""
    with _lock:
        found = set(_new)
        _new.clear()
    return found

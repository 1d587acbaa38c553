"""Files that a program has read into ordinary tensors. Only their paths are kept, of the latest ones."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

__all__ = ("MAX_FILES", "is_empty", "note", "noted", "take_new")

MAX_FILES = 1000
_paths: dict[str, None] = {}
"""In the order of the last time that they were read."""
_new: set[str] = set()
_lock = threading.Lock()


def note(path: Any) -> None:
    """Note that a file is being read. It is not opened here, and a name that no file can have is ignored."""
    if not hasattr(os, "preadv"):
        # Files could not be compared as they are here.
        return
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


def is_empty() -> bool:
    """Whether no file was noted."""
    return not _paths


def noted() -> set[str]:
    """Return the paths."""
    with _lock:
        return set(_paths)


def take_new() -> list[str]:
    """Return the paths that were noted since the last call, the latest last."""
    with _lock:
        found = [path for path in _paths if path in _new]
        _new.clear()
    return found

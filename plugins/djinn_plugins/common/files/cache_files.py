"""Files that djinn keeps between processes and can do without: the user's folder of caches."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

__all__ = ("cache_folder", "write_whole")


def cache_folder() -> Path:
    """Return the folder of djinn's caches, which may not exist.

    Raises:
        RuntimeError: The user has no home.
    """
    base = os.environ.get("XDG_CACHE_HOME") or (os.environ.get("LOCALAPPDATA") if sys.platform == "win32" else None)
    return Path(base or Path.home() / ".cache") / "djinn"


def write_whole(path: Path, content: bytes) -> None:
    """Write a file of the user's own; a process that reads it meanwhile finds the content from before.

    Raises:
        OSError: It cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Only this user can read what `mkstemp` makes.
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(temporary).unlink()
        raise

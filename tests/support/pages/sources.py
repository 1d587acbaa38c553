"""Files of a folder in which others appear and disappear meanwhile."""

from __future__ import annotations

import os
from pathlib import Path


def files_in(folder: Path, suffix: str) -> list[Path]:
    """List all files below a folder whose names end so, sorted.

    While the docs are built, their folder has another one for a while, which `pathlib.Path.rglob` may miss in the
    midst, and fail.
    """
    return sorted(Path(parent, name) for parent, _, names in os.walk(folder) for name in names
                  if name.endswith(suffix))

"""Which files others can read or write."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ("remedy_of",)


def remedy_of(path: Path, status: os.stat_result, user: int | None = None) -> str:
    """Return the command that makes a file private; empty if it is.

    Only this user may read and write a private file. The administrator may own it, and may let a group of this user
    read it, as secrets of a container are given.

    Args:
        path: The file.
        status: Its status, of the file that was opened.
        user: The number of this user; by default, of this process.
    """
    if os.name != "posix":
        return ""
    user = os.geteuid() if user is None else user
    if status.st_uid not in (0, user):
        return f"chown {user} {path}"
    return f"chmod 600 {path}" if status.st_mode & (0o077 if status.st_uid == user else 0o037) else ""

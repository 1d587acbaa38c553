"""Finding plugins faster: the distributions of a folder are read again only once the folder has changed."""

from __future__ import annotations

import sys
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from djinn.plugins import manager

__all__ = ("remember_distributions",)


def remember_distributions() -> None:
    """Let djinn keep the entry points of installed distributions, for the rest of the process.

    Laws begin thousands of sessions, and reading entry points anew is a third of the time that a session takes to
    begin.
    """
    setattr(manager, "entry_points", _entry_points)  # noqa: B010  # no public attribute, for a type checker


def _entry_points(*, group: str) -> metadata.EntryPoints:
    return _read(group, tuple(map(_state, sys.path)))


def _state(folder: str) -> tuple[str, int]:
    """Name a folder, and when something was added to it or removed from it."""
    path = Path(folder).absolute()
    try:
        return str(path), path.stat().st_mtime_ns
    except OSError:
        return str(path), 0


@lru_cache(maxsize=8)
def _read(group: str, folders: tuple[tuple[str, int], ...]) -> metadata.EntryPoints:
    return metadata.entry_points(group=group)

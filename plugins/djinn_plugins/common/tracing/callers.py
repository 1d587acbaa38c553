"""Finds the line of the program that waits: the frames of Python's stack outside djinn."""

from __future__ import annotations

import sys
from types import FrameType

__all__ = ("is_own", "is_torch", "program_frame")

_KITS = "djinn_conformance"
"""A package of djinn's that uses djinn as programs do."""
_owners: dict[str, str] = {}
"""``djinn``, ``torch``, or nothing, by file. A lookup by name costs a tenth of asking the frame's module."""


def _owner(frame: FrameType) -> str:
    file = frame.f_code.co_filename
    known = _owners.get(file)
    if known is None:
        name = str(frame.f_globals.get("__name__", ""))
        is_djinn = name.startswith("djinn") and not name.startswith(_KITS)
        known = "djinn" if is_djinn else "torch" if name.partition(".")[0] == "torch" else ""
        if not file.startswith("<"):
            # Code without a file of its own shares its name with others'.
            _owners[file] = known
    return known


def is_own(frame: FrameType) -> bool:
    """Whether a frame is djinn's own, on the way from a call to a wait."""
    return _owner(frame) == "djinn"


def is_torch(frame: FrameType) -> bool:
    """Whether a frame is PyTorch's."""
    return _owner(frame) == "torch"


def program_frame() -> FrameType | None:
    """Return the innermost caller outside djinn."""
    frame: FrameType | None = sys._getframe(1)
    owner = _owners.get
    while frame is not None and (owner(frame.f_code.co_filename) or _owner(frame)) == "djinn":
        frame = frame.f_back
    return frame

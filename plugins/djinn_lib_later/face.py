"""What djinn exports."""

from __future__ import annotations

from djinn_lib_later.handler import LaterHandler
from djinn_lib_later.values import LaterValue, later

__all__ = ("LaterHandler", "LaterValue", "later")

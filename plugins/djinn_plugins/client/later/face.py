"""What djinn exports."""

from __future__ import annotations

from djinn_plugins.client.later.handler import LaterHandler
from djinn_plugins.client.later.values import LaterValue, later

__all__ = ("LaterHandler", "LaterValue", "later")

"""What `djinn` offers of this library: ``djinn.models``."""

from __future__ import annotations

from djinn_plugins.models import models

__all__ = ("models",)

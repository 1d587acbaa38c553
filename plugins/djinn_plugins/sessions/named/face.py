"""What `djinn` offers of this library: ``djinn.kept``."""

from __future__ import annotations

from djinn_plugins.sessions.named.kept import KeptValues

__all__ = ("kept",)

kept = KeptValues()

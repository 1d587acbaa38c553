"""How often PyTorch has called djinn, since the process began."""

from __future__ import annotations

__all__ = ("INTERCEPTS",)

INTERCEPTS = {"factories": 0}
"""Calls of factories on the remote device, counted where they are handled."""

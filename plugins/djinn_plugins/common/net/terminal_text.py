"""Texts of others that may reach a terminal."""

from __future__ import annotations

import re

__all__ = ("harmless",)

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters that a terminal may obey; a new line and a tab are none."""


def harmless(text: str) -> str:
    """Return a text with its control characters escaped."""
    return text if text.isprintable() else _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)

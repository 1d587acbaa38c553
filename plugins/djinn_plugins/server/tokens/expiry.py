"""Expiry times in the form that people write: ``30d``, ``12h``, ``2027-01-31`` or ``2027-01-31T12:00``."""

from __future__ import annotations

import datetime
import re

from djinn.errors import ConfigurationError

__all__ = ("LATEST_S", "duration_s", "end_of")

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DURATION = re.compile(r"([0-9]{1,9})([smhdw])")
LATEST_S = 253402300799
"""The last second of the year 9999."""


def duration_s(text: str) -> int:
    """Parse a duration such as ``90s``, ``30m``, ``12h``, ``30d`` or ``2w``, and return it in seconds.

    Raises:
        ConfigurationError: The text is no duration.
    """
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise ConfigurationError(f"{text!r} is no length of time.",
                                 hint="Write a whole number with s, m, h, d or w: 30d is thirty days.")
    return int(found[1]) * _UNITS[found[2]]


def end_of(text: str, now_s: int) -> int:
    """Parse an expiry time: a duration from now, or a date or time in UTC. Return it in seconds since 1970.

    Args:
        text: The text; empty for never.
        now_s: The current time, in seconds since 1970.

    Returns:
        The expiry time; 0 for never.

    Raises:
        ConfigurationError: The text is invalid, or the time has passed.
    """
    if not text:
        return 0
    try:
        if _DURATION.fullmatch(text.strip()):
            end_s = now_s + duration_s(text)
        else:
            moment = datetime.datetime.fromisoformat(text.strip())
            end_s = int((moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp())
    except (ValueError, OverflowError):
        raise ConfigurationError(f"{text!r} is neither a length of time nor a date.",
                                 hint="Write for example 30d, 12h, 2027-01-31 or 2027-01-31T12:00, which are UTC.",
                                 ) from None
    if not now_s < end_s <= LATEST_S:
        raise ConfigurationError(f"{text!r} has passed, or lies beyond the year 9999.", hint="Write a later time.")
    return end_s

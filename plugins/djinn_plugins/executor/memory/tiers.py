"""Memory pressure, in three tiers."""

from __future__ import annotations

from enum import IntEnum

WARNING = 0.80
CRITICAL = 0.95
HYSTERESIS = 0.05
"""A tier is left this far below the fraction where it was entered, so that it does not flap with every value."""


class PressureLevel(IntEnum):
    """Memory pressure."""

    NORMAL = 0
    WARNING = 1
    """Cold storages are evicted in advance."""
    CRITICAL = 2
    """In addition, no program runs ahead."""


class Tiers:
    """Derives the memory pressure from the bytes held.

    Args:
        warning: Fraction of the limit at which `PressureLevel.WARNING` is entered.
        critical: Fraction of the limit at which `PressureLevel.CRITICAL` is entered.

    Attributes:
        tier: The current tier.

    Raises:
        ValueError: The fractions are not in increasing order.
    """

    def __init__(self, warning: float = WARNING, critical: float = CRITICAL) -> None:
        if not HYSTERESIS < warning < critical <= 1:
            raise ValueError(f"{warning:g} and {critical:g} are no tiers: {HYSTERESIS:g} < warning < critical <= 1 "
                             "has to hold")
        self.warning = warning
        self.critical = critical
        self.tier = PressureLevel.NORMAL

    def follow(self, held_bytes: int, limit_bytes: int) -> PressureLevel:
        """Update the tier from the bytes held, and return it."""
        part = held_bytes / limit_bytes
        # At least the level that these bytes enter, at most the level that they would not leave.
        self.tier = max(self._level(part), min(self.tier, self._level(part, HYSTERESIS)))
        return self.tier

    def _level(self, part: float, slack: float = 0.0) -> PressureLevel:
        if part >= self.critical - slack:
            return PressureLevel.CRITICAL
        return PressureLevel.WARNING if part >= self.warning - slack else PressureLevel.NORMAL

    def relaxed_bytes(self, limit_bytes: int) -> int:
        """Return the bytes below which the tier `PressureLevel.WARNING` is left."""
        return int((self.warning - HYSTERESIS) * limit_bytes)

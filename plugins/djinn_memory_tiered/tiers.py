"""Memory pressure, in three tiers."""

from __future__ import annotations

from enum import IntEnum

WARNING = 0.80
CRITICAL = 0.95
HYSTERESIS = 0.05
"""A tier is left this far below the fraction where it was entered, so that it does not flap with every value."""


class Tier(IntEnum):
    """Memory pressure."""

    NORMAL = 0
    WARNING = 1
    """Cold storages are evicted in advance."""
    CRITICAL = 2
    """In addition, no program runs ahead."""


class Tiers:
    """Derives the memory pressure from the bytes held.

    Args:
        warning: Fraction of the limit at which `Tier.WARNING` is entered.
        critical: Fraction of the limit at which `Tier.CRITICAL` is entered.

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
        self.tier = Tier.NORMAL

    def follow(self, held_bytes: int, limit_bytes: int) -> Tier:
        """Update the tier from the bytes held, and return it."""
        part = held_bytes / limit_bytes
        entered = Tier.CRITICAL if part >= self.critical else Tier.WARNING if part >= self.warning else Tier.NORMAL
        left = (Tier.CRITICAL if part >= self.critical - HYSTERESIS
                else Tier.WARNING if part >= self.warning - HYSTERESIS else Tier.NORMAL)
        # At least the tier that these bytes enter, at most the tier that they would not leave.
        self.tier = max(entered, min(self.tier, left))
        return self.tier

    def relaxed_bytes(self, limit_bytes: int) -> int:
        """Return the bytes below which the tier `Tier.WARNING` is left."""
        return int((self.warning - HYSTERESIS) * limit_bytes)

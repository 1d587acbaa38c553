"""How short memory is, in three tiers."""

from __future__ import annotations

from enum import IntEnum

WARNING = 0.80
CRITICAL = 0.95
HYSTERESIS = 0.05
"""A tier is left this much below where it was entered, so that it does not come and go with every value."""


class Tier(IntEnum):
    """How short memory is."""

    NORMAL = 0
    WARNING = 1
    """What is cold goes ahead of need."""
    CRITICAL = 2
    """Nothing is run ahead of what is asked for, either."""


class Tiers:
    """Follows what is held.

    Args:
        warning: Part of the limit at which the tier `Tier.WARNING` is entered.
        critical: The same of `Tier.CRITICAL`.

    Attributes:
        tier: The tier now.

    Raises:
        ValueError: The parts are in no order.
    """

    def __init__(self, warning: float = WARNING, critical: float = CRITICAL) -> None:
        if not HYSTERESIS < warning < critical <= 1:
            raise ValueError(f"{warning:g} and {critical:g} are no tiers: {HYSTERESIS:g} < warning < critical <= 1 "
                             "has to hold")
        self.warning = warning
        self.critical = critical
        self.tier = Tier.NORMAL

    def follow(self, held_bytes: int, limit_bytes: int) -> Tier:
        """Learn what is held, and return the tier."""
        part = held_bytes / limit_bytes
        entered = Tier.CRITICAL if part >= self.critical else Tier.WARNING if part >= self.warning else Tier.NORMAL
        left = (Tier.CRITICAL if part >= self.critical - HYSTERESIS
                else Tier.WARNING if part >= self.warning - HYSTERESIS else Tier.NORMAL)
        # Never below what would be entered anew, nor above what would not be left.
        self.tier = max(entered, min(self.tier, left))
        return self.tier

    def relaxed_bytes(self, limit_bytes: int) -> int:
        """Return what may be held for the tier `Tier.WARNING` to be left."""
        return int((self.warning - HYSTERESIS) * limit_bytes)

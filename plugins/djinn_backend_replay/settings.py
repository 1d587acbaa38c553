"""The settings of recovery."""

from __future__ import annotations

from typing import Literal

import attrs

from djinn.settings import setting

__all__ = ("RecoverySettings",)


@attrs.frozen
class RecoverySettings:
    """What happens when a server dies."""

    recovery: Literal["auto", "none", "replay"] = setting(
        "auto", help="`replay`: when a server dies, its values are recomputed, and the program continues; `auto`: if "
                     "`local_fallback` is set")
    recovery_bytes: int = setting(2**30, help="bytes of tensors that the client may keep for that", minimum=0)
    recovery_budget_s: float = setting(5.0, help="seconds of work that a recovery may have to repeat", above=0)
    recovery_timeout_s: float = setting(30.0, help="seconds that servers may take to come back", above=0)
    local_fallback: bool = setting(
        False, help="operations run in this process if no server answers, at the start or later")

    @property
    def is_on(self) -> bool:
        """Whether values are recomputed."""
        return self.recovery == "replay" or (self.recovery == "auto" and self.local_fallback)

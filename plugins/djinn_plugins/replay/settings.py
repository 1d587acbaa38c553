"""The settings of recovery."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import attrs

from djinn.settings import setting

__all__ = ("RecoverySettings",)


@attrs.frozen
class RecoverySettings:
    """What happens when a server dies."""

    recovery: Literal["auto", "none", "replay"] = setting(
        "auto", help="`replay`: when a server dies, its values are recomputed, and the program continues; `auto`: if "
                     "`servers` names several, or if `local_fallback` is set")
    recovery_bytes: int = setting(2**30, help="bytes of tensors that the client may keep for that", minimum=0)
    recovery_budget_s: float = setting(5.0, help="seconds of work that a recovery may have to repeat", above=0)
    recovery_timeout_s: float = setting(30.0, help="seconds that servers may take to come back", above=0)
    failover_timeout_s: float = setting(
        5.0, help="seconds that a server may take to come back while another of `servers` answers and can do its work",
        above=0)
    local_fallback: bool = setting(
        False, help="operations run in this process if no server answers, at the start or later")

    def is_on(self, addresses: Sequence[str]) -> bool:
        """Whether values are recomputed: if nothing else is said, if there is another executor for the work.

        Args:
            addresses: Of the session's servers.
        """
        has_another = self.local_fallback or len(set(addresses)) > 1
        return self.recovery == "replay" or (self.recovery == "auto" and has_another)

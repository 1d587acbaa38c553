"""Limits how much work a recovery may have to repeat, and decides when to act. No clock and no I/O."""

from __future__ import annotations

import math

CHECKPOINT_SHARE = 0.1
"""Fraction of the time that checkpoints may take."""
_FIRST_NODES = 1024
"""Number of operations before the first measurement of how long operations take."""


class Budget:
    """Keeps the work that a recovery must repeat below a number of seconds, regardless of the session's age.

    It is consulted before each piece of tape is submitted. From half of the budget on, it looks for a good moment for a
    checkpoint, when few values are live; from three quarters on, any moment is good.

    Args:
        limit_s: The budget.
        now_s: The time at which the session begins, by any clock.

    Laws:
        session.recovery_bounded
    """

    def __init__(self, limit_s: float, now_s: float) -> None:
        self.limit_s = limit_s
        self._checkpointed_at_s = now_s
        self._handed_at_s: float | None = None
        self._least_live = math.inf
        self._next_look_s = 0.0
        self._not_before_s = now_s

    def handed_over(self, now_s: float) -> None:
        """Record that work has been submitted to an executor."""
        if self._handed_at_s is None:
            self._handed_at_s = now_s

    def measured(self) -> None:
        """Record that the duration of all work so far is known."""
        self._handed_at_s = None

    def is_measurement_due(self, nodes: int, node_s: float, now_s: float) -> bool:
        """Whether to measure how long work takes, instead of waiting until the program requests a value.

        Args:
            nodes: Number of operations that have not been measured.
            node_s: Seconds per operation in earlier measurements; 0 if unknown.
            now_s: The current time.
        """
        if not nodes or self._handed_at_s is None:
            return False
        part_s = self.limit_s / 4
        return nodes * (node_s or part_s / _FIRST_NODES) >= part_s or now_s - self._handed_at_s >= part_s

    def is_look_due(self, replay_s: float, live: int, now_s: float) -> bool:
        """Whether to estimate the benefit and cost of a checkpoint.

        Args:
            replay_s: How long a recovery would take now.
            live: How many values are live.
            now_s: The current time.
        """
        self._least_live = min(self._least_live, live)
        if replay_s < max(self.limit_s / 2, self._next_look_s) or now_s < self._not_before_s:
            return False
        return live <= self._least_live or replay_s >= 0.75 * self.limit_s

    def allows(self, takes_s: float, now_s: float) -> bool:
        """Whether a checkpoint that takes ``takes_s`` may be made now; if not, postpone the next look until it may."""
        if takes_s <= CHECKPOINT_SHARE * (now_s - self._checkpointed_at_s):
            return True
        self._not_before_s = self._checkpointed_at_s + takes_s / CHECKPOINT_SHARE
        return False

    def looked(self, replay_s: float) -> None:
        """Record that a checkpoint would not help, because about ``replay_s`` of work would remain in any case."""
        self._next_look_s = 1.25 * replay_s + self.limit_s / 8

    def checkpointed(self, replay_s: float, now_s: float) -> None:
        """Record a checkpoint, after which ``replay_s`` of work remains to be repeated."""
        self.looked(replay_s)
        self._checkpointed_at_s = self._not_before_s = now_s
        self._least_live = math.inf

"""How much a recovery may have to do again, and when to do something about it. No clock, no input, no output."""

from __future__ import annotations

import math

CHECKPOINT_SHARE = 0.1
"""Part of the time that checkpoints may take."""
_FIRST_NODES = 1024
"""Operations after which is asked for the first time how long they took."""


class Budget:
    """Keeps the work that a recovery has to do again below a number of seconds, whatever the age of the session.

    It is asked before each piece of tape is handed over. From half of the budget on it looks for a good place for a
    checkpoint, where few values are alive; from three quarters on, any place is good.

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
        """Learn that work is on its way to an executor."""
        if self._handed_at_s is None:
            self._handed_at_s = now_s

    def measured(self) -> None:
        """Learn that it is known how long all work took so far."""
        self._handed_at_s = None

    def is_measurement_due(self, nodes: int, node_s: float, now_s: float) -> bool:
        """Whether to ask how long work takes, rather than to wait until the program asks for a value.

        Args:
            nodes: Operations of which it is not known.
            node_s: How long earlier ones took each; 0 if that is not known either.
            now_s: The time.
        """
        if not nodes or self._handed_at_s is None:
            return False
        part_s = self.limit_s / 4
        return nodes * (node_s or part_s / _FIRST_NODES) >= part_s or now_s - self._handed_at_s >= part_s

    def is_look_due(self, replay_s: float, live: int, now_s: float) -> bool:
        """Whether to look what a checkpoint would save and take.

        Args:
            replay_s: What a recovery would have to do again now.
            live: How many values are alive.
            now_s: The time.
        """
        self._least_live = min(self._least_live, live)
        if replay_s < max(self.limit_s / 2, self._next_look_s) or now_s < self._not_before_s:
            return False
        return live <= self._least_live or replay_s >= 0.75 * self.limit_s

    def allows(self, takes_s: float, now_s: float) -> bool:
        """Whether a checkpoint may be made that takes so long; if not, it is not looked for one until it may."""
        if takes_s <= CHECKPOINT_SHARE * (now_s - self._checkpointed_at_s):
            return True
        self._not_before_s = self._checkpointed_at_s + takes_s / CHECKPOINT_SHARE
        return False

    def looked(self, replay_s: float) -> None:
        """Learn that there was nothing to be gained: so much would have to be done again whatever is fetched."""
        self._next_look_s = 1.25 * replay_s + self.limit_s / 8

    def checkpointed(self, replay_s: float, now_s: float) -> None:
        """Learn that a checkpoint was made, which leaves so much to be done again."""
        self.looked(replay_s)
        self._checkpointed_at_s = self._not_before_s = now_s
        self._least_live = math.inf

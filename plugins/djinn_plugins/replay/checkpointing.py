"""Makes checkpoints: decides when and of which values, and reports when they cannot be made often enough."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from time import monotonic, thread_time
from typing import Any

import torch

from djinn.errors import RecoveryBudgetError
from djinn.ir.value import Slot
from djinn.wire.messages import GENERATOR_HANDLE
from djinn_plugins.replay.budget import CHECKPOINT_SHARE, Budget
from djinn_plugins.replay.checkpoints import FetchCandidate, FetchPlan, plan
from djinn_plugins.replay.entries import Generators
from djinn_plugins.replay.journal import Journal
from djinn_plugins.replay.replaying import ReplayTarget
from djinn_plugins.replay.retained import Kept, size_of

log = logging.getLogger("djinn.recovery")

BYTES_PER_S = 200e6
"""Assumed transfer rate to the client until it has been measured."""


class Checkpointer:
    """Fetches values so that a recovery need not recompute them.

    Args:
        journal: The session's journal.
        budget_s: How much work a recovery may have to repeat, in seconds.
        devices: Devices with their own random numbers; ``None`` for the only one.
        clock: Returns the time in seconds.

    Attributes:
        counts: Checkpoints, and bytes fetched for them.
    """

    def __init__(self, journal: Journal, budget_s: float, devices: Sequence[torch.device | None],
                 clock: Callable[[], float] = monotonic) -> None:
        self.counts: Counter[str] = Counter()
        self._journal = journal
        self._devices = devices
        self._clock = clock
        self._budget = Budget(budget_s, clock())
        self._bytes_per_s = BYTES_PER_S
        self._next_bytes = self._crowded_bytes()
        self._poisoned: set[int] = set()
        self._said: set[str] = set()

    @property
    def is_measurement_due(self) -> bool:
        """Whether to measure how long work takes, instead of waiting until the program requests a value."""
        return self._budget.is_measurement_due(self._journal.unmeasured, self._journal.node_s, self._clock())

    def is_due(self, released: int) -> bool:
        """Whether to check if a checkpoint is worthwhile.

        Args:
            released: How many values that are live according to the journal have been released.
        """
        live = len(self._journal.live) - released
        return (self._budget.is_look_due(self._journal.replay_s, live, self._clock())
                or self._journal.size_bytes > self._next_bytes)

    def handed_over(self) -> None:
        """Record that work has been submitted to an executor."""
        self._budget.handed_over(self._clock())

    def measured(self, took_s: float) -> None:
        """Record how long all work submitted since the last call took."""
        self._journal.measured(took_s)
        self._budget.measured()

    def checkpoint(self, hands: ReplayTarget) -> None:
        """Make a checkpoint if it is worthwhile. All submitted work must have been answered."""
        journal, budget = self._journal, self._budget
        began_s = thread_time()
        size_bytes = journal.size_bytes
        journal.compact()
        is_crowded = journal.size_bytes > self._next_bytes
        if journal.replay_s < budget.limit_s / 2 and not is_crowded:
            budget.looked(journal.replay_s)
            return
        found = plan(journal, journal.costs(), self._bytes_per_s, self._poisoned)
        takes_s = found.size_bytes / self._bytes_per_s + thread_time() - began_s
        self._next_bytes = self._crowded_bytes()
        if found.left_s > journal.replay_s / 2 and not (is_crowded and found.left_bytes < size_bytes // 2):
            self._refuse(found, "pieces", "what it would have to do again is mostly for values that cannot be fetched "
                         "in one piece", "See docs/recovery.md.")
            budget.looked(journal.replay_s)
        elif found.left_bytes > journal.limit_bytes:
            self._refuse(found, "bytes", f"a checkpoint has {found.left_bytes:,} bytes, and recovery_bytes allows "
                         f"{journal.limit_bytes:,}", "Allow more recovery_bytes.")
            budget.looked(journal.replay_s)
        elif budget.allows(takes_s, self._clock()):
            self.fetch(hands, found)
        else:
            self._refuse(found, "share", f"a checkpoint takes {takes_s:.2g} s, and all of them may take "
                         f"{CHECKPOINT_SHARE:.0%} of the time: there is one every {takes_s / CHECKPOINT_SHARE:.3g} s",
                         "Use a faster connection, or set recovery_budget_s to what is good enough for you.")

    def fetch(self, hands: ReplayTarget, found: FetchPlan) -> None:
        """Fetch the planned values and the random states, and drop the operations that produced them."""
        began_s = self._clock()
        states = [Slot(GENERATOR_HANDLE, index) for index in range(len(self._devices))]
        fetched = self._fetched(hands, [*states, *(candidate.slot for candidate in found.candidates)])
        if any(state not in fetched for state in states):
            self._budget.looked(self._journal.replay_s)
            return
        generators = Generators([(device, fetched[state]) for device, state in zip(self._devices, states, strict=True)],
                                hands.device_kind)
        snapshots = [candidate.snapshot(Kept(fetched[candidate.slot])) for candidate in found.candidates
                     if candidate.slot in fetched and _is_as_expected(fetched[candidate.slot], candidate)]
        size_bytes = sum(size_of(snapshot.kept.tensor) for snapshot in snapshots)
        took_s = max(self._clock() - began_s, 1e-6)
        if size_bytes > 2**20:
            self._bytes_per_s = (self._bytes_per_s + size_bytes / took_s) / 2
        self._journal.add_checkpoint(snapshots, generators)
        self._budget.checkpointed(self._journal.replay_s, self._clock())
        self._next_bytes = self._crowded_bytes()
        self.counts.update(checkpoints=1, checkpoint_bytes=size_bytes, checkpoint_ms=round(1000 * took_s))
        log.info("checkpoint: %d storages, %s bytes in %.3f s; %d operations are left to carry out again",
                 len(snapshots), f"{size_bytes:,}", took_s, self._journal.node_count)

    def _crowded_bytes(self) -> int:
        """Return above how many kept bytes, mostly uploads, a checkpoint should free some of them."""
        return max(self._journal.limit_bytes // 2, self._journal.size_bytes + self._journal.size_bytes // 4)

    def _fetched(self, hands: ReplayTarget, slots: Sequence[Slot]) -> dict[Slot, Any]:
        """Fetch values; failed ones are left out and remembered."""
        try:
            return dict(zip(slots, hands.backend.fetch(slots, whole=True), strict=True))
        except Exception as error:  # noqa: BLE001  # nobody asked for them: what is the matter shows when somebody does
            log.debug("not fetched: %s", error)
            if hands.is_broken:
                return {}
            if len(slots) > 1:
                half = len(slots) // 2
                return {**self._fetched(hands, slots[:half]), **self._fetched(hands, slots[half:])}
            self._poisoned = {number for number in (*self._poisoned, slots[0].number) if number in self._journal.live}
            return {}

    def _refuse(self, found: FetchPlan, kind: str, why: str, hint: str) -> None:
        """Warn that a recovery may take longer than the budget, once for each reason."""
        log.debug("no checkpoint: %s", why)
        replay_s, limit_s = self._journal.replay_s, self._budget.limit_s
        if replay_s > limit_s and kind not in self._said:
            self._said.add(kind)
            log.warning("%s", RecoveryBudgetError(
                f"A recovery would have to do {replay_s:.3g} s of work again ({found.operations:,} operations), and "
                f"recovery_budget_s is {limit_s:g}: {why}.", hint=hint))


def _is_as_expected(tensor: Any, candidate: FetchCandidate) -> bool:
    spec = candidate.spec
    return (isinstance(tensor, torch.Tensor) and tensor.dtype == spec.dtype and tensor.size() == spec.size
            and tensor.stride() == spec.stride)

"""What this process has done in all its sessions: the counters behind `djinn.metrics`."""

from __future__ import annotations

import threading
from collections import Counter

import attrs

__all__ = ("TOTALS", "DurationSum", "Totals")


@attrs.define
class DurationSum:
    """Durations of one kind.

    Attributes:
        count: How many there were.
        seconds: Their sum.
    """

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Add one."""
        self.count += 1
        self.seconds += seconds


@attrs.define
class Totals:
    """Counters that never fall while the process lives.

    Attributes:
        sessions: Sums of the counters of sessions that have ended, as `djinn.stats` gives them.
        planned: Time for calls that a session had not seen before: inference and all that follows from it.
        unanswered_shapes: Calls whose results' metadata the executor had to be asked for.
        slow_shape_rules: Calls whose inference took longer than `djinn_plugins.watch.observer.planning.SLOW_RULE_S`.
        schedules: Time of schedulers.
        strategies: Schedules by the name of their scheduler.
        requests: Time of requests that were answered or failed.
        batches: Batches by how they were sent.
        failed_requests: Requests that were not answered.
        programs_run: Runs of programs.
        programs_defined: Programs that had to be sent first.
        uploads: Tensors that were sent.
        uploads_known: Tensors that the server had already.
        memory_failures: Answers that reported a lack of memory.
        lock: For counters that several threads change.
    """

    sessions: Counter[str] = attrs.field(factory=Counter)
    planned: DurationSum = attrs.field(factory=DurationSum)
    unanswered_shapes: int = 0
    slow_shape_rules: int = 0
    schedules: DurationSum = attrs.field(factory=DurationSum)
    strategies: Counter[str] = attrs.field(factory=Counter)
    requests: DurationSum = attrs.field(factory=DurationSum)
    batches: Counter[str] = attrs.field(factory=Counter)
    failed_requests: int = 0
    programs_run: int = 0
    programs_defined: int = 0
    uploads: int = 0
    uploads_known: int = 0
    memory_failures: int = 0
    lock: threading.Lock = attrs.field(factory=threading.Lock)

    def scheduled(self, scheduler: str, seconds: float) -> None:
        """Count a schedule."""
        with self.lock:
            self.schedules.add(seconds)
            self.strategies[scheduler] += 1


TOTALS = Totals()
"""Those of this process."""

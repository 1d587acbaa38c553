"""From times of workloads to a profile of the device that ran them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import attrs
from djinn_lib_graph.metadata import MemoryPattern

from djinn_lib_schedule.schedule import DeviceProfile, OperationProfile, Rate, Sample

__all__ = ("Call", "Measured", "fit")

SMALL_BYTES = 64 << 10
SMALL_FLOPS = 1e5
"""Up to here, a call is nothing but its launch."""
_HARDLY = 0.05
"""Part of a call's time below which its work cannot be told from its launch."""
_USUAL = DeviceProfile()


@attrs.frozen
class Call:
    """One call within a workload."""

    operation: str
    flops: float
    size_bytes: float
    pattern: MemoryPattern

    @property
    def is_small(self) -> bool:
        """Whether only its launch counts."""
        return self.size_bytes <= SMALL_BYTES and self.flops <= SMALL_FLOPS


@attrs.frozen
class Measured:
    """A workload, what it calls, and what a run of it took."""

    name: str
    calls: tuple[Call, ...]
    seconds: float

    @property
    def main(self) -> str:
        """The operation that would usually take most of it."""
        totals: dict[str, float] = {}
        for call in self.calls:
            usual_s = _USUAL.seconds(call.flops, call.size_bytes, call.pattern)
            totals[call.operation] = totals.get(call.operation, 0.0) + usual_s
        return max(totals, key=lambda operation: totals[operation])

    @property
    def operations(self) -> frozenset[str]:
        """Everything that it calls."""
        return frozenset(call.operation for call in self.calls)

    @property
    def is_small(self) -> bool:
        """Whether all of it is launches."""
        return all(call.is_small for call in self.calls)


def fit(measured: Sequence[Measured], *, run_s: float, empty_s: float) -> DeviceProfile:
    """Make a profile.

    Launches come from workloads that move next to nothing. From the others' times their launches, and what they call
    beside the operation that they are about, are taken off; what remains is that operation's. Rates for operations that
    nobody measured are medians, by the way through memory.

    Args:
        measured: The workloads.
        run_s: What handing over and beginning a run takes.
        empty_s: What a run took that did nothing, with the way there and back: it is in every run.
    """
    kept = sorted((each for each in measured if each.calls), key=lambda each: len(each.operations))
    profile = attrs.evolve(_USUAL, run_s=run_s, is_measured=True)
    for is_small in (True, False):
        for each in kept:
            if each.is_small is is_small:
                profile = _with(profile, each, empty_s)
        profile = _with_medians(profile, kept) if is_small else profile
    return attrs.evolve(profile, rates=_rates(profile, kept))


def _with(profile: DeviceProfile, measured: Measured, empty_s: float) -> DeviceProfile:
    """Add what one workload tells of its main operation."""
    main = measured.main
    calls = [call for call in measured.calls if call.operation == main]
    rest_s = sum(profile.seconds(call.flops, call.size_bytes, call.pattern, call.operation)
                 for call in measured.calls if call.operation != main)
    call_s = (measured.seconds - empty_s - rest_s) / len(calls)
    known = profile.operations.get(main)
    if measured.is_small:
        launch_s = max(call_s, 0.0) if known is None else min(known.launch_s, max(call_s, 0.0))
        found = OperationProfile(launch_s)
    else:
        before = known or OperationProfile(profile.launch_s)
        work_s = call_s - before.launch_s
        if work_s < _HARDLY * call_s or call_s <= 0:
            return profile
        sample = Sample(statistics.fmean(call.flops for call in calls),
                        statistics.fmean(call.size_bytes for call in calls), work_s)
        found = attrs.evolve(before, samples=(*before.samples, sample))
    return attrs.evolve(profile, operations={**profile.operations, main: found})


def _with_medians(profile: DeviceProfile, measured: Sequence[Measured]) -> DeviceProfile:
    """Say what operations take that were not measured: the median of those that were."""
    views = {call.operation for each in measured for call in each.calls if call.pattern is MemoryPattern.NONE}
    of_views = [known.launch_s for name, known in profile.operations.items() if name in views]
    of_others = [known.launch_s for name, known in profile.operations.items() if name not in views]
    return attrs.evolve(profile, view_s=statistics.median(of_views or [_USUAL.view_s]),
                        launch_s=statistics.median(of_others or [_USUAL.launch_s]))


def _rates(profile: DeviceProfile, measured: Sequence[Measured]) -> Mapping[MemoryPattern, Rate]:
    """Find the usual rates of each way through memory."""
    patterns = {(call.operation, call.flops, call.size_bytes): call.pattern for each in measured for call in each.calls}
    flops: dict[MemoryPattern, list[float]] = {}
    moved: dict[MemoryPattern, list[float]] = {}
    for operation, known in profile.operations.items():
        for sample in known.samples:
            pattern = patterns.get((operation, sample.flops, sample.size_bytes), MemoryPattern.SEQUENTIAL)
            moved.setdefault(pattern, []).append(sample.size_bytes / sample.seconds)
            if sample.flops:
                flops.setdefault(pattern, []).append(sample.flops / sample.seconds)
    fastest_flops = max((rate for rates in flops.values() for rate in rates), default=_USUAL.rate.flops_per_s)
    fastest_moved = max((rate for rates in moved.values() for rate in rates), default=_USUAL.rate.bytes_per_s)
    # What computes is bound by that, and what streams by memory: the other rate is then no bound.
    return {pattern: Rate(statistics.median(flops[pattern]), fastest_moved) if pattern is MemoryPattern.REUSED
            else Rate(fastest_flops, statistics.median(rates)) for pattern, rates in moved.items()}

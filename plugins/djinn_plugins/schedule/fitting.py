"""Derives a device's profile from the times of workloads."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import attrs

from djinn_plugins.graph.metadata import MemoryPattern
from djinn_plugins.schedule.schedule import DeviceProfile, OperationProfile, Rate, Sample

__all__ = ("Measured", "MeasuredCall", "fit")

SMALL_BYTES = 64 << 10
SMALL_FLOPS = 1e5
"""Up to this size, a call costs only its launch."""
_HARDLY = 0.05
"""Below this fraction of a call's time, its work cannot be distinguished from its launch."""
_USUAL = DeviceProfile()


@attrs.frozen
class MeasuredCall:
    """One call within a workload."""

    operation: str
    flops: float
    size_bytes: float
    pattern: MemoryPattern

    @property
    def is_small(self) -> bool:
        """Whether only its launch matters."""
        return self.size_bytes <= SMALL_BYTES and self.flops <= SMALL_FLOPS


@attrs.frozen
class Measured:
    """A workload, its calls, and how long a run of it took."""

    name: str
    calls: tuple[MeasuredCall, ...]
    seconds: float

    @property
    def main(self) -> str:
        """The operation that usually takes most of the time."""
        totals: dict[str, float] = {}
        for call in self.calls:
            usual_s = _USUAL.seconds(call.flops, call.size_bytes, call.pattern)
            totals[call.operation] = totals.get(call.operation, 0.0) + usual_s
        return max(totals, key=lambda operation: totals[operation])

    @property
    def operations(self) -> frozenset[str]:
        """All operations that it calls."""
        return frozenset(call.operation for call in self.calls)

    @property
    def is_small(self) -> bool:
        """Whether it consists of launches only."""
        return all(call.is_small for call in self.calls)


def fit(measured: Sequence[Measured], *, run_s: float, empty_s: float) -> DeviceProfile:
    """Derive a profile.

    Launch times come from workloads that move almost nothing. From the times of the others, the launches and the calls
    of other operations are subtracted; the remainder is attributed to the main operation. Rates for operations without
    a measurement are medians, by memory access pattern.

    Args:
        measured: The workloads.
        run_s: How long submitting and starting a run takes.
        empty_s: How long a run that does nothing takes, including the round trip; every run includes it.
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
    """Add the result of one workload for its main operation."""
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
    """Fill in operations without a measurement: the median of the measured ones."""
    views = {call.operation for each in measured for call in each.calls if call.pattern is MemoryPattern.NONE}
    of_views = [known.launch_s for name, known in profile.operations.items() if name in views]
    of_others = [known.launch_s for name, known in profile.operations.items() if name not in views]
    return attrs.evolve(profile, view_s=statistics.median(of_views or [_USUAL.view_s]),
                        launch_s=statistics.median(of_others or [_USUAL.launch_s]))


def _rates(profile: DeviceProfile, measured: Sequence[Measured]) -> Mapping[MemoryPattern, Rate]:
    """Return the typical rates for each memory access pattern."""
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
    # Compute-bound work is limited by arithmetic, streaming work by memory: the other rate is then no limit.
    return {pattern: Rate(statistics.median(flops[pattern]), fastest_moved) if pattern is MemoryPattern.REUSED
            else Rate(fastest_flops, statistics.median(rates)) for pattern, rates in moved.items()}

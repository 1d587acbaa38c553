"""Execution schedules: what runs where and when, what moves, what stays; and what schedulers may know of devices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum

import attrs
from djinn_lib_graph.graph import Graph
from djinn_lib_graph.metadata import MemoryPattern


@attrs.frozen
class Rate:
    """What a device does of one kind of work: the roofline of `DeviceProfile.seconds`."""

    flops_per_s: float
    """Floating-point operations per second; a multiply-add counts as two."""
    bytes_per_s: float
    """Bytes that are read and written per second."""


@attrs.frozen
class Sample:
    """One measured call of an operation."""

    flops: float
    size_bytes: float
    """Bytes that are read and written."""
    seconds: float
    """What it took beyond its launch."""


@attrs.frozen
class OperationProfile:
    """What one operation was measured to take, at several sizes."""

    launch_s: float
    """What it takes however small it is."""
    samples: tuple[Sample, ...] = ()

    def seconds(self, flops: float, size_bytes: float) -> float:
        """Predict a call from those that were measured: each is scaled to the work asked for, near ones count more.

        Source:
            Shepard, "A two-dimensional interpolation function for irregularly-spaced data", ACM 1968; in logarithms.
        """
        total = weights = 0.0
        for sample in self.samples:
            scale, apart = _ratio(size_bytes, sample.size_bytes)
            if flops and sample.flops:
                # What computes takes time by that. Calls of one intensity are bound by the same, whatever their size.
                more_bytes = scale
                scale, apart = _ratio(flops, sample.flops)
                apart += _INTENSITY * _ratio(scale, more_bytes)[1]
            weight = 1 / (apart + _NEAR) ** 2
            total += weight * scale * sample.seconds
            weights += weight
        return self.launch_s + (total / weights if weights else 0.0)


_INTENSITY = 4.0
"""How much more a difference in FLOP per byte sets two calls apart than one in size."""
_NEAR = 1e-3
"""Squared distance below which samples count alike; it keeps an exact hit from dividing by zero."""


def _ratio(asked: float, measured: float) -> tuple[float, float]:
    """Return the ratio of two amounts, and the square of its logarithm; of none, 0 for both."""
    if asked <= 0 or measured <= 0:
        return 0.0, 0.0
    return asked / measured, math.log(asked / measured) ** 2


@attrs.frozen
class DeviceProfile:
    """How fast a device is."""

    rates: Mapping[MemoryPattern, Rate] = attrs.field(factory=dict)
    """By the way operations go through memory; what is missing goes by ``rate``."""
    rate: Rate = Rate(5e10, 1e10)
    launch_s: float = 5e-6
    """What an operation takes however small it is."""
    view_s: float = 2e-6
    """What an operation takes that moves nothing."""
    run_s: float = 1e-4
    """What handing over and beginning a piece of work takes, however short it is."""
    operations: Mapping[str, OperationProfile] = attrs.field(factory=dict)
    """By qualified overload: those that were measured by themselves."""
    is_measured: bool = False
    """Whether `djinn.calibrate` has measured it; otherwise these are defaults for one core of a CPU."""

    def seconds(
        self, flops: float, size_bytes: float, pattern: MemoryPattern = MemoryPattern.SEQUENTIAL, operation: str = ""
    ) -> float:
        """Predict what an operation takes: its launch, then what binds it, arithmetic or memory.

        Args:
            flops: Floating-point operations.
            size_bytes: Bytes that are read and written.
            pattern: How it goes through memory.
            operation: Its qualified overload. If it was measured, that counts more than what is usual.

        Source:
            Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009.
        """
        known = self.operations.get(operation)
        if known is not None and (known.samples or not size_bytes):
            return known.seconds(flops, size_bytes)
        if pattern is MemoryPattern.NONE:
            return self.view_s
        rate = self.rates.get(pattern, self.rate)
        return self.launch_s + max(flops / rate.flops_per_s, size_bytes / rate.bytes_per_s)


@attrs.frozen
class LinkProfile:
    """How fast values move from one device to another."""

    latency_s: float = 2e-4
    bytes_per_s: float = 1e9
    is_measured: bool = False
    """Whether `djinn.calibrate` has measured it; otherwise these are defaults for a local network."""

    def seconds(self, size_bytes: float) -> float:
        """Predict what moving so many bytes takes."""
        return self.latency_s + size_bytes / self.bytes_per_s


@attrs.frozen
class DeviceInfo:
    """What a scheduler may know of a device."""

    id: str
    """Name within the schedule."""
    memory_bytes: int | None = None
    """Memory that may be used in all; ``None`` if unknown."""
    held_bytes: int = 0
    """Of it, bytes of values that are there already, those in ``holds`` and ``copies`` included."""
    holds: frozenset[str] = frozenset()
    """Values from outside the graph that are at home here: what writes them, or makes views of them, runs here."""
    copies: frozenset[str] = frozenset()
    """Values from outside the graph of which a copy is here, until somebody writes them."""
    profile: DeviceProfile = DeviceProfile()
    links: Mapping[str, LinkProfile] = attrs.field(factory=dict)
    """By identifier of the other device, from here to there; what is missing goes by `LinkProfile`'s defaults."""
    home_link: LinkProfile = LinkProfile()
    """From here to the client."""
    load: float = 0.0
    """Fraction of the time, from 0 to below 1, in which it is busy with the work of others."""


class CachingPolicy(StrEnum):
    """How long a value stays where it is."""

    PERSIST = "persist"
    """It outlives the graph: a weight, a cache, a result that somebody names."""
    UNTIL_LAST_USE = "until_last_use"
    """It goes with the last node that reads it."""
    RECOMPUTE = "recompute"
    """It is made on every device that reads it, instead of being moved there."""


@attrs.frozen
class Transfer:
    """A value that moves between devices."""

    value: str
    source: str
    target: str
    after: str = ""
    """The node that made it what it is: its producer, or the last that wrote its storage. Empty: as it was before the
    graph. Where ``target`` is the value's home, it is written back into its place."""
    size_bytes: int = attrs.field(default=0, eq=False)


@attrs.frozen
class Span:
    """When something runs, in seconds from the beginning of the graph."""

    begin_s: float
    end_s: float


@attrs.frozen
class CostEstimate:
    """What a schedule is expected to cost."""

    latency_s: float = 0.0
    """From the first node to the last, everything included."""
    compute_s: float = 0.0
    """Of all devices together."""
    transfer_s: float = 0.0
    """Of all links together."""
    queueing_s: float = 0.0
    """Waiting for the work of others."""
    transferred_bytes: int = 0
    score: float = 0.0
    """Weighted sum of computing, transfers and queueing; what schedules are compared by, together with latency."""
    is_measured: bool = False
    """Whether all the profiles it rests on were measured; otherwise some are defaults."""


@attrs.frozen
class ExecutionSchedule:
    """Where and in which order the nodes of a graph run."""

    order: tuple[str, ...]
    """Node identifiers in execution order."""
    devices: Mapping[str, str]
    """Device of each node."""
    transfers: tuple[Transfer, ...] = ()
    """Values that must move, in no particular order."""
    scheduler: str = ""
    """Who made it."""
    replicas: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)
    """Further devices on which a node runs as well, so that its results need not move: views, and what is cheaper to
    compute again. Such a node writes nothing and draws no random numbers."""
    placements: Mapping[str, str] = attrs.field(factory=dict)
    """Device for each value from outside the graph that no device holds yet."""
    caching: Mapping[str, CachingPolicy] = attrs.field(factory=dict)
    """By value; what is missing goes with its last use."""
    budgets: Mapping[str, int] = attrs.field(factory=dict)
    """Largest number of bytes held at once, by device, what was there before included."""
    spans: Mapping[str, Span] = attrs.field(factory=dict)
    """When each node is expected to run, by node."""
    transfer_spans: Mapping[Transfer, Span] = attrs.field(factory=dict)
    """When each transfer is expected to happen."""
    estimate: CostEstimate = CostEstimate()
    flags: frozenset[str] = frozenset()
    """What is special: ``split`` (several devices), ``reduction_remote`` (a reduction stays there to save the network),
    ``recomputes``, ``phase:<phase>``, ``defaults`` (a profile was not measured)."""
    graph: Graph | None = attrs.field(default=None, eq=False, repr=False)
    """What it is a schedule of, if that is kept; `djinn.execute` needs it."""
    device_infos: tuple[DeviceInfo, ...] = attrs.field(default=(), eq=False, repr=False)
    """What was known of the devices when it was made, if that is kept; `djinn.explain` says more with it."""

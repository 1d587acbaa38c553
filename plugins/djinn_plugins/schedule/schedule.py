"""Execution schedules: placement, order, transfers and lifetimes; and the device information for schedulers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import attrs

from djinn.errors import ScheduleError
from djinn_plugins.graph.graph import Graph
from djinn_plugins.graph.metadata import MemoryPattern


@attrs.frozen
class Rate:
    """A device's throughput for one kind of work: the roofline of `DeviceProfile.seconds`."""

    flops_per_s: float
    """Floating-point operations per second; a multiply-add counts as two."""
    bytes_per_s: float
    """Bytes read and written per second."""


@attrs.frozen
class Sample:
    """One measured call of an operation."""

    flops: float
    size_bytes: float
    """Bytes read and written."""
    seconds: float
    """Duration without the launch."""


@attrs.frozen
class OperationProfile:
    """Measured times of one operation, at several sizes."""

    launch_s: float
    """Fixed launch time, independent of the size."""
    samples: tuple[Sample, ...] = ()

    def seconds(self, flops: float, size_bytes: float) -> float:
        """Predict a call from measured ones: each is scaled to the requested work, and similar ones have more weight.

        Source:
            Shepard, "A two-dimensional interpolation function for irregularly-spaced data", ACM 1968; in logarithms.
        """
        total = weights = 0.0
        for sample in self.samples:
            scale, apart = _ratio(size_bytes, sample.size_bytes)
            if flops and sample.flops:
                # The time of compute-bound work scales with its FLOP. Calls of equal intensity have the same bottleneck
                # at any size.
                more_bytes = scale
                scale, apart = _ratio(flops, sample.flops)
                apart += _INTENSITY * _ratio(scale, more_bytes)[1]
            weight = 1 / (apart + _NEAR) ** 2
            total += weight * scale * sample.seconds
            weights += weight
        return self.launch_s + (total / weights if weights else 0.0)


_INTENSITY = 4.0
"""How much more a difference in FLOP per byte separates two calls than a difference in size."""
_NEAR = 1e-3
"""Squared distance below which samples have equal weight; it keeps an exact hit from dividing by zero."""


def _ratio(asked: float, measured: float) -> tuple[float, float]:
    """Return the ratio of two amounts, and the square of its logarithm; 0 for both if an amount is zero."""
    if asked <= 0 or measured <= 0:
        return 0.0, 0.0
    return asked / measured, math.log(asked / measured) ** 2


@attrs.frozen
class DeviceProfile:
    """The speed of a device."""

    rates: Mapping[MemoryPattern, Rate] = attrs.field(factory=dict)
    """By memory access pattern; ``rate`` applies to missing ones."""
    rate: Rate = Rate(5e10, 1e10)
    launch_s: float = 5e-6
    """Fixed launch time of an operation, independent of its size."""
    view_s: float = 2e-6
    """Time of an operation that moves no bytes."""
    run_s: float = 1e-4
    """Fixed time to submit and start a piece of work."""
    operations: Mapping[str, OperationProfile] = attrs.field(factory=dict)
    """By qualified overload: operations that were measured individually."""
    is_measured: bool = False
    """Whether `djinn.calibrate` has measured it; otherwise these are defaults for a single CPU core."""

    def seconds(
        self, flops: float, size_bytes: float, pattern: MemoryPattern = MemoryPattern.SEQUENTIAL, operation: str = ""
    ) -> float:
        """Predict the time of an operation: its launch, plus the bottleneck, either arithmetic or memory.

        Args:
            flops: Floating-point operations.
            size_bytes: Bytes read and written.
            pattern: Its memory access pattern.
            operation: Its qualified overload. Its own measurement takes precedence over the general rates.

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
    """The speed of transfers from one device to another."""

    latency_s: float = 2e-4
    bytes_per_s: float = 1e9
    is_measured: bool = False
    """Whether `djinn.calibrate` has measured it; otherwise these are defaults for a local network."""

    def seconds(self, size_bytes: float) -> float:
        """Predict how long a transfer of this size takes."""
        return self.latency_s + size_bytes / self.bytes_per_s


@attrs.frozen
class DeviceInfo:
    """Information on a device for a scheduler."""

    id: str
    """Name within the schedule."""
    memory_bytes: int | None = None
    """Total usable memory; ``None`` if unknown."""
    held_bytes: int = 0
    """Bytes of it that existing values use, including those in ``holds`` and ``copies``."""
    holds: frozenset[str] = frozenset()
    """Values from outside the graph whose home is this device: operations that write or view them run here."""
    copies: frozenset[str] = frozenset()
    """Values from outside the graph of which a copy is here, valid until the value is written."""
    profile: DeviceProfile = DeviceProfile()
    links: Mapping[str, LinkProfile] = attrs.field(factory=dict)
    """By identifier of the other device, from here to there; `LinkProfile`'s defaults apply to missing ones."""
    home_link: LinkProfile = LinkProfile()
    """From here to the client."""
    load: float = 0.0
    """Fraction of the last seconds, from 0 to below 1, in which it was busy with other sessions' work."""


class CachingPolicy(StrEnum):
    """How long a value stays where it is."""

    PERSIST = "persist"
    """It outlives the graph: a weight, a cache, or a result that is still referenced."""
    UNTIL_LAST_USE = "until_last_use"
    """It is freed after the last node that reads it."""
    RECOMPUTE = "recompute"
    """It is computed on every device that reads it, instead of being moved there."""


@attrs.frozen
class Transfer:
    """A value that moves between devices."""

    value: str
    source: str
    target: str
    after: str = ""
    """The node that produced its current version: its producer, or the last node that wrote its storage. Empty: the
    version from before the graph. If ``target`` is the value's home, the value is written back in place.
    """
    size_bytes: int = attrs.field(default=0, eq=False)


@attrs.frozen
class StepSpan:
    """When a step runs, in seconds from the beginning of the graph."""

    begin_s: float
    end_s: float


@attrs.frozen
class CostEstimate:
    """The expected cost of a schedule."""

    latency_s: float = 0.0
    """From the first node to the last, including everything."""
    compute_s: float = 0.0
    """Of all devices together."""
    transfer_s: float = 0.0
    """Of all links together."""
    queueing_s: float = 0.0
    """Waiting for other sessions' work."""
    transferred_bytes: int = 0
    score: float = 0.0
    """Weighted sum of computing, transfers and queueing; schedules are compared by this and by latency."""
    is_measured: bool = False
    """Whether all profiles that it is based on were measured; otherwise some are defaults."""


_EARLIER = {"device_assignments": "devices", "transfers": "transfers", "execution_order": "order",
            "caching_policy": "caching", "memory_budget": "budgets"}
"""Fields of earlier documents, in their order, which three switches follow; and the fields of today."""
_SWITCHES = {"enable_fusion": "", "enable_compilation": "compilation", "enable_pipelining": "pipelining"}
"""The switches of earlier documents, and the flags that they set."""


@attrs.frozen
class ExecutionSchedule:
    """Where the nodes of a graph run, and in which order.

    The fields of earlier documents are taken and can be read: ``device_assignments``, ``execution_order``,
    ``caching_policy`` and ``memory_budget`` stand for ``devices``, ``order``, ``caching`` and ``budgets``. Arguments
    without names have the order of those documents if the first is a mapping. ``enable_compilation`` and
    ``enable_pipelining`` set flags, and ``enable_fusion`` is refused.
    """

    order: tuple[str, ...]
    """Node identifiers in execution order."""
    devices: Mapping[str, str]
    """Device of each node."""
    transfers: tuple[Transfer, ...] = ()
    """Values that must move, in no particular order."""
    scheduler: str = ""
    """Name of the scheduler that created it."""
    replicas: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)
    """Further devices on which a node runs as well, so that its results need not move: views, and results that are
    cheaper to recompute. Such a node writes nothing and draws no random numbers.
    """
    placements: Mapping[str, str] = attrs.field(factory=dict)
    """Device for each value from outside the graph that no device holds yet."""
    caching: Mapping[str, CachingPolicy] = attrs.field(factory=dict)
    """By value; missing values are freed after their last use. A node stands for its results."""
    budgets: Mapping[str, int] = attrs.field(factory=dict)
    """Largest number of bytes held at once, by device, including bytes held before."""
    spans: Mapping[str, StepSpan] = attrs.field(factory=dict)
    """When each node is expected to run."""
    transfer_spans: Mapping[Transfer, StepSpan] = attrs.field(factory=dict)
    """When each transfer is expected to happen."""
    estimate: CostEstimate = CostEstimate()
    flags: frozenset[str] = frozenset()
    """Special properties: ``split`` (several devices), ``reduction_remote`` (a reduction stays there to save the
    network), ``recomputes``, ``phase:<phase>``, ``defaults`` (a profile was not measured). ``compilation`` and
    ``pipelining`` choose the strategies ``compiled`` and ``streaming`` of `djinn.execute`, if it is given none.
    """
    graph: Graph | None = attrs.field(default=None, eq=False, repr=False)
    """The scheduled graph, if it is kept; `djinn.execute` needs it."""
    device_infos: tuple[DeviceInfo, ...] = attrs.field(default=(), eq=False, repr=False)
    """The devices as known when it was created, if that is kept; `djinn.explain` uses them."""

    @property
    def device_assignments(self) -> Mapping[str, str]:
        """Another name of ``devices``."""
        return self.devices

    @property
    def execution_order(self) -> tuple[str, ...]:
        """Another name of ``order``."""
        return self.order

    @property
    def caching_policy(self) -> Mapping[str, CachingPolicy]:
        """Another name of ``caching``."""
        return self.caching

    @property
    def memory_budget(self) -> Mapping[str, int]:
        """Another name of ``budgets``."""
        return self.budgets

    @property
    def enable_fusion(self) -> bool:
        """Whether kernels may be fused: never, because they would round differently from eager PyTorch."""
        return False

    @property
    def enable_compilation(self) -> bool:
        """Whether the graph is to run as one program, compiled."""
        return "compilation" in self.flags

    @property
    def enable_pipelining(self) -> bool:
        """Whether the graph is to be submitted in pieces, while it is recorded."""
        return "pipelining" in self.flags


_construct = ExecutionSchedule.__init__


def _initialize(self: ExecutionSchedule, *given: Any, **named: Any) -> None:
    """Translate the names of earlier documents, and their order."""
    is_earlier = bool(given) and isinstance(given[0], Mapping)
    names = (*_EARLIER, *_SWITCHES) if is_earlier else tuple(field.name for field in attrs.fields(type(self)))
    if len(given) > len(names):
        raise TypeError(f"ExecutionSchedule takes {len(names)} arguments, and {len(given)} were given.")
    fields: dict[str, Any] = {}
    flags: set[str] = set()
    for name, value in (*zip(names, given, strict=False), *named.items()):
        field = _EARLIER.get(name, name)
        if field in fields:
            raise TypeError(f"ExecutionSchedule was given {field!r} twice.")
        if name not in _SWITCHES:
            fields[field] = value
        elif value and not _SWITCHES[name]:
            raise ScheduleError("Fused kernels round differently from eager PyTorch, so nothing is fused.",
                                hint="Leave enable_fusion out.")
        elif value:
            flags.add(_SWITCHES[name])
    if flags:
        fields["flags"] = frozenset(fields.get("flags", ())) | flags
    fields.update({name: tuple(fields[name]) for name in ("order", "transfers") if name in fields})
    if "caching" in fields:
        fields["caching"] = {value: CachingPolicy(policy) for value, policy in fields["caching"].items()}
    _construct(self, **fields)


ExecutionSchedule.__init__ = _initialize  # type: ignore[method-assign]  # the generated one is what checkers see

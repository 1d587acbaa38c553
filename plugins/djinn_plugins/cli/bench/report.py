"""The results of ``djinn bench``."""

from __future__ import annotations

import attrs

__all__ = ("BenchReport", "Comparison", "Latency", "Throughput")


@attrs.frozen
class Latency:
    """Round trips: an operation, and the fetch of its result."""

    count: int
    median_s: float
    p90_s: float
    samples_s: tuple[float, ...] = attrs.field(repr=False)


@attrs.frozen
class Throughput:
    """Transfers of one size."""

    size_bytes: int
    up_bytes_per_s: float
    down_bytes_per_s: float


@attrs.frozen
class Comparison:
    """A rate on the server, and the same work done by PyTorch on the CPU of this machine."""

    remote_per_s: float
    local_per_s: float

    @property
    def factor(self) -> float:
        """The remote rate in units of the local one."""
        return self.remote_per_s / self.local_per_s


@attrs.frozen
class BenchReport:
    """All results."""

    address: str
    device: str
    latency: Latency
    throughput: tuple[Throughput, ...]
    operations: Comparison
    """Operations recorded per second, and operations executed per second by eager."""
    tokens: Comparison
    """Tokens per second of the GPT, of which each is read."""
    same_tokens: bool
    """Whether both have generated the same tokens. They may differ on a device of another kind."""

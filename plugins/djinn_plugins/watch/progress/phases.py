"""The activity of one connection, and its start."""

from __future__ import annotations

from typing import Protocol

import attrs

__all__ = ("DELAY_S", "Phase", "WatchedConnection", "advanced")

DELAY_S = 1.0
"""What takes less is not shown."""
MEASURED_S = 0.5
"""Over a shorter time, what fits into the system's buffers looks like a rate."""
GAP_S = 0.3
"""A pause between two uploads that does not end the transfer: a model is many tensors."""


class WatchedConnection(Protocol):
    """The counters of a connection; see `djinn_plugins.watch.progress.connection.ProgressConnection`."""

    address: str
    is_sending: bool
    is_asking: bool
    calls: int

    @property
    def bytes_sent(self) -> int:
        """Bytes sent so far."""

    @property
    def bytes_received(self) -> int:
        """Bytes received so far."""

    @property
    def sending_bytes(self) -> int:
        """See `djinn_plugins.common.kinds.transport.SupportsProgress`."""

    @property
    def receiving_bytes(self) -> int:
        """See `djinn_plugins.common.kinds.transport.SupportsProgress`."""


@attrs.frozen
class Phase:
    """A time in which a connection does one thing.

    Attributes:
        kind: ``uploading``, ``downloading`` or ``waiting``.
        call: Number of the batch; uploads of several batches are one phase.
        began_s: When it began, on the monotonic clock.
        seen_s: When the connection was last seen doing it.
        base_bytes: Bytes that had been transferred when it began.
        done_bytes: Bytes transferred since then.
        total_bytes: Bytes to transfer since then, as far as is known; 0 for a wait.
        changed_s: When `done_bytes` last changed: a system call that transfers much counts its bytes at its end.
    """

    kind: str
    call: int
    began_s: float
    seen_s: float
    base_bytes: int = 0
    done_bytes: int = 0
    total_bytes: int = 0
    changed_s: float = 0.0

    @property
    def lasts_s(self) -> float:
        """How long it has lasted."""
        return self.seen_s - self.began_s

    @property
    def is_long(self) -> bool:
        """Whether it is worth showing."""
        return self.lasts_s >= DELAY_S

    @property
    def bytes_per_s(self) -> float:
        """Average rate; 0 while it is not known."""
        measured_s = self.changed_s - self.began_s
        return self.done_bytes / measured_s if measured_s >= MEASURED_S else 0.0

    @property
    def left_s(self) -> float | None:
        """Time that the rest takes at this rate, if it can be said."""
        rate = self.bytes_per_s
        return (self.total_bytes - self.done_bytes) / rate if rate and self.total_bytes else None


def advanced(phase: Phase | None, seen: WatchedConnection, now_s: float) -> Phase | None:
    """Look at a connection, and return its activity.

    Args:
        phase: Its activity when last seen.
        seen: The connection.
        now_s: The time on the monotonic clock.

    Returns:
        ``None`` if it is idle.
    """
    kind, count, end = _kind(seen)
    if not kind:
        keeps = phase is not None and phase.kind == "uploading" and now_s - phase.seen_s < GAP_S
        return phase if keeps else None
    call = seen.calls
    # A loop of many short waits is a program at work; many uploads in a row are one transfer.
    if phase is None or phase.kind != kind or (phase.call != call and kind != "uploading"):
        return Phase(kind, call, now_s, now_s, count, 0, max(0, end - count))
    done_bytes = max(0, count - phase.base_bytes)
    return attrs.evolve(phase, call=call, seen_s=now_s, done_bytes=done_bytes,
                        total_bytes=max(0, max(count, end) - phase.base_bytes) if end else 0,
                        changed_s=phase.changed_s if done_bytes == phase.done_bytes else now_s)


def _kind(seen: WatchedConnection) -> tuple[str, int, int]:
    """Return what a connection does, how many bytes it has transferred, and how many it will have."""
    if not (seen.is_sending or seen.is_asking):
        return "", 0, 0
    sent, sending = seen.bytes_sent, seen.sending_bytes
    if seen.is_sending or sending > sent:
        return "uploading", sent, sending
    received, receiving = seen.bytes_received, seen.receiving_bytes
    if receiving > received:
        return "downloading", received, receiving
    return "waiting", 0, 0

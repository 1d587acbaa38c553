"""The memory manager ``tiered``."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from djinn_lib_service.kinds import (
    Executor,
    KeptUploads,
    MemoryManager,
    MemoryOptions,
    MemoryReport,
    RandomState,
    RunsAhead,
    SessionMemory,
    SpareData,
)

from djinn_memory_tiered.device_memory import DeviceMemory
from djinn_memory_tiered.session import TieredMemory
from djinn_memory_tiered.tiers import Tiers

__all__ = ("TieredFactory", "TieredManager")

NO_LIMIT_BYTES = 2**62
"""Stands for no limit, which a manager may get while sessions are running."""


class TieredFactory:
    """Opens managers that evict values in the order of `djinn_memory_tiered.eviction`."""

    name = "tiered"

    def open(self, executor: Executor, options: MemoryOptions, spare: SpareData | None = None) -> MemoryManager:
        """Open the manager of a server; see `djinn_lib_service.kinds.MemoryFactory.open`."""
        return TieredManager(executor, options, spare)


class TieredManager:
    """Keeps the sessions of one server within a memory limit; see `djinn_lib_service.kinds.MemoryManager`.

    Args:
        executor: Holds the values.
        options: The limits.
        spare: The uploads that the host keeps.
        clock: Returns the time in seconds.

    Attributes:
        device: The memory that the sessions share.
    """

    def __init__(self, executor: Executor, options: MemoryOptions, spare: SpareData | None = None,
                 clock: Callable[[], float] = monotonic) -> None:
        self.device = DeviceMemory(
            executor, options.limit_bytes or NO_LIMIT_BYTES, host_bytes=options.host_bytes,
            tiers=Tiers(options.warning, options.critical), spare=spare, clock=clock)

    def limit(self, options: MemoryOptions) -> None:
        """Change the limits; see `djinn_lib_service.kinds.MemoryManager.limit`."""
        self.device.limit_bytes = options.limit_bytes or NO_LIMIT_BYTES
        self.device.host_limit_bytes = options.host_bytes

    def join(self, random: RandomState, ahead: RunsAhead, uploads: KeptUploads | None) -> SessionMemory:
        """Add a session; see `djinn_lib_service.kinds.MemoryManager.join`."""
        made = TieredMemory(self.device, random, ahead, uploads)
        with self.device.lock:
            self.device.join(made)
        return made

    def report(self) -> MemoryReport:
        """Return amounts and counts; see `djinn_lib_service.kinds.MemoryManager.report`."""
        held = self.device.accounts
        amounts = {role.value: max(0, size_bytes) for role, size_bytes in held.device.items()}
        return MemoryReport(
            amounts | {"results_ahead": held.ahead_bytes}, held.host_bytes,
            {kind.value: count for kind, count in held.evicted.items()}, held.restored, held.moved_out_bytes,
            held.moved_in_bytes, held.refused, int(self.device.tier))

"""The memory manager ``tiered``."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from djinn_plugins.common.kinds.executor import Executor, RandomState
from djinn_plugins.common.kinds.memory import (
    KeptUploads,
    MemoryManager,
    MemoryOptions,
    MemoryReport,
    RunsAhead,
    SessionMemory,
    SpareData,
)
from djinn_plugins.executor.memory.device_memory import DeviceMemory
from djinn_plugins.executor.memory.session import TieredMemory
from djinn_plugins.executor.memory.tiers import Tiers

__all__ = ("TieredFactory", "TieredManager")

NO_LIMIT_BYTES = 2**62
"""Stands for no limit, which a manager may get while sessions are running."""


class TieredFactory:
    """Opens managers that evict values in the order of `djinn_plugins.executor.memory.eviction`."""

    name = "tiered"

    def open(self, executor: Executor, options: MemoryOptions, spare: SpareData | None = None) -> MemoryManager:
        """Open the manager of a server; see `djinn_plugins.common.kinds.memory.MemoryFactory.open`."""
        return TieredManager(executor, options, spare)


class TieredManager:
    """Keeps the sessions of one server within a memory limit; see `djinn_plugins.common.kinds.memory.MemoryManager`.

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
        """Change the limits; see `djinn_plugins.common.kinds.memory.MemoryManager.limit`."""
        self.device.limit_bytes = options.limit_bytes or NO_LIMIT_BYTES
        self.device.host_limit_bytes = options.host_bytes

    def join(self, random: RandomState, ahead: RunsAhead, uploads: KeptUploads | None) -> SessionMemory:
        """Add a session; see `djinn_plugins.common.kinds.memory.MemoryManager.join`."""
        made = TieredMemory(self.device, random, ahead, uploads)
        with self.device.lock:
            self.device.join(made)
        return made

    def report(self) -> MemoryReport:
        """Return amounts and counts; see `djinn_plugins.common.kinds.memory.MemoryManager.report`."""
        held = self.device.accounts
        amounts = {role.value: max(0, size_bytes) for role, size_bytes in held.device.items()}
        return MemoryReport(
            amounts | {"results_ahead": held.ahead_bytes}, held.host_bytes,
            {kind.value: count for kind, count in held.evicted.items()}, held.restored, held.moved_out_bytes,
            held.moved_in_bytes, held.refused, int(self.device.tier))

"""What coordinates remote execution in this process, under the names of earlier documents."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from djinn.session import runtime
from djinn_plugins.common.tracing.counters import stats
from djinn_plugins.schedule.execution import execute
from djinn_plugins.schedule.inputs import Inputs
from djinn_plugins.schedule.schedule import DeviceInfo, ExecutionSchedule
from djinn_plugins.schedule.scheduling import devices_of

__all__ = ("Coordinator", "get_coordinator", "get_thread_pool")

_MAX_THREADS = 8
_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


class Coordinator:
    """The running session, as far as it coordinates executors. Each call asks the session that runs then."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the executors; an empty one stands for one in this process."""
        found: tuple[str, ...] = runtime.current().config.addresses
        return found

    @property
    def is_connected(self) -> bool:
        """Whether a session runs."""
        return runtime.is_initialized()

    def devices(self) -> list[DeviceInfo]:
        """Describe the executors: memory, speed, load."""
        return devices_of(runtime.current())

    def execute(self, schedule: ExecutionSchedule, inputs: Inputs = None) -> Any:
        """Run a schedule, as `djinn.execute` does."""
        return execute(schedule, inputs)

    def stats(self) -> Mapping[str, Any]:
        """Return the counters, as `djinn.stats` does."""
        return stats()


_coordinator = Coordinator()


def get_coordinator() -> Coordinator:
    """Return the coordinator; start a session if there is none."""
    runtime.ensure_initialized()
    return _coordinator


def get_thread_pool() -> ThreadPoolExecutor:
    """Return a pool of threads for work that waits for values: ``get_thread_pool().submit(tensor.cpu)``.

    It starts with the first call, and is the same for all. Code on an event loop uses `djinn.run_async` instead.
    """
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="djinn-pool")
        return _pool


def _forget_in_child() -> None:
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)

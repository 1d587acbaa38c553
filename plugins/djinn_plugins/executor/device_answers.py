"""A session's answers about the executor's device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from djinn_plugins.common.calls.handle_table import ValueTable
from djinn_plugins.common.device_report import (
    FREE_UNUSED_HANDLE,
    LOAD_HANDLE,
    PROPERTIES_HANDLE,
    RESET_ACCUMULATED_HANDLE,
    RESET_PEAK_HANDLE,
    LoadFigures,
    MemoryFigures,
    properties_of,
)
from djinn_plugins.common.kinds.executor import Executor, SupportsDeviceReport
from djinn_plugins.executor.turns import Turns

__all__ = ("DeviceReports",)


class DeviceReports:
    """Answers a session's questions about the device.

    Args:
        executor: The device. If it tells nothing of itself, the session's own values are counted.
        values: The session's values.
        turns: Knows how busy the device is with other sessions; ``None`` if there are none.
    """

    def __init__(self, executor: Executor, values: ValueTable, turns: Turns | None = None) -> None:
        self._executor = executor
        self._values = values
        self._turns = turns

    def answer(self, handle: int) -> list[Any]:
        """Answer one of `djinn_plugins.common.device_report.REPORT_HANDLES`."""
        able = self._executor if isinstance(self._executor, SupportsDeviceReport) else None
        if handle == PROPERTIES_HANDLE:
            return list(msgspec.to_builtins(properties_of(self._executor)))
        if handle == LOAD_HANDLE:
            return list(msgspec.to_builtins(LoadFigures(0.0 if self._turns is None else self._turns.load())))
        own = self._values.usage
        if handle == RESET_PEAK_HANDLE:
            own.reset_peak()
            if able is not None:
                able.reset_peak()
        elif handle == RESET_ACCUMULATED_HANDLE:
            own.reset_accumulated()
            if able is not None:
                able.reset_accumulated()
        elif handle == FREE_UNUSED_HANDLE and able is not None:
            able.free_unused()
        figures: Mapping[str, Any] = {} if able is None else able.memory()
        allocated = figures.get("allocated", own)
        return list(msgspec.to_builtins(MemoryFigures(
            figures.get("free_bytes", 0), figures.get("total_bytes", 0), allocated,
            figures.get("reserved", allocated))))

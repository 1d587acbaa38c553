"""``torch.profiler``: shows when the executor ran operations, if the remote device is among the profiler's activities.

PyTorch's interface for other devices' profilers is C++ only. So the methods of its profiler that start, stop, parse and
export are wrapped. Without a profiler, none of this runs.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.autograd import profiler

from djinn.record import devices

__all__ = ("install",)


def install() -> None:
    """Wrap the profiler's methods."""
    cls: Any = profiler.profile
    start, leave, parse, export = cls._start_trace, cls.__exit__, cls._parse_kineto_results, cls.export_chrome_trace

    @functools.wraps(start)
    def _start_trace(self: Any) -> None:
        start(self)
        if self.use_device == devices.logical_device().type:
            from djinn_plugins.device.interceptor.device_times import DeviceTimes

            self._remote_times = DeviceTimes()
            self._remote_times.begin()

    @functools.wraps(leave)
    def __exit__(self: Any, *error: Any) -> Any:  # noqa: N807  # the wrapped method's name
        times = getattr(self, "_remote_times", None)
        try:
            if times is not None:
                times.end()
        finally:
            left = leave(self, *error)
        return left

    @functools.wraps(parse)
    def _parse_kineto_results(self: Any, result: Any, *args: Any, **kwargs: Any) -> list[Any]:
        events: list[Any] = parse(self, result, *args, **kwargs)
        times = getattr(self, "_remote_times", None)
        if times is not None:
            events += times.events(result.trace_start_ns(), max((event.id for event in events), default=0) + 1)
            events.sort(key=lambda event: [event.time_range.start, -event.time_range.end])
        return events

    @functools.wraps(export)
    def export_chrome_trace(self: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        made = export(self, path, *args, **kwargs)
        times = getattr(self, "_remote_times", None)
        if times is not None:
            times.add_to(path)
        return made

    cls._start_trace, cls.__exit__ = _start_trace, __exit__
    cls._parse_kineto_results, cls.export_chrome_trace = _parse_kineto_results, export_chrome_trace



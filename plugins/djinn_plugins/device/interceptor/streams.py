"""Streams and events of the device. All streams share one order, that of the program, so nothing has to wait."""

from __future__ import annotations

import itertools
import threading
from contextlib import AbstractContextManager
from time import perf_counter_ns
from typing import Any, NoReturn, Self

import torch

from djinn.record import devices
from djinn.session import runtime

__all__ = ("RemoteEvent", "RemoteStream", "StreamFunctions", "current_stream", "set_stream")

_numbers = itertools.count(1)
_thread = threading.local()


class RemoteStream(torch.Stream):
    """A name for a part of the program. What is recorded in it runs in program order, whichever stream is current."""

    def __new__(cls, device: Any = None, priority: int = 0, *,  # noqa: ARG004  # all streams share one order
                stream_id: int | None = None) -> Self:
        """Create a stream."""
        where = devices.checked_device(None if device is None else torch.device(device))
        kind = torch._C._autograd.DeviceType.PrivateUse1.value
        number = next(_numbers) if stream_id is None else stream_id
        return super().__new__(cls, stream_id=number, device_index=where.index, device_type=kind)

    def synchronize(self) -> None:
        """Wait until everything recorded so far has run."""
        _synchronize()

    def query(self) -> bool:
        """Wait until everything recorded so far has run, and return True."""
        _synchronize()
        return True

    def is_capturing(self) -> bool:
        """Return False: there are no graphs to capture."""
        return False

    def wait_event(self, event: Any) -> None:
        """Do nothing: operations run in the order of their recording."""

    def wait_stream(self, other: Any) -> None:
        """Do nothing, as above."""

    def record_event(self, event: Any = None) -> Any:
        """Record an event, or a new one, and return it."""
        recorded = RemoteEvent(self.device) if event is None else event
        recorded.record(self)
        return recorded

    def __enter__(self) -> Self:
        self._before: list[Any] = [*getattr(self, "_before", ()), current_stream()]
        set_stream(self)
        return self

    def __exit__(self, *error: object) -> None:
        set_stream(self._before.pop())


class RemoteEvent(torch.Event):
    """A point in the program."""

    def __new__(cls, device: Any = None, *, enable_timing: bool = False, blocking: bool = False,
                interprocess: bool = False) -> Self:
        """Create an event."""
        if interprocess:
            raise RuntimeError("Events of a remote accelerator cannot be shared with other processes.")
        where = devices.checked_device(None if device is None else torch.device(device))
        made = super().__new__(cls, where, enable_timing=enable_timing, blocking=blocking)
        made._device = where
        made._is_timed = enable_timing
        made._recorded_ns = 0
        made._is_pending = False
        return made

    _device: torch.device
    _is_timed: bool
    _recorded_ns: int
    _is_pending: bool

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # an attribute there
        """Logical device."""
        return self._device

    def record(self, stream: Any = None) -> None:
        """Mark this point. An event that takes times also waits until everything before it has run."""
        self._is_pending = runtime.is_initialized()
        if self._is_timed:
            self.synchronize()
        self._recorded_ns = perf_counter_ns()

    def wait(self, stream: Any = None) -> None:
        """Do nothing: operations run in the order of their recording."""

    def synchronize(self) -> None:
        """Wait until everything before the event has run."""
        if self._is_pending:
            _synchronize()
            self._is_pending = False

    def query(self) -> bool:
        """Wait until everything before the event has run, and return True."""
        self.synchronize()
        return True

    def elapsed_time(self, other: Any) -> float:
        """Return the time between two events in milliseconds, as this process measured it.

        Raises:
            ValueError: An event takes no times, or was not recorded.
        """
        if not (self._is_timed and other._is_timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self._recorded_ns and other._recorded_ns):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return float(other._recorded_ns - self._recorded_ns) / 1e6

    def ipc_handle(self) -> NoReturn:
        """Refuse.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError("Events of a remote accelerator cannot be shared with other processes.")

    def __repr__(self) -> str:
        return f"torch.Event device={self._device}, is_recorded={bool(self._recorded_ns)}"


def _synchronize() -> None:
    if runtime.is_initialized():
        runtime.current().synchronize()


def current_stream(device: Any = None) -> Any:
    """Return the current stream of this thread."""
    index = devices.checked_device(_named(device)).index
    made = getattr(_thread, "streams", {}).get(index)
    return default_stream(device) if made is None else made


def set_stream(stream: Any) -> None:
    """Make a stream the current one of this thread."""
    if not hasattr(_thread, "streams"):
        _thread.streams = {}
    _thread.streams[stream.device_index] = stream


def default_stream(device: Any = None) -> Any:
    """Return the stream that is current if no other is."""
    return RemoteStream(devices.checked_device(_named(device)), stream_id=0)


def _named(device: Any) -> torch.device | None:
    if device is None:
        return None
    return torch.device(devices.logical_device().type, device) if isinstance(device, int) else torch.device(device)


class _Current(AbstractContextManager[Any]):
    """Makes a stream current; with ``None``, nothing happens."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> Any:
        return None if self.stream is None else self.stream.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.stream is not None:
            self.stream.__exit__(*error)


class StreamFunctions:
    """Functions of the device's module."""

    Stream = RemoteStream
    StreamContext = _Current
    stream = _Current
    current_stream = staticmethod(current_stream)
    default_stream = staticmethod(default_stream)
    set_stream = staticmethod(set_stream)

    @staticmethod
    def Event(  # noqa: N802  # the name of the class in torch.cuda, whose arguments are positional
            enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> RemoteEvent:
        """Create an event."""
        return RemoteEvent(None, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)

    def is_current_stream_capturing(self) -> bool:
        """Return False: there are no graphs to capture."""
        return False

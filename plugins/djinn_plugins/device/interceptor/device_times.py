"""When the executor ran operations, for ``torch.profiler``. While this is measured, each operation is a program."""

from __future__ import annotations

import json
import weakref
from contextlib import ExitStack
from pathlib import Path
from time import time_ns
from typing import Any

import attrs
import msgspec
import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from djinn.kinds import Connection
from djinn.kinds.connection_wrapper import ConnectionWrapper
from djinn.record import devices
from djinn.session import runtime
from djinn.wire.messages import Batch, Define, Result, Timing
from djinn_plugins.common.tracing.spans import connections_through

__all__ = ("DeviceTimes",)

_MOST_NAMES = 4
_names: weakref.WeakKeyDictionary[Any, dict[tuple[int, int], str]] = weakref.WeakKeyDictionary()
"""Names of programs, by session, and by executor and number: a program is defined once."""


@attrs.frozen
class _Work:
    """An operation that an executor ran, or a tensor that arrived there."""

    name: str
    device: int
    begin_ns: int
    """On the clock of `time.time_ns`."""
    end_ns: int


class DeviceTimes:
    """Measures the executors' time between `begin` and `end`."""

    def __init__(self) -> None:
        self._session: Any = None
        self._undo = ExitStack()
        self._connections: list[_Timed] = []
        self._work: list[_Work] = []

    def begin(self) -> None:
        """Start. Without a session, there is nothing to measure."""
        if not runtime.is_initialized():
            return
        self._session = session = runtime.current()
        with session.lock:
            session.synchronize()
            names = _names.setdefault(session, {})
            self._connections = self._undo.enter_context(connections_through(
                session, lambda remote, plain: _Timed(plain, session.backend.executors.index(remote), names)))
            session.flush_after(1)

    def end(self) -> None:
        """Wait until everything has run, and stop.

        Raises:
            Exception: The exception of an operation that has failed.
        """
        session, self._session = self._session, None
        if session is None or session.closed:
            return
        try:
            with session.lock:
                session.synchronize()
                session.synchronize()  # its answer is quick, and so compares the clocks well
        finally:
            self._undo.close()
            session.flush_after(session.config.flush_every)
            self._work = [work for connection in self._connections for work in connection.work()]

    def events(self, start_ns: int, first: int) -> list[FunctionEvent]:
        """Return the profiler's form.

        Args:
            start_ns: When the profiler started.
            first: Number of the first event.
        """
        kind = devices.logical_device().type
        return [FunctionEvent(
            id=first + index, name=work.name, thread=work.device, start_us=(work.begin_ns - start_ns) / 1000,
            end_us=(work.end_ns - start_ns) / 1000, device_type=DeviceType.PrivateUse1, device_index=work.device,
            use_device=kind, stack=[], input_shapes=[]) for index, work in enumerate(self._work)]

    def add_to(self, path: str) -> None:
        """Add the events to a trace file, which PyTorch has written."""
        file = Path(path)
        trace = json.loads(file.read_text())
        base_ns = trace.get("baseTimeNanoseconds", 0)
        kind = devices.logical_device().type
        for work in self._work:
            trace["traceEvents"].append({
                "ph": "X", "cat": "kernel", "name": work.name, "pid": f"{kind}:{work.device}", "tid": "executor",
                "ts": (work.begin_ns - base_ns) / 1000, "dur": (work.end_ns - work.begin_ns) / 1000,
                "args": {"device": work.device}})
        file.write_text(json.dumps(trace))


class _Timed(ConnectionWrapper):
    """A connection whose server reports when it executed commands."""

    def __init__(self, plain: Connection, device: int, names: dict[tuple[int, int], str]) -> None:
        super().__init__(plain)
        self._device = device
        self._names = names
        self._timings: list[Timing] = []
        self._offset_ns: int | None = None
        """From the server's clock to this one's."""

    def submit(self, batch: Batch, tensors: Any) -> None:
        """Submit a batch."""
        self.plain.submit(self._noted(batch), tensors)

    def request(self, batch: Batch, tensors: Any) -> tuple[Result, list[torch.Tensor]]:
        """Submit a batch and wait for its answer."""
        answer = self.plain.request(self._noted(batch), tensors)
        if answer[0].now_ns:
            # The way back takes longest when the network is busy.
            offset_ns = time_ns() - answer[0].now_ns
            self._offset_ns = offset_ns if self._offset_ns is None else min(offset_ns, self._offset_ns)
        self._timings += answer[0].timings
        return answer

    def _noted(self, batch: Batch) -> Batch:
        for command in batch.commands:
            if isinstance(command, Define):
                names = dict.fromkeys(command.body.templates[step.template].operator for step in command.body.steps)
                more = ", ..." if len(names) > _MOST_NAMES else ""
                self._names[self._device, command.program] = ", ".join(list(names)[:_MOST_NAMES]) + more
        return msgspec.structs.replace(batch, timed=True, settled=True)

    def work(self) -> list[_Work]:
        """Return the measurements."""
        offset_ns = self._offset_ns or 0
        return [_Work(self._name_of(timing), self._device, timing.begin_ns + offset_ns, timing.end_ns + offset_ns)
                for timing in self._timings]

    def _name_of(self, timing: Timing) -> str:
        if timing.kind != "run":
            return timing.kind
        return self._names.get((self._device, timing.number), "program")

"""A device that computes asynchronously: its time counts, not the time that it takes to submit work to it."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest
import torch
from support.servers.serving import Serving

import djinn
from djinn.errors import ProgramTimeoutError
from djinn_plugins.common.tracing.spans import SpanStage, spans_of
from djinn_plugins.watch.monitor.reading import read

D = "remote_accelerator:0"
PATIENT = """
import time
import djinn.plugins
import torch
from djinn_plugins.executor.cpu.executor import CpuExecutor
from djinn_plugins.common.calls.binding import bind
from djinn_plugins.executor.torch.executor import TorchProgram

class Point:
    def __init__(self, at_s):
        self.at_s = at_s

    def query(self):
        return time.monotonic() >= self.at_s

    def elapsed_time(self, later):
        return (later.at_s - self.at_s) * 1e3

class PatientProgram(TorchProgram):
    queue = None

    def run_without(self, *args, **kwargs):
        outputs = super().run_without(*args, **kwargs)
        for value in outputs:
            if isinstance(value, torch.Tensor) and value.numel() == 1 and value.item() > 10:
                self.queue.submit(value.item() - 10)
        return outputs

class Patient(CpuExecutor):
    ready_s = 0.0

    def compile_checked(self, program, checks):
        made = PatientProgram(program, bind(program, self._device, checks), self._lock, self.relieve)
        made.queue = self
        return made

    def submit(self, seconds):
        self.ready_s = max(self.ready_s, time.monotonic()) + seconds

    def mark(self):
        return Point(max(self.ready_s, time.monotonic()))

    def get(self, value):
        time.sleep(max(0.0, self.ready_s - time.monotonic()))
        return super().get(value)

    lend = get

class Factory:
    name = "patient"

    def devices(self):
        return ["cpu"]

    def open(self, device):
        return Patient()

djinn.plugins.register(Factory(), "executor")
"""
WAITS = """
Patient.settle = lambda self: time.sleep(max(0.0, self.ready_s - time.monotonic()))
"""


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="djinn serve needs what Linux has")


def test_a_program_that_the_device_computes_for_too_long_ends_with_its_session(tmp_path: Path) -> None:
    with Serving(tmp_path / "log", "--plugins", "executor=patient", "--max-run-s", "1", prelude=PATIENT) as server:
        [worker] = server.workers
        djinn.init(server=server.address)
        short = torch.full((2,), 0.25, device=D).sum(0, keepdim=True)
        assert (short + 0.25).cpu().item() == 0.75
        with pytest.raises(ProgramTimeoutError, match="ran for longer than 1 s"):
            (short + 609.5).cpu()
        # Its device computes on, so the worker is ended, too.
        until = time.monotonic() + 60
        while worker in server.workers and time.monotonic() < until:
            time.sleep(0.05)
        djinn.init(server=server.address)
        assert (torch.full((2,), 0.25, device=D).sum(0, keepdim=True) + 0.25).cpu().item() == 0.75
        djinn.shutdown()


def test_metrics_count_what_the_device_computes(tmp_path: Path) -> None:
    with Serving(tmp_path / "log", "--plugins", "executor=patient", "--metrics-port", "0", prelude=PATIENT) as server:
        [page] = set(re.findall(r"metrics on (http://[^/]+)/metrics", server.log.read_text()))
        djinn.init(server=server.address)
        assert (torch.full((2,), 2.5, device=D).sum(0, keepdim=True) + 7).cpu().item() == 12
        djinn.shutdown()
        until = time.monotonic() + 10
        while (computed_s := read(page).tenants[""].device_s) < 2:
            assert time.monotonic() < until, f"{computed_s} s of 2 s"
            time.sleep(0.05)
    assert computed_s < 4


def test_spans_of_a_trace_are_those_of_the_device(tmp_path: Path) -> None:
    with Serving(tmp_path / "log", "--plugins", "executor=patient", prelude=PATIENT) as server:
        session = djinn.init(server=server.address, flush_every=None)
        value = torch.full((2,), 2.5, device=D).sum(0, keepdim=True)
        began_s = time.perf_counter()
        with spans_of(session) as found:
            longer = value + 6
            djinn.flush()
            shorter = value + 5.5
            djinn.flush()
            handed_over_ns = time.perf_counter_ns()
            assert (longer - shorter).cpu().item() == 0.5
        took_s = time.perf_counter() - began_s
        djinn.shutdown()
    first, second, _ = [span for span in found if span.stage is SpanStage.EXECUTION and "run" in span.facts]
    # The device takes 1 s and 0.5 s; what the host took before is part of the first span.
    assert 0.999 <= (first.end_ns - first.begin_ns) / 1e9 <= took_s - 0.499
    assert 0.499 <= (second.end_ns - second.begin_ns) / 1e9 <= took_s - 0.999
    assert first.end_ns <= second.begin_ns
    assert handed_over_ns < second.begin_ns, "the device begins after it was submitted"


def test_synchronize_waits_until_the_device_has_computed(tmp_path: Path) -> None:
    with Serving(tmp_path / "log", "--plugins", "executor=patient", prelude=PATIENT + WAITS) as server:
        djinn.init(server=server.address)
        value = torch.full((2,), 2.5, device=D).sum(0, keepdim=True)
        djinn.synchronize()
        began_s = time.perf_counter()
        longer = value + 6
        djinn.synchronize()
        took_s = time.perf_counter() - began_s
        assert longer.item() == 11
        djinn.shutdown()
    assert took_s > 0.9, "the device computes for 1 s"

"""``torch.profiler`` shows the executor's time as a device of its own."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from support.recording.eager import DEVICE
from torch.profiler import ProfilerActivity, profile, schedule

import djinn

ACTIVITIES = [ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]
REMOTE = torch._C._autograd.DeviceType.PrivateUse1


def _work(size: int = 256) -> float:
    x = torch.ones(size, size, device=DEVICE)
    return float(((x @ x).relu() @ x).sum().item())


@pytest.fixture(autouse=True)
def _session() -> None:
    djinn.ensure_initialized()


def test_operators_have_the_executors_time() -> None:
    with profile(activities=ACTIVITIES) as profiled:
        assert _work() == 256.0**4
    rows = {row.key: row for row in profiled.key_averages() if row.device_type == REMOTE}
    assert rows["aten::matmul"].count == 2
    assert {"aten::relu", "aten::sum"} <= set(rows)
    assert all(row.self_device_time_total > 0 for row in rows.values())
    assert "Self REMOTE_ACCELERATOR" in profiled.key_averages().table(sort_by="self_device_time_total")


def test_longer_work_takes_longer() -> None:
    x = torch.ones(1024, 1024, device=DEVICE)
    spent: dict[str, list[float]] = {}
    for _ in range(5):  # another process may have the processor while one of them runs
        with profile(activities=ACTIVITIES) as profiled:
            (x @ x).relu()
        for row in profiled.key_averages():
            if row.device_type == REMOTE:
                spent.setdefault(row.key, []).append(row.self_device_time_total)
    assert min(spent["aten::matmul"]) > 3 * min(spent["aten::relu"])


def test_modules_move_while_shapes_are_recorded() -> None:
    model = torch.nn.Linear(2, 1)
    wanted = model(torch.ones(1, 2)).tolist()
    with profile(activities=ACTIVITIES, record_shapes=True, profile_memory=True):
        model.to(DEVICE)
        found = model(torch.ones(1, 2, device=DEVICE))
        found.sum().backward()
        model.cpu()
    assert found.tolist() == wanted
    assert model.weight.grad is not None
    assert (model.weight.device.type, model.weight.grad.tolist()) == ("cpu", [[1.0, 1.0]])


def test_the_time_lies_within_what_was_profiled() -> None:
    with profile(activities=ACTIVITIES) as profiled:
        _work(255)  # no other test asks for this number: it is not answered from memory
    events = list(profiled.events() or ())
    remote = [event for event in events if event.device_type == REMOTE]
    first = min(event.time_range.start for event in events if event.device_type != REMOTE)
    assert all(event.time_range.start > first - 1000 for event in remote)
    assert [event.name for event in remote if event.name != "upload"] == [
        "aten::ones", "aten::matmul", "aten::relu", "aten::matmul", "aten::sum", "aten::_local_scalar_dense"]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_the_chrome_trace_has_the_device(tmp_path: Path, name: str) -> None:
    with profile(activities=ACTIVITIES) as profiled:
        _work()
    profiled.export_chrome_trace(str(tmp_path / name))
    data = (tmp_path / name).read_bytes()
    trace = json.loads(gzip.decompress(data) if name.endswith(".gz") else data)
    kernels = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    assert {event["pid"] for event in kernels} == {"remote_accelerator:0"}
    assert [event["name"] for event in kernels].count("aten::matmul") == 2


@pytest.mark.filterwarnings("ignore:.*Profiler clears events at the end of each cycle:UserWarning")
def test_a_schedule_profiles_its_active_steps() -> None:
    found: list[int] = []

    def ready(profiled: profile) -> None:
        found.append(sum(row.count for row in profiled.key_averages()
                         if row.device_type == REMOTE and row.key == "aten::relu"))

    with profile(activities=ACTIVITIES, schedule=schedule(wait=1, warmup=1, active=2, repeat=2),
                 on_trace_ready=ready) as profiled:
        for _ in range(8):
            _work()
            profiled.step()
    assert found == [2, 2]


def test_nothing_is_measured_or_changed_without_the_activity() -> None:
    pace = djinn.ensure_initialized().flush_every
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        _work()
    assert not [event for event in profiled.events() or () if event.device_type == REMOTE]
    with profile(activities=ACTIVITIES):
        _work()
    assert djinn.ensure_initialized().flush_every == pace
    djinn.reset_stats()
    _work()
    assert djinn.stats()["flushes"] <= 2


def test_a_failed_operation_is_raised_and_the_profiler_ends() -> None:
    with pytest.raises(torch.linalg.LinAlgError), profile(activities=ACTIVITIES):
        failing = torch.linalg.inv(torch.zeros(2, 2, device=DEVICE))
    del failing
    with profile(activities=ACTIVITIES) as profiled:
        _work()
    assert [event for event in profiled.events() or () if event.device_type == REMOTE]


def test_without_a_session_there_is_nothing_to_measure() -> None:
    djinn.shutdown()
    with profile(activities=ACTIVITIES) as profiled:
        torch.ones(2).sum()
    assert not djinn.is_initialized()
    assert not [event for event in profiled.events() or () if event.device_type == REMOTE]

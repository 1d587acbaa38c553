"""All executors are one device, and a scheduler decides; what it may not decide is refused before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import pytest
import torch
from support.servers.fleet import fleet_of

import djinn
from djinn.errors import ConfigurationError, ScheduleError
from djinn.session.session import Session
from djinn_plugins.graph.graph import Graph
from djinn_plugins.schedule import calibrate as calibration
from djinn_plugins.schedule.latency.scheduler import LatencyScheduler
from djinn_plugins.schedule.schedule import DeviceInfo, ExecutionSchedule
from djinn_plugins.schedule.single.scheduler import SingleScheduler
from djinn_plugins.schedule.standard_workloads import products

DEVICE = "remote_accelerator:0"
TWO = ["local://", "local://"]


@pytest.fixture
def automatic() -> Iterator[Session]:
    yield djinn.init(servers=TWO, placement="automatic")
    djinn.shutdown()


def elsewhere(change: Callable[[ExecutionSchedule, Sequence[DeviceInfo]], ExecutionSchedule]) -> Any:
    """A scheduler that changes what `latency` says."""
    plain = LatencyScheduler.schedule

    def schedule(self: LatencyScheduler, graph: Graph, devices: Sequence[DeviceInfo]) -> ExecutionSchedule:
        return change(plain(self, graph, devices), devices)

    return schedule


def upside_down(schedule: ExecutionSchedule, devices: Sequence[DeviceInfo]) -> ExecutionSchedule:
    return attrs.evolve(schedule, order=schedule.order[::-1])


def on_the_other(schedule: ExecutionSchedule, devices: Sequence[DeviceInfo]) -> ExecutionSchedule:
    return attrs.evolve(schedule, devices=dict.fromkeys(schedule.devices, devices[1].id))


def nowhere(schedule: ExecutionSchedule, devices: Sequence[DeviceInfo]) -> ExecutionSchedule:
    return attrs.evolve(schedule, devices=dict.fromkeys(schedule.devices, "attic"))


def not_all(schedule: ExecutionSchedule, devices: Sequence[DeviceInfo]) -> ExecutionSchedule:
    return attrs.evolve(schedule, order=schedule.order[1:])


@pytest.mark.parametrize(("change", "rule"), [
    (upside_down, "order"), (on_the_other, "transfers"), (nowhere, "devices"), (not_all, "complete"),
])
def test_a_schedule_that_breaks_a_rule_is_refused_before_anything_runs(
    automatic: Session, monkeypatch: pytest.MonkeyPatch, change: Any, rule: str
) -> None:
    x = torch.arange(6.0).to(DEVICE)
    djinn.synchronize()
    y = (x + 1).relu() * 2
    before = djinn.stats()["nodes_executed"]
    with monkeypatch.context() as patch:
        patch.setattr(LatencyScheduler, "schedule", elsewhere(change))
        with pytest.raises(ScheduleError, match=f"'{rule}'"):
            y.cpu()
        assert djinn.stats()["nodes_executed"] == before
    assert y.cpu().tolist() == [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]


def test_one_executor_loses_nothing_by_a_broken_schedule_either(monkeypatch: pytest.MonkeyPatch) -> None:
    djinn.init("", plugins=["scheduler=single"])
    y = torch.ones(3, device=DEVICE) + 1

    def schedule(self: SingleScheduler, graph: Graph, devices: Sequence[DeviceInfo]) -> ExecutionSchedule:
        return ExecutionSchedule((), {}, scheduler="empty")

    with monkeypatch.context() as patch:
        patch.setattr(SingleScheduler, "schedule", schedule)
        with pytest.raises(ScheduleError, match="'complete'"):
            y.cpu()
    assert y.cpu().tolist() == [2.0, 2.0, 2.0]
    djinn.shutdown()


def test_two_large_branches_run_side_by_side(automatic: Session) -> None:
    def branch(number: float, device: str) -> torch.Tensor:
        start = torch.full((600, 600), number, device=device)
        return start @ start @ start

    one, other = branch(0.01, DEVICE), branch(0.02, DEVICE)
    djinn.flush()
    fleet = fleet_of(automatic)
    assert {fleet.where.home_of(tensor._value.slot.number) for tensor in (one, other)} == {0, 1}
    assert torch.equal((one + other).cpu(), branch(0.01, "cpu") + branch(0.02, "cpu"))


@pytest.mark.parametrize("scheduler", ["latency", "throughput", "single"])
def test_every_scheduler_gives_eager_results(scheduler: str) -> None:
    def work(device: str) -> list[torch.Tensor]:
        torch.manual_seed(2)
        model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Dropout(0.5), torch.nn.Linear(12, 2)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(3)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 6, device=device)).square().sum().backward()
            optimizer.step()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    wanted = work("cpu")
    djinn.init(servers=TWO, placement="automatic", plugins=[f"scheduler={scheduler}"])
    for mine, theirs in zip(work(DEVICE), wanted, strict=True):
        assert torch.equal(mine, theirs)
    djinn.shutdown()


def test_server_and_servers_exclude_each_other() -> None:
    with pytest.raises(ConfigurationError, match="Both"):
        djinn.init("local://", servers=TWO)
    with pytest.raises(ConfigurationError, match="placement"):
        djinn.init(servers=TWO, placement="wherever")
    assert not djinn.is_initialized()


def test_an_executor_is_calibrated_with_the_ways_from_it(
    automatic: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What all of them tell is tested where they predict programs.
    monkeypatch.setattr(calibration, "_registered", lambda session: [
        workload for workload in products.workloads() if workload.name == "linear 1x16x16"])
    before = fleet_of(automatic).placement.devices(fleet_of(automatic).where)[0]
    djinn.calibrate(0, seconds=0, save=False)
    after = fleet_of(automatic).placement.devices(fleet_of(automatic).where)[0]
    assert not before.profile.is_measured
    assert after.profile.is_measured
    assert after.links["remote_accelerator:1"].is_measured
    assert (torch.ones(3, device=DEVICE) * 2).sum().item() == 6

"""Schedules on sessions with several executors: they run where they say, move what they say, and are measured there."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

import attrs
import pytest
import torch
from support.planning.cluster_simulator import Cluster, as_measured, simulate
from support.servers.fleet import fleet_of
from torch import nn

import djinn
from djinn.errors import ScheduleError
from djinn.session.session import Session
from djinn_plugins.graph.graph import Operand, RecordedGraph
from djinn_plugins.schedule.profiling import measure
from djinn_plugins.schedule.schedule import ExecutionSchedule

DEVICE = "remote_accelerator:0"


@pytest.fixture
def session() -> Iterator[Session]:
    """Three executors in this process that are one device."""
    yield djinn.init(servers=["local://"] * 3, placement="automatic")
    djinn.shutdown()


def spread(session: Session, model: nn.Sequential) -> nn.Sequential:
    """Move the model's parts to one executor after the other."""
    placement: Any = fleet_of(session).placement
    for index, part in enumerate(model):
        placement.pin(index % 3)
        part.to(DEVICE)
        djinn.flush()
    placement.pin(None)
    return model


WIDE = 192
"""So wide that weights stay where they are."""


def layers(count: int = 6, width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(count)])


def planned(model: nn.Module, x: torch.Tensor, strategy: str) -> ExecutionSchedule:
    there = x.to(DEVICE)
    with djinn.capture(model) as captured, torch.inference_mode():
        model(there)
    return djinn.schedule(captured, strategy)


@pytest.mark.parametrize("strategy", ["latency", "throughput", "single"])
@pytest.mark.parametrize("execution", [None, "subgraph", "streaming", "compiled", "local"])
def test_a_split_model_gives_what_eager_gives(session: Session, strategy: str, execution: str | None) -> None:
    model = layers()
    remote = spread(session, copy.deepcopy(model))
    schedule = planned(remote, torch.ones(4, 64), strategy)
    x = torch.randn(4, 64)
    (made,) = djinn.execute(schedule, [x], strategy=execution)
    torch.testing.assert_close(made.cpu(), model(x).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("preference", [[0, 1, 2], [2, 0, 1]])
def test_nodes_run_where_the_schedule_says_and_move_what_it_says(session: Session, preference: list[int]) -> None:
    """Also where another executor than the first has the least to do, and is filled first."""
    fleet_of(session).placement._preference = preference
    remote = spread(session, layers(width=WIDE))
    schedule = planned(remote, torch.ones(4, WIDE), "latency")
    assert {*schedule.devices.values()} == {f"remote_accelerator:{index}" for index in range(3)}, "weights are spread"
    x = torch.randn(4, WIDE).to(DEVICE)
    djinn.synchronize()
    fleet = fleet_of(session)
    before = [link.nodes_sent for link in fleet.executors]
    djinn.reset_stats()
    djinn.execute(schedule, [x])
    djinn.synchronize()
    sent = [link.nodes_sent - count for link, count in zip(fleet.executors, before, strict=True)]
    expected = [sum(place == f"remote_accelerator:{index}" for place in schedule.devices.values())
                + sum(f"remote_accelerator:{index}" in places for places in schedule.replicas.values())
                for index in range(3)]
    assert sent == expected
    assert djinn.stats()["transfers"] == len(schedule.transfers)
    assert djinn.stats()["bytes_transferred"] == sum(move.size_bytes for move in schedule.transfers)


def test_another_device_than_that_of_the_weights_is_kept_to_as_well(session: Session) -> None:
    there = torch.ones(8, 8).to(DEVICE)
    with djinn.capture() as captured:
        there @ there  # recorded
    infos = djinn.schedule(captured, "single").device_infos
    last = infos[-1].id
    # As if the value were held by the last one, which the scheduler then follows.
    elsewhere = [attrs.evolve(info, holds=frozenset(), copies=infos[0].holds if info.id == last else frozenset())
                 for info in infos]
    schedule = djinn.schedule(captured, "single", elsewhere)
    moved = attrs.evolve(schedule, devices=dict.fromkeys(schedule.order, last), placements={}, transfers=(),
                         device_infos=tuple(attrs.evolve(info, holds=infos[0].holds) if info.id == last else info
                                            for info in elsewhere))
    (made,) = djinn.execute(moved)
    djinn.synchronize()
    assert fleet_of(session).where.home_of(made._value.slot.number) == 2
    assert torch.equal(made.cpu(), torch.full((8, 8), 8.0))


def test_everything_else_is_placed_as_before_behind_it(session: Session) -> None:
    remote = spread(session, layers())
    schedule = planned(remote, torch.ones(4, 64), "latency")
    fleet = fleet_of(session)
    usual = fleet.placement
    djinn.execute(schedule, [torch.ones(4, 64)])
    assert fleet.placement is usual
    nodes = list(schedule.graph.nodes())
    nodes[5] = attrs.evolve(nodes[5], arguments=(Operand(1), Operand(0)) if len(nodes[5].inputs) > 1 else ())
    with pytest.raises(Exception, match=r"shapes|argument|expected"):
        djinn.execute(attrs.evolve(schedule, graph=RecordedGraph(tuple(nodes), values=schedule.graph.values)),
                      [torch.ones(4, 64)])
    assert fleet.placement is usual
    assert (torch.ones(3).to(DEVICE) + 1).cpu().tolist() == [2.0] * 3


def test_training_goes_on_by_schedule(session: Session) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    model = layers(3, 16)
    remote = spread(session, copy.deepcopy(model))
    local_optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = torch.optim.SGD(remote.parameters(), lr=0.5)
    x = torch.randn(5, 16)
    there = x.to(DEVICE)
    with djinn.capture(remote) as captured:
        step(remote, optimizer, there)
    schedule = djinn.schedule(captured, "latency")
    step(model, local_optimizer, x)
    for _ in range(3):
        step(model, local_optimizer, x)
        djinn.execute(schedule, {"input": there})
    for made, expected in zip(remote.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(made.detach().cpu(), expected.detach(), rtol=1e-4, atol=1e-6)


def test_pieces_and_transfers_are_measured_where_they_happen(session: Session) -> None:
    remote = spread(session, layers(width=WIDE))
    schedule = planned(remote, torch.ones(4, WIDE), "latency")
    found = measure(schedule, [torch.ones(4, WIDE)], pieces=1)
    assert [node for piece in found.pieces for node in piece.nodes] == list(schedule.order)
    assert [piece.device for piece in found.pieces] == [
        device for device, _ in groupby(schedule.devices[node] for node in schedule.order)]
    # Copies of weights that an earlier run has brought are still there.
    planned_moves = [move for move in schedule.transfers if move.after]
    assert sorted((move.source, move.target) for move in found.transfers) == sorted(
        (move.source, move.target) for move in planned_moves)
    # Those between different executors do not wait for each other, but for a piece that makes what they move.
    for move in found.transfers:
        assert move.span.begin_s >= min(piece.span.begin_s for piece in found.pieces if piece.device == move.source)
    for piece, after in zip(found.pieces, found.pieces[1:], strict=False):
        assert after.span.begin_s >= piece.span.begin_s, "each needs what the one before gives"
    text = str(djinn.explain(schedule, found))
    assert text.count("measured") >= 6


def test_the_simulated_cluster_moves_what_the_real_one_moves(session: Session) -> None:
    remote = spread(session, layers())
    schedule = planned(remote, torch.ones(4, 64), "latency")
    simulated = simulate(schedule, Cluster(schedule.device_infos))
    assert simulated.violations == ()
    djinn.synchronize()
    djinn.reset_stats()
    djinn.execute(schedule, [torch.ones(4, 64)])
    djinn.synchronize()
    assert djinn.stats()["bytes_transferred"] == sum(simulated.link_bytes.values())


def test_two_real_servers_take_as_long_as_the_simulated_ones(start_server: Callable[..., Any]) -> None:
    session = djinn.init(servers=[start_server().address, start_server().address], placement="automatic",
                         recovery="none")
    try:
        torch.manual_seed(0)
        branches = [torch.randn(768, 768) for _ in range(4)]
        placement: Any = fleet_of(session).placement
        weights = []
        for index, branch in enumerate(branches):
            placement.pin(index % 2)
            weights.append(branch.to(DEVICE))
            djinn.flush()
        placement.pin(None)
        x = torch.randn(768, 768)
        there = x.to(DEVICE)
        with djinn.capture() as captured, torch.inference_mode():
            parts = [(there @ weight).relu() @ weight for weight in weights]
            total = parts[0] + parts[1] + parts[2] + parts[3]
        schedule = djinn.schedule(captured, "latency")
        assert len({*schedule.devices.values()}) == 2
        ratios = []
        for _ in range(5):
            found = measure(schedule, pieces=len(schedule.order))
            simulated = as_measured(schedule, found)
            assert simulated.violations == ()
            real_s = max(piece.span.end_s for piece in found.pieces)
            ratios.append(simulated.makespan_s / real_s)
        expected = sum(((x @ branch).relu() @ branch for branch in branches), torch.zeros(768, 768))
        for got in (found.results[-1], total):
            torch.testing.assert_close(got.cpu(), expected, rtol=1e-3, atol=1e-1)
    finally:
        djinn.shutdown()
    # What the simulation leaves out is the way of commands, a fraction of a millisecond for each.
    assert 0.6 < statistics.median(ratios) < 1.25, ratios


def test_devices_that_the_user_chooses_are_no_schedules_choice() -> None:
    djinn.init(servers=["local://"] * 2, placement="explicit")
    try:
        x = torch.ones(3).to(DEVICE)
        with djinn.capture() as captured:
            x + 1  # recorded
        schedule = djinn.schedule(captured, "single")
        with pytest.raises(ScheduleError, match="the user's choice"):
            djinn.execute(schedule)
    finally:
        djinn.shutdown()


def test_a_view_keeps_the_memory_that_its_base_leaves_by_set(session: Session) -> None:
    placement: Any = fleet_of(session).placement
    base = torch.ones(3, 4).to(DEVICE)
    view = base[0]
    djinn.flush()
    placement.pin(2)
    base.set_(torch.full((3, 4), 8.0).to(DEVICE))
    assert (base + view.mean()).tolist() == [[9.0] * 4] * 3


def test_a_value_shares_the_memory_of_another_executor_after_set() -> None:
    session = djinn.init(servers=["local://"] * 3, placement="automatic", flush_every=1)
    try:
        placement: Any = fleet_of(session).placement
        base = torch.ones(3).to(DEVICE) + 1
        placement.pin(2)
        other = torch.full((3,), 6.0).to(DEVICE) + 0
        base.set_(other)
        other.add_(1)
        assert base.tolist() == [7.0] * 3
    finally:
        djinn.shutdown()

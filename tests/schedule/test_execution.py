"""Scheduled graphs run again: with other inputs, on what the session still holds, and give what eager gives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
import torch
from support.models.small_gpt import SmallGPT
from torch import nn
from torch.nn import functional

import djinn
from djinn.errors import InputsError, ScheduleError, UnknownOperatorError
from djinn_plugins.graph.graph import RecordedGraph
from djinn_plugins.schedule.execution import ScheduledRun
from djinn_plugins.schedule.inputs import outside_values
from djinn_plugins.schedule.profiling import measure
from djinn_plugins.schedule.results import last_results
from djinn_plugins.schedule.schedule import CachingPolicy, DeviceInfo, ExecutionSchedule

DEVICE = "remote_accelerator:0"
STRATEGIES = [None, *djinn.ExecutionStrategy]


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    djinn.init()
    yield
    djinn.shutdown()


def planned(work: Callable[..., Any], *inputs: torch.Tensor, model: nn.Module | None = None) -> ExecutionSchedule:
    """Record what is done with inputs that come from outside, and schedule it."""
    there = [tensor.to(DEVICE) for tensor in inputs]
    with djinn.capture(model) as captured:
        work(*there)
    return djinn.schedule(captured, "single")


def same(made: Any, expected: torch.Tensor, **tolerance: float) -> None:
    torch.testing.assert_close(made.cpu(), expected, **tolerance)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_model_runs_on_other_inputs_with_the_weights_that_are_there(strategy: str | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 2))
    remote = copy.deepcopy(model).to(DEVICE)
    schedule = planned(remote, torch.ones(4, 8), model=remote)
    for _ in range(2):
        x = torch.randn(4, 8)
        (made,) = djinn.execute(schedule, [x], strategy=strategy)
        same(made, model(x).detach())
        assert isinstance(made, djinn.LazyTensor) is (strategy != "local")


def test_inputs_have_names(session: None) -> None:
    torch.manual_seed(0)
    model = nn.Bilinear(3, 4, 2).to(DEVICE)
    schedule = planned(model, torch.ones(5, 3), torch.ones(5, 4), model=model)
    a, b = torch.randn(5, 3), torch.randn(5, 4)
    expected = model.cpu()(a, b).detach()
    model.to(DEVICE)
    weights = {"weight": model.weight, "bias": model.bias}
    (made,) = djinn.execute(schedule, {"input2": b, "input1": a.to(DEVICE), **weights})
    same(made, expected)
    identifiers = {value.name: value.value for value in outside_values(schedule.graph)}
    (made,) = djinn.execute(schedule, {identifiers["input2"]: b, "input1": a, **weights})
    same(made, expected)


def test_what_is_not_given_is_used_as_it_is_now() -> None:
    x, w = torch.randn(3), torch.randn(3)
    there, weight = x.to(DEVICE), w.to(DEVICE)
    with djinn.capture() as captured:
        there * weight  # the result is not kept: what is recorded is
    schedule = djinn.schedule(captured, "single")
    same(djinn.execute(schedule)[0], x * w)
    weight.add_(1)
    same(djinn.execute(schedule)[0], x * (w + 1))


def test_gpt2_gives_the_same_logits_again() -> None:
    torch.manual_seed(0)
    model = SmallGPT().eval()
    remote = copy.deepcopy(model).to(DEVICE)
    tokens = torch.randint(0, 50, (1, 12))
    with torch.no_grad():
        schedule = planned(remote, torch.zeros_like(tokens), model=remote)
        expected = model(tokens)
    made = djinn.execute(schedule, [tokens])[-1]
    same(made, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_training_step_is_done_once_more(strategy: str | None) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        functional.mse_loss(model(x), y).backward()
        optimizer.step()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    remote = copy.deepcopy(model).to(DEVICE)
    local_optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = torch.optim.SGD(remote.parameters(), lr=0.1, momentum=0.9)
    data = [(torch.randn(6, 4), torch.randn(6, 1)) for _ in range(4)]
    for x, y in data[:2]:
        step(model, local_optimizer, x, y)
    step(remote, optimizer, *(tensor.to(DEVICE) for tensor in data[0]))
    x, y = (tensor.to(DEVICE) for tensor in data[1])
    with djinn.capture(remote) as captured:
        step(remote, optimizer, x, y)
    schedule = djinn.schedule(captured, "single")
    for x, y in data[2:]:
        step(model, local_optimizer, x, y)
        djinn.execute(schedule, [x, y], strategy=strategy)
    for made, expected in zip(remote.parameters(), model.parameters(), strict=True):
        same(made.detach(), expected.detach())


def test_what_is_written_into_an_input_shows_there() -> None:
    schedule = planned(lambda x: x.mul_(2), torch.ones(3))
    x = torch.arange(3.0).to(DEVICE)
    assert djinn.execute(schedule, [x]) == ()
    same(x, torch.arange(3.0) * 2)
    ordinary = torch.arange(3.0)
    for strategy in STRATEGIES:
        djinn.execute(schedule, [ordinary], strategy=strategy)
        same(ordinary, torch.arange(3.0))


def test_views_lists_constants_and_indices_are_given_again_as_they_were() -> None:
    def work(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        halves = torch.cat(torch.split(x, [2, 3], dim=1)[::-1], dim=1).to(torch.float64)
        picked = halves[index] + torch.full((2, 5), 3, dtype=torch.float64, device=x.device)
        return torch.stack([picked.t().contiguous(), functional.gelu(picked, approximate="tanh").t()]).sum(
            dim=0, dtype=torch.float32)

    schedule = planned(work, torch.zeros(4, 5), torch.tensor([0, 1]))
    x, index = torch.randn(4, 5), torch.tensor([3, 1])
    for strategy in STRATEGIES:
        same(djinn.execute(schedule, [x, index], strategy=strategy)[-1], work(x, index))


def test_shapes_that_depend_on_data_are_found_anew() -> None:
    schedule = planned(lambda x: torch.nonzero(x).float() * 2, torch.ones(4))
    for x in (torch.tensor([0.0, 1, 0, 1]), torch.zeros(4)):
        for strategy in STRATEGIES:
            same(djinn.execute(schedule, [x], strategy=strategy)[-1], torch.nonzero(x).float() * 2)


def test_numbers_that_came_home_stay_what_they_were() -> None:
    schedule = planned(lambda x: x * x.sum().item(), torch.ones(3))
    before = djinn.stats()["materializations"]
    same(djinn.execute(schedule, [torch.full((3,), 2.0)])[-1], torch.full((3,), 6.0))
    assert djinn.stats()["materializations"] == before + 1, "only what the test itself has brought home"


def test_random_numbers_are_drawn_anew() -> None:
    schedule = planned(lambda x: functional.dropout(x, 0.5), torch.ones(1000))
    first, second = (djinn.execute(schedule, [torch.ones(1000)])[0].cpu() for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    there = torch.ones(1000).to(DEVICE)
    torch.manual_seed(3)
    expected = functional.dropout(there, 0.5).cpu()
    torch.manual_seed(3)
    same(djinn.execute(schedule, [torch.ones(1000)])[0], expected)


def test_results_are_those_that_nobody_reads_and_those_that_are_kept() -> None:
    def work(x: torch.Tensor) -> None:
        hidden = x + 1
        hidden.relu_()
        values, _ = (x * 2).max(dim=0)
        values.neg()

    schedule = planned(work, torch.ones(2, 3))
    graph = schedule.graph
    assert graph is not None
    made = {node.operation: node.outputs for node in graph.nodes()}
    hidden, negative = made["aten::add.Tensor"][0], made["aten::neg"][0]
    plain = attrs.evolve(schedule, caching={})
    assert last_results(graph, plain) == [hidden, negative], "what is written last is a result, an unread index is none"
    values = made["aten::max.dim"][0]
    kept = attrs.evolve(plain, caching={values: CachingPolicy.PERSIST})
    assert last_results(graph, kept) == [hidden, values, negative]
    x = torch.randn(2, 3)
    chosen = djinn.execute(schedule, [x], outputs=[made["aten::max.dim"][1], hidden])
    same(chosen[0], x.max(dim=0).indices)
    same(chosen[1], (x + 1).relu())


@pytest.mark.usefixtures("without_collection")
def test_values_go_when_nobody_needs_them_any_more() -> None:
    def work(x: torch.Tensor) -> torch.Tensor:
        for _ in range(50):
            x = x + 1
        return x

    schedule = planned(work, torch.ones(3))
    x = torch.ones(3).to(DEVICE)
    djinn.synchronize()
    before = djinn.stats()["live_handles"]
    session = djinn.ensure_initialized()
    live = []

    def look(position: int) -> None:
        if position % 10 == 9:
            session.synchronize()
            live.append(djinn.stats()["live_handles"] - before)

    (made,) = ScheduledRun(session, schedule, [x], None).remotely(look)
    assert live == [1] * 5
    same(made, torch.full((3,), 51.0))


def test_a_subgraph_is_one_message_and_a_stream_several() -> None:
    def work(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2000):
            x = x + 1
        return x

    schedule = planned(work, torch.ones(3))
    x = torch.ones(3).to(DEVICE)
    flushes = {}
    for strategy in ("subgraph", "streaming"):
        djinn.synchronize()
        before = djinn.stats()["flushes"]
        made = djinn.execute(schedule, [x], strategy=strategy)
        djinn.flush()
        flushes[strategy] = djinn.stats()["flushes"] - before
        same(made[0], torch.full((3,), 2001.0))
    assert flushes["subgraph"] == 1
    assert flushes["streaming"] > 1


def test_the_session_hands_over_as_before_behind_it() -> None:
    session = djinn.ensure_initialized()
    schedule = planned(lambda x: x + 1, torch.ones(3))
    before = session.flush_every, session.pace.limit
    djinn.execute(schedule, [torch.ones(3)], strategy="subgraph")
    djinn.synchronize()
    assert (session.flush_every, session.pace.limit) == before


def test_a_graph_of_a_traced_model_takes_its_weights_by_name() -> None:
    model = nn.Linear(3, 4)
    x = torch.randn(2, 3)
    schedule = djinn.schedule(djinn.build_graph(model, torch.ones(2, 3)), "single")
    weights = {name: value.detach() for name, value in model.named_parameters()}
    (made,) = djinn.execute(schedule, {"input": x, **weights})
    same(made, model(x).detach())
    with pytest.raises(InputsError, match="3 of 3 values from outside are missing: 'weight'"):
        djinn.execute(schedule)


def test_values_of_another_session_are_never_taken_for_ours() -> None:
    schedule = planned(lambda x: x + 1, torch.ones(3))
    djinn.init()
    # The same numbers mean other values here.
    others = [torch.zeros(3).to(DEVICE) for _ in range(20)]
    with pytest.raises(InputsError, match="1 of 1 values from outside are missing"):
        djinn.execute(schedule)
    same(djinn.execute(schedule, [others[0]])[0], torch.ones(3))


def test_inputs_that_do_not_fit_are_refused_before_anything_runs() -> None:
    kept, other = torch.ones(3).to(DEVICE), torch.ones(2, 3).to(DEVICE)
    with djinn.capture() as captured:
        kept.add_(1)
        kept * other  # recorded
    schedule = djinn.schedule(captured, "single")
    names = [value.value for value in outside_values(schedule.graph)]
    djinn.synchronize()
    before = djinn.stats()["operations"]
    cases: list[tuple[Any, str]] = [
        ([torch.ones(3)], "1 inputs are given, and the graph reads 2 values"),
        ({"nothing": kept}, "'nothing' is no value from outside"),
        ({names[0]: torch.ones(4)}, r"is given torch.float32\[4\], and was torch.float32\[3\]"),
        ({names[0]: torch.ones(3, dtype=torch.float64)}, "is given torch.float64"),
        ({names[0]: 3.0}, "is given a float, and is a tensor"),
        (kept, "The inputs are one tensor"),
        ({names[0]: torch.ones(6).to(DEVICE)[::2]}, "lies in memory in another way"),
    ]
    for inputs, message in cases:
        with pytest.raises(InputsError, match=message):
            djinn.execute(schedule, inputs)
    djinn.synchronize()
    # Making the strided input is no operation of the graph: one factory upload, one slice.
    assert djinn.stats()["operations"] <= before + 2
    same(kept, torch.full((3,), 2.0))


def test_what_shares_memory_and_is_written_must_share_it_again() -> None:
    base = torch.zeros(4).to(DEVICE)
    first, second = base[:2], base[:]
    with djinn.capture() as captured:
        first.add_(1)
        second.mul_(2)
    schedule = djinn.schedule(captured, "single")
    djinn.execute(schedule)
    same(base, torch.tensor([6.0, 6, 0, 0]))
    names = [value.value for value in outside_values(schedule.graph)]
    with pytest.raises(InputsError, match="share memory in the graph"):
        djinn.execute(schedule, {names[0]: torch.zeros(2).to(DEVICE)})
    other = torch.ones(4).to(DEVICE)
    djinn.execute(schedule, {names[0]: other[:2], names[1]: other[:]})
    same(other, torch.tensor([4.0, 4, 2, 2]))
    with pytest.raises(ScheduleError, match="shares memory with another value"):
        djinn.execute(schedule, strategy="local")


def test_what_reaches_into_its_storage_finds_it_laid_out_as_before() -> None:
    columns = torch.arange(6.0).reshape(2, 3).t().to(DEVICE)
    with djinn.capture() as captured:
        torch.as_strided(columns, (2, 2), (3, 1), 1) + 0
    schedule = djinn.schedule(captured, "single")
    expected = torch.tensor([[1.0, 2], [4, 5]])
    same(djinn.execute(schedule)[-1], expected)
    (name,) = (value.value for value in outside_values(schedule.graph))
    for strategy in STRATEGIES:
        dense = torch.arange(6.0).reshape(2, 3).t().contiguous()
        same(djinn.execute(schedule, {name: dense}, strategy=strategy)[-1], expected)


def test_schedules_that_break_a_rule_or_lead_elsewhere_are_refused() -> None:
    schedule = planned(lambda x: (x + 1) * 2, torch.ones(3))
    with pytest.raises(ScheduleError, match="'order'"):
        djinn.execute(attrs.evolve(schedule, order=schedule.order[::-1]))
    with pytest.raises(ScheduleError, match="keeps no graph"):
        djinn.execute(attrs.evolve(schedule, graph=None))
    with pytest.raises(ScheduleError, match="no execution strategy 'quickly'"):
        djinn.execute(schedule, strategy="quickly")
    with pytest.raises(InputsError, match="gives no value 'v0'"):
        djinn.execute(schedule, outputs=["v0"])
    elsewhere = djinn.schedule(schedule.graph, "single", devices=[DeviceInfo("far away")])
    with pytest.raises(ScheduleError, match="far away"):
        djinn.execute(elsewhere)
    graph = schedule.graph
    assert isinstance(graph, RecordedGraph)
    strange = RecordedGraph((attrs.evolve(graph.nodes()[0], operation="aten::nothing"), *graph.nodes()[1:]),
                            values=graph.values)
    with pytest.raises(UnknownOperatorError):
        djinn.execute(attrs.evolve(schedule, graph=strange))


def test_what_an_operation_raises_comes_as_ever() -> None:
    schedule = planned(lambda x, index: x[index], torch.ones(3), torch.tensor([0]))
    with pytest.raises(IndexError):
        djinn.execute(schedule, [torch.ones(3), torch.tensor([7])])[-1].cpu()


def test_a_measurement_says_when_each_piece_ran() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]).to(DEVICE)
    schedule = planned(model, torch.ones(4, 64), model=model)
    found = measure(schedule, [torch.ones(4, 64)], pieces=4)
    assert [node for piece in found.pieces for node in piece.nodes] == list(schedule.order)
    assert len(found.pieces) == 4
    assert {piece.device for piece in found.pieces} == {DEVICE}
    times = [time for piece in found.pieces for time in (piece.span.begin_s, piece.span.end_s)]
    assert times[0] == 0
    assert times == sorted(times), "one behind the other"
    assert 0 < times[-1] < 60
    same(found.results[-1], model(torch.ones(4, 64).to(DEVICE)).detach().cpu())


def test_what_changes_values_is_measured_by_running_it_once() -> None:
    kept = torch.zeros(3).to(DEVICE)
    with djinn.capture() as captured:
        kept.add_(1)
    schedule = djinn.schedule(captured, "single")
    measure(schedule)
    same(kept, torch.full((3,), 2.0))


def test_an_earlier_name_leads_to_the_same() -> None:
    x = torch.ones(3).to(DEVICE)
    with djinn.capture() as captured:
        x + 1  # recorded
    expected = djinn.schedule(captured, "single")
    for metadata in (None, captured.semantic_metadata, captured.annotated):
        made = djinn.Scheduler(captured.graph, metadata).schedule(strategy=djinn.SchedulingStrategy.SINGLE)
        assert (made.order, made.devices, made.scheduler) == (expected.order, expected.devices, "single")
        assert [node.metadata["meaning"] for node in made.graph.nodes()] == list(captured.semantic_metadata.values())

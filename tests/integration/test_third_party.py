"""Other people's plugins, installed from distributions of their own, found by entry point, and used.

The distributions are in tests/third_party; ``nox -s tests`` builds and installs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch
from torch.nn import functional

import djinn
from djinn.plugins import Plugins, PluginSelection
from djinn_plugins.cli.listing import rows_of
from djinn_plugins.graph.graph import GraphNode, RecordedGraph
from djinn_plugins.schedule.check import check_schedule
from djinn_plugins.schedule.schedule import DeviceInfo

REMOTE = "remote_accelerator:0"


def is_missing(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return True
    return False


needs_scheduler = pytest.mark.skipif(
    is_missing("djinn-scheduler-reverse"), reason="pip install ./tests/third_party/djinn-scheduler-reverse")
needs_pattern = pytest.mark.skipif(
    is_missing("djinn-pattern-lowrank"), reason="pip install ./tests/third_party/djinn-pattern-lowrank")


@pytest.fixture(autouse=True)
def own_session() -> Iterator[None]:
    djinn.shutdown()
    yield
    djinn.shutdown()


def training(device: str) -> list[torch.Tensor]:
    """Seeded training with dropout, an in-place update of a buffer, and views: much that depends on order."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Linear(12, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Dropout(0.3),
        torch.nn.Linear(16, 3),
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    # The device has a random stream of its own, and initialisation drew from the local one.
    torch.manual_seed(8)
    data = torch.arange(8 * 12, dtype=torch.float32).reshape(8, 12).to(device) / 96
    for _ in range(4):
        optimizer.zero_grad()
        noisy = data.clone()
        noisy[::2] += 0.1
        model(noisy).square().mean().backward()
        optimizer.step()
    return [value.detach().cpu() for value in model.state_dict().values()]


@needs_scheduler
def test_the_scheduler_is_found_by_entry_point_and_replaces_the_default() -> None:
    plugins = Plugins.load(PluginSelection.parse("scheduler=reverse"))
    found = plugins.find("scheduler", "single")
    assert (found.name, found.plugin) == ("reverse", "djinn-scheduler-reverse")
    assert found.distribution == "djinn-scheduler-reverse 0.1.0"
    row = next(row for row in rows_of(plugins) if row.plugin == "djinn-scheduler-reverse")
    assert (row.active, row.replaced) == (True, "djinn-scheduler-single")


@needs_scheduler
def test_the_scheduler_really_changes_the_order_and_keeps_every_dependency() -> None:
    djinn.init()
    with djinn.capture() as captured:
        parts = [torch.ones(3, device=REMOTE) * number for number in range(5)]
        total = torch.stack(parts).sum()
    graph = captured.graph
    scheduler = Plugins.load(PluginSelection.parse("scheduler=reverse")).choose("scheduler")
    schedule = scheduler.schedule(graph, [DeviceInfo("0")])
    check_schedule(schedule, graph, [DeviceInfo("0")])
    assert schedule.order != tuple(node.id for node in graph.nodes())
    assert schedule.order[0] == max(
        (node.id for node in graph.nodes() if not node.inputs), key=[n.id for n in graph.nodes()].index)
    assert total.item() == 30


@needs_scheduler
@pytest.mark.parametrize("flush_every", [None, 7])
def test_a_session_scheduled_in_reverse_gives_what_eager_gives(flush_every: int | None) -> None:
    expected = training("cpu")
    djinn.init(plugins="scheduler=reverse", flush_every=flush_every)
    got = training(REMOTE)
    for left, right in zip(expected, got, strict=True):
        torch.testing.assert_close(right, left)


def lowrank(graph: RecordedGraph) -> list[tuple[list[str], float, int]]:
    """What the pattern finds: operations, confidence, rank."""
    pattern = Plugins.load(PluginSelection.parse("pattern=lowrank")).choose("pattern")
    return [
        ([graph[node].operation.removesuffix(".default") for node in match.nodes], match.confidence,
         match.hints["rank"])
        for match in pattern.find(graph)
    ]


def captured(build: Callable[[], object]) -> RecordedGraph:
    with torch.no_grad(), djinn.capture() as seen:
        build()
    return seen.graph


@needs_pattern
def test_the_pattern_finds_a_low_rank_product() -> None:
    graph = captured(lambda: torch.relu(torch.randn(4, 64)) @ torch.randn(64, 8) @ torch.randn(8, 32))
    assert [(operations[0], operations[-1], confidence, rank) for operations, confidence, rank in lowrank(graph)] in (
        [("aten::mm", "aten::mm", 1.0, 8)], [("aten::matmul", "aten::matmul", 1.0, 8)])


@needs_pattern
def test_the_pattern_finds_an_adapter_beside_a_weight() -> None:
    class Adapted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Linear(48, 48)
            self.down = torch.nn.Linear(48, 4, bias=False)
            self.up = torch.nn.Linear(4, 48, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(x)
            return self.weight(hidden) + self.up(self.down(hidden))

    model = Adapted()
    found = lowrank(captured(lambda: model(torch.randn(2, 5, 48))))
    assert [(confidence, rank) for _, confidence, rank in found] == [(1.0, 4)]


class LoRALinear(torch.nn.Module):
    """A frozen layer and what is learned beside it, as adapters of language models are written."""

    def __init__(self, inner: torch.nn.Linear, rank: int = 4, alpha: float = 16) -> None:
        super().__init__()
        self.inner, self.scaling = inner.requires_grad_(False), alpha / rank
        self.dropout = torch.nn.Dropout(0.1)
        self.lora_a = torch.nn.Linear(inner.in_features, rank, bias=False)
        self.lora_b = torch.nn.Linear(rank, inner.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.lora_b(self.lora_a(self.dropout(x))) * self.scaling


@needs_pattern
@pytest.mark.parametrize("mode", ["no_grad", "grad", "training"])
def test_the_pattern_finds_each_adapter_with_the_layer_that_it_adapts(mode: str) -> None:
    pattern = Plugins.load(PluginSelection.parse("pattern=lowrank")).choose("pattern")
    layers = [LoRALinear(torch.nn.Linear(48, 64)), torch.nn.GELU(), LoRALinear(torch.nn.Linear(64, 48))]
    model = torch.nn.Sequential(*layers).train(mode == "training").to(REMOTE)
    x = torch.randn(2, 5, 48, device=REMOTE)
    with torch.set_grad_enabled(mode != "no_grad"), djinn.capture(model) as seen:
        result = model(x)
        if mode == "training":
            result.sum().backward()
    matches = pattern.find(seen.graph)
    assert [(match.metadata["kind"], match.metadata["scaling"], match.hints["rank"]) for match in matches] \
        == [("adapter", 4.0, 4)] * 2
    for match in matches:
        assert sorted(match.roles.values()) == ["adapted_projection", "down_projection", "sum", "up_projection"]
        assert match.subgraph(seen.graph).number_of_nodes() == len(match.nodes)


@needs_pattern
@pytest.mark.parametrize(("name", "build"), [
    ("wide", lambda x: x @ torch.randn(64, 128) @ torch.randn(128, 32)),
    ("narrowing", lambda x: x @ torch.randn(64, 16) @ torch.randn(16, 8)),
    ("not linear", lambda x: torch.relu(x @ torch.randn(64, 8)) @ torch.randn(8, 64)),
    ("right factor", lambda x: torch.randn(64, 8) @ (torch.randn(8, 4) @ x[:4])),
], ids=lambda value: value if isinstance(value, str) else "")
def test_the_pattern_finds_nothing_where_there_is_nothing(
    name: str, build: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    assert lowrank(captured(lambda: build(torch.relu(torch.randn(4, 64))))) == []


@needs_pattern
def test_the_pattern_refuses_a_result_that_somebody_else_reads() -> None:
    def build() -> torch.Tensor:
        narrow = torch.relu(torch.randn(4, 64)) @ torch.randn(64, 8)
        return functional.pad(narrow @ torch.randn(8, 64), (0, 1)) + narrow.sum()

    assert lowrank(captured(build)) == []


@needs_pattern
def test_the_pattern_reaches_the_user_and_does_not_look_at_names() -> None:
    djinn.init()
    with torch.no_grad(), djinn.capture() as seen:
        torch.relu(torch.randn(4, 64)) @ torch.randn(64, 8) @ torch.randn(8, 32)
    assert [match.pattern for match in seen.patterns].count("lowrank") == 1
    nodes = [
        GraphNode(f"other-{len(node.id)}-{node.id[::-1]}", node.operation, tuple(f"w{value}" for value in node.inputs),
                  tuple(f"w{value}" for value in node.outputs), node.specs)
        for node in seen.graph.nodes()
    ]
    assert lowrank(RecordedGraph(tuple(nodes))) == lowrank(seen.graph)

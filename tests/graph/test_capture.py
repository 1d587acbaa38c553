"""What a block knows of its nodes and values, against what the model itself says; and that it leaves no trace."""

from __future__ import annotations

import copy
import importlib
import io
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.models import gpt2
from torch import nn
from torch.optim import optimizer as optimizers
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import djinn
from djinn_plugins.graph.graph import GraphNode, Origin, RecordedGraph

DEVICE = "remote_accelerator:0"


@pytest.fixture(autouse=True)
def _session() -> Iterator[None]:
    djinn.init(device="cpu")
    yield
    djinn.shutdown()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.register_buffer("scale", torch.ones(8))
        self.checkpoints = checkpoints

    def encode(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embedding(ids) * self.scale

    def forward(self, ids: torch.Tensor, *, masks: dict[str, Any] | None = None) -> torch.Tensor:
        x = self.encode(ids)
        for block in self.blocks:
            with set_checkpoint_early_stop(False):
                x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        if masks is not None:
            x = x * masks["first"][0]
        return self.head(x)


IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def model(place: str = DEVICE, **options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options).to(place)


def loss_of(made: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(made.view(-1, 10), IDS.to(DEVICE).view(-1))


def reads(graph: RecordedGraph, node: GraphNode) -> set[str]:
    """Names of the values that a node reads, by itself or as views."""
    values = [graph.storages.get(value, value) for value in node.inputs]
    return {graph.values[value].name for value in values if value in graph.values}


def hooks(watched: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._forward_hooks_always_called)
               for m in watched.modules())


def traces(watched: nn.Module) -> list[object]:
    session = djinn.ensure_initialized()
    return [hooks(watched), len(optimizers._global_optimizer_pre_hooks), len(optimizers._global_optimizer_post_hooks),
            session.recorder.append == session.tape.nodes.append, djinn.is_capturing()]


@pytest.mark.parametrize("place", [DEVICE, "cpu"])
def test_every_node_knows_the_module_that_owns_the_weights_it_reads(place: str) -> None:
    watched = gpt2.gpt2(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32).to(place)
    types = {name: type(module).__name__ for name, module in watched.named_modules()}
    with djinn.capture(watched) as captured, torch.no_grad():
        watched(torch.arange(6, device=DEVICE)[None])
    graph, seen = captured.graph, set()
    for node in graph:
        for name in reads(graph, node):
            owner, _, leaf = name.rpartition(".")
            # The head shares the weight of the embedding, whose name comes first.
            if leaf in {"weight", "bias"} and (owner, node.operation) != ("transformer.wte", "aten::linear"):
                assert (node.origin.module_path, node.origin.module_type) == (owner, types[owner])
                seen.add(name)
    assert seen == {name for name, _ in watched.named_parameters()}


@pytest.mark.parametrize("place", [DEVICE, "cpu"])
def test_values_have_the_names_of_parameters_buffers_and_arguments(place: str) -> None:
    watched = model(place)
    mask = torch.ones(3, 8, device=DEVICE)
    with djinn.capture(watched) as captured, torch.no_grad():
        watched(IDS.to(DEVICE), masks={"first": [mask]})
    known = {(info.name, info.kind): info.spec for info in captured.graph.values.values()}
    named = {(name, "parameter"): tensor for name, tensor in watched.named_parameters()}
    named |= {("scale", "buffer"): watched.scale, ("ids", "input"): IDS, ("masks.first.0", "input"): mask}
    assert set(known) == set(named)
    for key, tensor in named.items():
        spec = known[key]
        assert spec is not None
        assert (spec.size, spec.dtype) == (tensor.shape, tensor.dtype)


def test_calls_are_counted_those_of_parts_too() -> None:
    watched = model()
    with djinn.capture(watched) as captured, torch.no_grad():
        ids = IDS.to(DEVICE)
        before = ids + 0
        watched(ids)
        between = before * 2
        watched(ids)
        watched.blocks[1](torch.ones(1, 8))
        watched.encode(between)
    calls: dict[str, list[int]] = {}
    for node in captured.graph:
        found = calls.setdefault(node.origin.module_type and (node.origin.module_path or "root"), [])
        if node.origin.call_index not in found:
            found.append(node.origin.call_index)
    assert calls == {
        "": [-1, 0, 1, 3], "root": [0, 1], "embedding": [0, 1, 3], "head": [0, 1],
        "blocks.0": [0, 1], "blocks.0.norm": [0, 1], "blocks.0.up": [0, 1], "blocks.0.down": [0, 1],
        "blocks.1": [0, 1, 2], "blocks.1.norm": [0, 1, 2], "blocks.1.up": [0, 1, 2], "blocks.1.down": [0, 1, 2],
    }


@pytest.mark.parametrize("place", [DEVICE, "cpu"])
def test_backward_belongs_to_the_block_and_to_the_modules(place: str) -> None:
    watched = model(place)
    with djinn.capture(watched) as captured:
        loss = loss_of(watched(IDS.to(DEVICE)))
        loss.backward()
        loss.item()
    graph = captured.graph
    stages = [node.origin.stage for node in graph if node.operation != "aten::_local_scalar_dense"]
    first = stages.index("backward")
    assert set(stages[:first]) == {"forward"}
    assert set(stages[first:]) == {"backward"}
    assert graph.nodes()[first].operation == "aten::ones_like"
    products = ("aten::addmm", "aten::mm")
    forward = {node.origin.module_path for node in graph.nodes()[:first] if node.operation in products}
    backward = {node.origin.module_path for node in graph.nodes()[first:] if node.operation == "aten::mm"}
    assert forward == backward == {"head", *(f"blocks.{n}.{part}" for n in (0, 1) for part in ("up", "down"))}
    if place == DEVICE:
        gradients = {info.name for info in graph.values.values() if info.kind == "gradient"}
        assert gradients == {f"{name}.grad" for name, _ in watched.named_parameters()}


def test_a_checkpoint_that_runs_modules_again_makes_no_new_call() -> None:
    watched = model(checkpoints=True)
    with djinn.capture(watched) as captured:
        loss_of(watched(IDS.to(DEVICE))).backward()
    again = [node for node in captured.graph if node.origin.stage == "backward" and node.operation == "aten::addmm"]
    assert {node.origin.module_path for node in again} == {
        f"blocks.{number}.{part}" for number in (0, 1) for part in ("up", "down")}
    assert {node.origin.call_index for node in captured.graph} == {0}


def test_what_other_threads_do_does_not_belong_even_in_a_backward() -> None:
    watched, other = model(), model()

    def elsewhere() -> None:
        loss_of(other(IDS.to(DEVICE))).backward()

    with djinn.capture(watched) as captured:
        made = loss_of(watched(IDS.to(DEVICE)))
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        made.backward()
    watched.zero_grad()
    with djinn.capture(watched) as alone:
        loss_of(watched(IDS.to(DEVICE))).backward()
    assert [node.operation for node in captured.graph] == [node.operation for node in alone.graph]


def optimizer_nodes(captured: djinn.Captured) -> list[str]:
    return [node.operation for node in captured.graph if node.origin.stage == "optimizer"]


@pytest.mark.parametrize("foreach", [True, False])
def test_an_optimizer_step_is_a_stage_and_its_states_have_names(foreach: bool) -> None:
    watched = model()
    optimizer = torch.optim.Adam(watched.parameters(), foreach=foreach)
    with djinn.capture(watched) as captured:
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(watched(IDS.to(DEVICE))).backward()
            optimizer.step()
    graph = captured.graph
    stages = [key for key, previous in zip(
        [node.origin.stage for node in graph], ["", *(node.origin.stage for node in graph)], strict=False)
        if key != previous]
    assert stages == ["forward", "backward", "optimizer"] * 2
    written = {graph.values[value].name for node in graph if node.origin.stage == "optimizer" for value in node.writes
               if value in graph.values and graph.values[value].kind == "parameter"}
    names = {name for name, _ in watched.named_parameters()}
    assert written == names
    states = {info.name for info in graph.values.values() if info.kind == "optimizer_state"}
    assert states == {f"{name}.{state}" for name in names for state in ("exp_avg", "exp_avg_sq")}


def test_an_optimizer_of_no_known_model_is_a_stage_too() -> None:
    weight = nn.Parameter(torch.ones(3, device=DEVICE))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, foreach=False)
    with djinn.capture() as captured:
        for _ in range(2):
            (weight * 2).sum().backward()
            optimizer.step()
    assert optimizer_nodes(captured)
    assert {(info.name, info.kind) for info in captured.graph.values.values() if info.kind} == {
        ("param_groups.0.0", "parameter"), ("param_groups.0.0.grad", "gradient"),
        ("param_groups.0.0.momentum_buffer", "optimizer_state")}


def test_a_closure_runs_forward_and_backward_within_a_step() -> None:
    watched = model()
    optimizer = torch.optim.LBFGS(watched.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(watched(IDS.to(DEVICE)))
        loss.backward()
        return loss

    with djinn.capture(watched) as captured:
        optimizer.step(closure)
    in_modules = [node.origin.stage for node in captured.graph if node.operation == "aten::native_layer_norm"]
    assert set(in_modules) == {"forward"}
    assert {node.origin.stage for node in captured.graph} == {"forward", "backward", "optimizer"}
    assert len({node.origin.call_index for node in captured.graph if node.origin.module_path}) > 1


def test_a_step_that_fails_is_over_when_the_next_has_ended() -> None:
    watched = model()
    optimizer = torch.optim.SGD(watched.parameters(), lr=0.1)

    def closure() -> float:
        raise RuntimeError("no loss")

    with djinn.capture(watched) as captured:
        with pytest.raises(RuntimeError, match="no loss"):
            optimizer.step(closure)
        loss_of(watched(IDS.to(DEVICE))).backward()
        optimizer.step()
        watched.scale + 1  # recorded
    assert captured.graph.nodes()[-1].origin.stage == "forward"
    assert {node.origin.stage for node in captured.graph if node.origin.module_path} == {"forward", "backward"}


def test_nothing_is_left_behind() -> None:
    watched = model()
    before = traces(watched)
    assert before[0] == 0
    with djinn.capture(watched):
        assert traces(watched) != before
        watched(IDS.to(DEVICE))
    assert traces(watched) == before
    with pytest.raises(RuntimeError, match="in the block"), djinn.capture(watched):
        raise RuntimeError("in the block")
    assert traces(watched) == before


def test_a_forward_that_raises_has_ended() -> None:
    watched = model()
    with djinn.capture(watched) as captured, torch.no_grad():
        with pytest.raises(RuntimeError):
            watched.blocks[0](torch.ones(1, 9))
        torch.ones(2) + 1  # recorded
        watched(IDS.to(DEVICE))
    outside = [node for node in captured.graph if not node.origin.module_type]
    assert [(node.operation, node.origin.call_index) for node in outside[-2:]] == [
        ("aten::ones", 0), ("aten::add.Tensor", 0)]
    assert captured.graph.nodes()[-1].origin == Origin("head", "Linear", 1, "forward")


def test_a_copy_made_in_the_block_is_not_watched() -> None:
    watched, file = model("cpu"), io.BytesIO()
    with djinn.capture(watched) as captured, torch.no_grad():
        copied = copy.deepcopy(watched)
        torch.save(watched, file)
        count = len(captured.graph)
        copied(IDS.to(DEVICE))
    added = captured.graph.nodes()[count:]
    assert added
    assert {node.origin.module_type for node in added} == {""}
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert torch.equal(again(IDS), watched(IDS))


def test_blocks_may_be_nested_each_with_a_model_of_its_own() -> None:
    outer, inner = model(), model()
    with torch.no_grad(), djinn.capture(outer) as whole:
        outer(IDS.to(DEVICE))
        with djinn.capture(inner) as part:
            inner(IDS.to(DEVICE))
    assert len(part.graph) < len(whole.graph)
    assert {node.origin.module_type for node in part.graph} > {"Linear", "Model"}
    later = whole.graph.nodes()[-1]
    assert later.origin.module_type == ""


def test_without_modules_the_model_alone_is_watched() -> None:
    watched = model()
    with djinn.capture(watched, modules=False) as captured, torch.no_grad():
        assert hooks(watched) == 3
        watched(IDS.to(DEVICE))
        watched(IDS.to(DEVICE))
    inside = [node for node in captured.graph if node.origin.module_type]
    assert {(node.origin.module_path, node.origin.call_index) for node in inside} == {("", 0), ("", 1)}
    assert {info.kind for info in captured.graph.values.values()} == {"parameter", "buffer", "input"}


def test_a_block_without_a_model_knows_metadata_of_values() -> None:
    x = torch.ones(2, 3, device=DEVICE)
    with djinn.capture("anything") as captured:
        x.exp()
    assert captured.model == "anything"
    (info,) = captured.graph.values.values()
    assert (info.name, info.kind) == ("", "")
    assert info.spec is not None
    assert tuple(info.spec.size) == (2, 3)


def test_meaning_is_computed_once_when_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[RecordedGraph] = []
    annotate = djinn.annotate_graph

    def count(graph: RecordedGraph) -> djinn.AnnotatedGraph:
        looked.append(graph)
        return annotate(graph)

    monkeypatch.setattr(importlib.import_module("djinn_plugins.graph.capture"), "annotate_graph", count)
    with djinn.capture(model()) as captured, torch.no_grad():
        captured.model(IDS.to(DEVICE))
        assert captured.graph is captured.graph
        assert looked == []
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: captured.annotated, range(32)))
        assert all(one is found[0] for one in found)
        assert looked == [captured.graph]
        captured.model(IDS.to(DEVICE))
    assert set(captured.semantic_metadata) == {node.id for node in captured.graph}
    assert captured.profile.nodes == len(captured.graph)
    assert captured.patterns == captured.annotated.patterns
    assert len(looked) == 2


def test_a_view_stays_with_the_memory_that_set_has_taken_from_its_base() -> None:
    with djinn.capture() as captured:
        base, other = torch.ones(4, device=DEVICE), torch.zeros(4, device=DEVICE)
        view = base[1:]
        base.set_(other)
        assert (view + 1).tolist() == [2.0] * 3
    storages = captured.graph.storages
    assert storages
    assert not storages.keys() & set(storages.values())

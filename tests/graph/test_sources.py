"""One graph, two sources: what a tracer of PyTorch makes of a model is what lazy tensors record of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import pytest
import torch
from support.models.labelled_families import FAMILIES, Family, gpt2
from torch import nn

import djinn
from djinn.errors import ConfigurationError, PluginError, UnsupportedTensorError
from djinn_plugins.graph.analyzer.analyzer import CoreAnalyzer
from djinn_plugins.graph.fx_source.builder import TracedGraphBuilder
from djinn_plugins.graph.fx_source.replaying import FxGraph
from djinn_plugins.graph.graph import Graph, RecordedGraph
from djinn_plugins.graph.patterns.patterns import PATTERNS

DEVICE = "remote_accelerator:0"
ASKS = {
    "mixtral": "nonzero", "qwen2_moe": "nonzero", "deepseek_v3": "nonzero", "bert": "item", "roberta": "item",
    "distilbert": "item", "albert": "item", "bart": "item", "detr": "item", "llava": "asks for the values",
}
"""Families whose control flow depends on data: on which experts are chosen, on whether a mask hides anything."""


@pytest.fixture(autouse=True)
def _session() -> Iterator[None]:
    # Whether an argument that equals its default is written down depends on what a session has seen before.
    djinn.init()
    yield
    djinn.shutdown()


def identities(graph: Graph) -> dict[str, str]:
    """Name the values of a graph by the order in which its nodes mention them."""
    names: dict[str, str] = {}
    for node in graph.nodes():
        for value in (*node.inputs, *node.outputs):
            names.setdefault(value, f"value {len(names)}")
    return names


def plain(item: Any, names: Mapping[str, str]) -> Any:
    """Reduce to what can be compared: specs by their metadata, values by `identities`."""
    if attrs.has(type(item)) and not isinstance(item, type):
        if type(item).__name__ == "TensorSpec":
            return repr(item)
        return {field.name: plain(getattr(item, field.name), names) for field in attrs.fields(type(item))
                if field.name != "seconds"}
    if isinstance(item, Mapping):
        return {plain(key, names): plain(member, names) for key, member in item.items()}
    if isinstance(item, (list, tuple)):
        return [plain(member, names) for member in item]
    if isinstance(item, (set, frozenset)):
        return sorted(map(repr, (plain(member, names) for member in item)))
    return names.get(item, item) if isinstance(item, str) else item


def content(graph: Graph) -> dict[str, Any]:
    """All that a graph says, whatever its values are called."""
    names = identities(graph)
    storages: dict[str, int] = {}
    return {
        "nodes": [plain(node, names) for node in graph.nodes()],
        "values": {names[value]: plain(info, names) for value, info in graph.values.items() if value in names},
        "storages": {name: storages.setdefault(graph.storages.get(value, value), len(storages))
                     for value, name in names.items()},
    }


def annotations(graph: Graph) -> Any:
    """What patterns and the analyzer make of a graph."""
    matches = [match for pattern in PATTERNS for match in pattern.find(graph)]
    names = identities(graph)
    return plain(matches, names), plain(CoreAnalyzer().annotate(graph, matches), names)


def remote(item: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(DEVICE), item)


def recorded(model: nn.Module, *args: Any, **kwargs: Any) -> RecordedGraph:
    """What lazy tensors record of a call; the model moves."""
    model.to(DEVICE)
    args, kwargs = remote(args), remote(kwargs)
    with djinn.capture(model) as captured:
        model(*args, **kwargs)
    return captured.graph


def assert_equal(graph: Graph, expected: Graph) -> None:
    assert [node.operation for node in graph.nodes()] == [node.operation for node in expected.nodes()]
    assert content(graph) == content(expected)
    assert annotations(graph) == annotations(expected)


@pytest.mark.parametrize("family", FAMILIES[::3] if os.environ.get("HYPOTHESIS_PROFILE") == "ci" else FAMILIES,
                         ids=lambda family: family.name)  # the nightly run takes all
def test_a_traced_model_is_what_lazy_tensors_record_of_it(family: Family) -> None:
    with torch.no_grad():
        graph = TracedGraphBuilder().build_from_model(family.model(), **family.inputs())
        djinn.init()
        expected = recorded(family.model(), **family.inputs())
    if family.name in ASKS:
        assert graph.backend_type == "lazy_dag"
        assert ASKS[family.name] in graph.fallback_reason
    else:
        assert (graph.backend_type, graph.fallback_reason) == ("fx", "")
    assert annotations(graph)[0]
    assert_equal(graph, expected)


TRAINED = ("gpt2", "llama", "t5", "vit", "hand_written_gpt", "hand_written_cnn")


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.name in TRAINED],
                         ids=lambda family: family.name)
def test_so_it_is_with_gradients_and_in_training(family: Family) -> None:
    graph = TracedGraphBuilder().build_from_model(family.model().train(), **family.inputs())
    djinn.init()
    assert_equal(graph, recorded(family.model().train(), **family.inputs()))
    assert graph.backend_type == "fx"


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.yes, self.no = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.yes(x).relu() if x.sum() > 0 else self.no(x).tanh()


@pytest.mark.parametrize(("sign", "taken"), [(1, "yes"), (-1, "no")])
def test_where_control_flow_depends_on_data_the_model_runs_and_the_reason_is_kept(sign: int, taken: str) -> None:
    model, x = Branches(), sign * torch.ones(2, 4)
    with torch.no_grad():
        graph = TracedGraphBuilder().build_from_model(model, x)
    assert graph.backend_type == "lazy_dag"
    assert "item" in graph.fallback_reason
    assert {node.origin.module_path for node in graph.nodes()} == {"", taken}
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())


def test_tracing_sends_nothing_draws_nothing_and_changes_nothing() -> None:
    model = gpt2(layers=2).train()
    state = {name: (tensor, tensor.clone()) for name, tensor in model.named_parameters()}
    ids = torch.arange(8)[None]
    torch.manual_seed(3)
    before, seed = dict(djinn.stats()), torch.random.get_rng_state()
    with djinn.capture() as outside:
        graph = TracedGraphBuilder().build_from_model(model, ids)
    assert not outside.graph.nodes()
    assert any(node.is_random for node in graph.nodes())
    assert dict(djinn.stats()) == before
    assert torch.equal(torch.random.get_rng_state(), seed)
    for name, parameter in model.named_parameters():
        assert parameter is state[name][0]
        assert torch.equal(parameter, state[name][1])


def test_a_model_without_data_can_be_traced() -> None:
    with torch.no_grad():
        expected = TracedGraphBuilder().build_from_model(gpt2(layers=1).eval(), torch.arange(8)[None])
        with torch.device("meta"):
            model, ids = gpt2(layers=1).eval(), torch.arange(8)[None]
        graph = TracedGraphBuilder().build_from_model(model, ids)
    assert graph.backend_type == "fx"
    assert_equal(graph, expected)


def test_a_remote_model_can_be_traced() -> None:
    torch.manual_seed(0)
    model = gpt2(layers=1).eval()
    with torch.no_grad():
        expected = TracedGraphBuilder().build_from_model(model, torch.arange(8)[None])
        graph = TracedGraphBuilder().build_from_model(model.to(DEVICE), torch.arange(8)[None].to(DEVICE))
    assert graph.backend_type == "fx"
    assert_equal(graph, expected)


@pytest.mark.parametrize("form", ["growing", "static"])
def test_a_step_with_a_cache_is_traced_and_the_cache_stays_as_it_was(form: str) -> None:
    import transformers

    def cache(model: Any) -> Any:
        if form == "growing":
            return transformers.DynamicCache(config=model.config)
        return transformers.StaticCache(config=model.config, max_cache_len=16)

    def step(model: Any, device: str) -> tuple[Any, dict[str, Any]]:
        past = cache(model)
        model(torch.arange(6, device=device)[None], past_key_values=past)
        return past, {"past_key_values": past, "input_ids": torch.tensor([[7]], device=device)}

    with torch.no_grad():
        model = gpt2(layers=2).eval()
        past, inputs = step(model, "cpu")
        keys = past.layers[0].keys
        values = keys.clone()
        graph = TracedGraphBuilder().build_from_model(model, **inputs)
        assert past.layers[0].keys is keys
        assert torch.equal(keys, values)
        djinn.init()
        model = gpt2(layers=2).eval().to(DEVICE)
        _, inputs = step(model, DEVICE)
        with djinn.capture(model) as captured:
            model(**inputs)
    assert graph.backend_type == "fx", graph.fallback_reason
    assert [node.operation for node in graph.nodes()] == [node.operation for node in captured.graph.nodes()]
    assert annotations(graph)[0] == annotations(captured.graph)[0]
    assert sum(match["pattern"] == "kv_cache" for match in annotations(graph)[0]) == 4


@pytest.mark.parametrize(("model", "inputs", "source"), [
    (gpt2(layers=2).eval(), {"input_ids": torch.arange(8)[None]}, "fx"),
    (Branches(), {"x": torch.ones(2, 4)}, "lazy_dag"),
], ids=["traced", "run"])
def test_what_the_public_function_gives_can_be_annotated(
    model: nn.Module, inputs: dict[str, torch.Tensor], source: str
) -> None:
    with torch.no_grad():
        graph = djinn.build_graph(model, **inputs)
        djinn.init()
        expected = djinn.annotate_graph(recorded(model, **inputs))
    assert (graph.backend_type, bool(graph.fallback_reason)) == (source, source == "lazy_dag")
    known = djinn.annotate_graph(graph)
    assert known.graph is graph
    for part in ("nodes", "values", "patterns", "profile"):
        assert plain(getattr(known, part), identities(graph)) == plain(
            getattr(expected, part), identities(expected.graph)), part
    assert known.profile.patterns.get("attention", 0) == (2 if source == "fx" else 0)


def test_a_source_that_is_chosen_must_exist() -> None:
    with pytest.raises(PluginError, match="no source named 'unheard'.*'fx' of djinn-source-fx"):
        djinn.init(plugins={"source": "unheard"})


def test_of_what_is_no_module_no_graph_is_made() -> None:
    function: Any = torch.relu
    with pytest.raises(ConfigurationError, match="no module"):
        djinn.build_graph(function, torch.ones(2))


class Plain(nn.Module):
    """What every tracer of PyTorch can trace: a loop, tied weights, a buffer, attention, a tensor without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.zeros(16))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(torch.cat((torch.tensor([], dtype=torch.int64, device=ids.device).view(0, 6), ids)))
        x = x + self.shift
        for block in self.blocks:
            x = x + block(x)
        x = nn.functional.scaled_dot_product_attention(x.unsqueeze(1), x.unsqueeze(1), x.unsqueeze(1), is_causal=True)
        return self.head(self.norm(x.squeeze(1))).softmax(-1)


def _symbolic(model: nn.Module, ids: torch.Tensor) -> FxGraph:
    return TracedGraphBuilder().build_from_fx(torch.fx.symbolic_trace(model), ids)


def _exported(model: nn.Module, ids: torch.Tensor) -> FxGraph:
    return TracedGraphBuilder().build_from_fx(torch.export.export(model, (ids,), strict=False))


def _dynamo(model: nn.Module, ids: torch.Tensor) -> FxGraph:
    made: list[FxGraph] = []

    def backend(module: torch.fx.GraphModule, examples: Any) -> Any:
        made.append(TracedGraphBuilder().build_from_fx(module))
        return module

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(ids)
    return made[0]


@pytest.mark.parametrize("read", [_symbolic, _exported, _dynamo])
@pytest.mark.parametrize("trained", [False, True])
def test_graphs_of_every_tracer_are_read(read: Callable[[nn.Module, torch.Tensor], FxGraph], trained: bool) -> None:
    ids = torch.arange(12).reshape(2, 6)
    torch.manual_seed(0)
    with torch.set_grad_enabled(trained):
        graph = read(Plain(), ids)
        djinn.init()
        expected = recorded(Plain(), ids)
    assert isinstance(graph, FxGraph)
    assert graph.backend_type == "fx"
    assert isinstance(graph.module, torch.fx.GraphModule)
    ours, theirs = content(graph), content(expected)
    # What a tracer calls an input is its own affair; the class of the outermost module is not known to Dynamo.
    for said in (ours, theirs):
        for info in said["values"].values():
            info["name"] = "" if info["kind"] == "input" else info["name"]
        for node in said["nodes"]:
            node["origin"]["module_type"] *= bool(node["origin"]["module_path"])
            del node["metadata"]  # computed from all of this
    assert ours["nodes"] == theirs["nodes"]
    assert ours["storages"] == theirs["storages"]
    assert ours["values"] == theirs["values"]


def test_regions_of_other_modes_are_read() -> None:
    class Regions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                scale = self.inner(x).sigmoid()
            with torch.autocast("cpu", enabled=False):
                x = x * scale.to(torch.float32)
            return self.inner(x)

    x = torch.ones(2, 4)
    exported, traced = _exported(Regions(), x), TracedGraphBuilder().build_from_model(Regions(), x)
    names = [node.operation for node in exported.nodes()]
    assert names == [node.operation for node in traced.nodes()]
    assert names[0] == "aten::linear"
    assert "aten::addmm" in names
    assert {node.origin.module_path for node in exported.nodes()} == {"", "inner"}


def test_sizes_that_may_vary_are_what_they_were() -> None:
    class Pooled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(x.shape[0] * 2, -1).sum(0) / x.shape[0]

    program = torch.export.export(Pooled(), (torch.ones(6, 4),), strict=False,
                                  dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))
    graph = TracedGraphBuilder().build_from_fx(program)
    assert [node.operation for node in graph.nodes()] == ["aten::view", "aten::sum.dim_IntList", "aten::div.Tensor"]
    assert graph.nodes()[0].shape == (12, 2)


def test_names_of_parameters_buffers_and_inputs_are_the_models_own() -> None:
    with torch.no_grad():
        graph = _exported(Plain(), torch.arange(12).reshape(2, 6))
    named = {info.name: info.kind for info in graph.values.values()}
    assert named == {"ids": "input", "shift": "buffer", **{
        name: "parameter" for name, _ in Plain().named_parameters()}}


def test_a_graph_without_inputs_to_go_by_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no input for the placeholder 'ids'"):
        TracedGraphBuilder().build_from_fx(torch.fx.symbolic_trace(Plain()))
    with pytest.raises(ConfigurationError, match="1 placeholders and was given 2"):
        TracedGraphBuilder().build_from_fx(torch.fx.symbolic_trace(Plain()), torch.ones(1), torch.ones(1))


def test_what_is_no_graph_is_refused() -> None:
    source: Any = Plain()
    with pytest.raises(ConfigurationError, match="Plain is no graph"):
        TracedGraphBuilder().build_from_fx(source)


def test_a_graph_whose_sizes_depend_on_data_is_refused() -> None:
    class Chosen(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.nonzero()

    with pytest.raises(UnsupportedTensorError, match="aten::nonzero"):
        TracedGraphBuilder().build_from_fx(torch.fx.symbolic_trace(Chosen()), torch.ones(3))


def test_the_wrong_call_of_a_model_raises_what_the_model_raises() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        TracedGraphBuilder().build_from_model(nn.Linear(4, 4), torch.ones(2, 3))

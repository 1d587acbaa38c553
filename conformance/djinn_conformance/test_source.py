"""Laws of sources. Each graph is built in a separate session, so that earlier recordings have no influence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from torch.utils import _pytree as pytree

import djinn
from djinn.session import runtime
from djinn_conformance.assertions import expect, expect_equal, expect_raises, expect_same_tensor
from djinn_conformance.laws import law
from djinn_conformance.small_models import ModelCall, asking_calls, calls, content, straight_calls
from djinn_conformance.subjects import Subject
from djinn_plugins.graph.capture import capture
from djinn_plugins.graph.graph import Graph
from djinn_plugins.graph.kinds import GraphSource

_LAZY = "lazy_dag"


@contextmanager
def _session() -> Iterator[None]:
    runtime.init("", device="cpu")
    try:
        yield
    finally:
        runtime.shutdown()


def _built(plugin: GraphSource, call: ModelCall) -> Graph:
    args, kwargs = call.given()
    with torch.set_grad_enabled(call.wants_gradients):
        return plugin.build(call.model(), args, kwargs)


def _expect_same(got: Graph, wanted: Graph, what: str, where: str) -> None:
    __tracebackhide__ = True
    theirs = content(wanted)
    for part, ours in content(got).items():
        expect_equal(ours, theirs[part], f"{part} of {what}", where)


@law("source.graph_well_formed", effort=0.2)
@given(call=calls())
def test_graph_well_formed(subject: Subject, plugin: GraphSource, call: ModelCall) -> None:
    """Go through nodes and edges."""
    with _session():
        graph = _built(plugin, call)
    where = f"{subject}: {call}"
    nodes = graph.nodes()
    position = {node.id: index for index, node in enumerate(nodes)}
    expect(len(position) == len(nodes) > 0, "names of nodes", got=[node.id for node in nodes],
           wanted="one or more, each once", where=where)
    expect_equal([graph.get_node(node.id) is node for node in nodes], [True] * len(nodes), "nodes by name", where)
    order = {node.id: index for index, node in enumerate(graph.topological_sort())}
    expect_equal(sorted(order), sorted(position), "nodes in topological order", where)
    for edge in graph.edges():
        for places in (position, order):
            expect(places[edge.source] < places[edge.target], f"places of {edge}",
                   got=(places[edge.source], places[edge.target]), wanted="one before the other", where=where)
    made: set[str] = set()
    for node in nodes:
        unknown = [value for value in node.inputs if value not in made and value not in graph.values]
        expect_equal(unknown, [], f"values that {node.id} reads and nobody knows", where)
        twice = [value for value in node.outputs if value in made or value in graph.values]
        expect_equal(twice, [], f"values that {node.id} makes and that exist", where)
        expect_equal(sorted(set(node.writes) - set(node.inputs)), [], f"values that {node.id} only writes", where)
        expect_equal((len(node.input_specs), len(node.specs)), (len(node.inputs), len(node.outputs)),
                     f"numbers of specs of {node.id}", where)
        made.update(node.outputs)
    known = made | set(graph.values)
    unknown = sorted({*graph.storages, *graph.storages.values()} - known)
    expect_equal(unknown, [], "values with storages that nobody knows", where)


@law("source.as_recorded", effort=0.4)
@given(call=calls())
def test_as_recorded(subject: Subject, plugin: GraphSource, call: ModelCall) -> None:
    """Compare with a recording of the call."""
    with _session():
        graph = _built(plugin, call)
    with _session():
        wanted = call.recorded()
    _expect_same(graph, wanted, "the graph", f"{subject}: {call}")


@law("source.deterministic", effort=0.2)
@given(call=calls(), other=calls())
def test_deterministic(subject: Subject, plugin: GraphSource, call: ModelCall, other: ModelCall) -> None:
    """Build a graph twice, with another one in between."""
    graphs = []
    for each in (call, other, call):
        with _session():
            graphs.append(_built(plugin, each))
    first, _, second = graphs
    where = f"{subject}: {call}, and {other} in between"
    _expect_same(second, first, "the second graph", where)
    expect_equal((second.backend_type, second.fallback_reason), (first.backend_type, first.fallback_reason),
                 "where the second graph comes from, and why", where)


def _tensors(model: torch.nn.Module, inputs: Any) -> list[tuple[str, torch.Tensor]]:
    found = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    return [*found, *((f"input {position}", leaf) for position, leaf in enumerate(leaves))]


def _states(model: torch.nn.Module) -> list[Any]:
    """List the state of modules, without their tensors."""
    return [(name, type(module), module.training, sorted(vars(module)), len(module._forward_hooks),
             len(module._forward_pre_hooks)) for name, module in model.named_modules()]


@law("source.model_unchanged", effort=0.4)
@given(call=calls())
def test_model_unchanged(subject: Subject, plugin: GraphSource, call: ModelCall) -> None:
    """Compare the model and its inputs with their earlier state."""
    model, where = call.model(), f"{subject}: {call}"
    args, kwargs = call.given()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    held, states = _tensors(model, (args, kwargs)), _states(model)
    before = [(tensor.detach().clone(), tensor.requires_grad, tensor.grad) for _, tensor in held]
    with _session(), torch.set_grad_enabled(call.wants_gradients):
        plugin.build(model, args, kwargs)
    expect_equal(_states(model), states, "modules afterwards", where)
    after = _tensors(model, (args, kwargs))
    expect_equal([name for name, _ in after], [name for name, _ in held], "tensors afterwards", where)
    for (name, tensor), (_, same), (elements, requires_grad, gradient) in zip(after, held, before, strict=True):
        expect_equal(tensor is same, True, f"whether {name} is the tensor that it was", where)
        expect_same_tensor(tensor.detach(), elements, name, where)
        expect_equal((tensor.requires_grad, tensor.grad is gradient), (requires_grad, True), f"gradient of {name}",
                     where)
        if gradient is not None:
            expect_same_tensor(gradient, torch.ones_like(elements), f"gradient of {name}", where)


@law("source.fallback_told", effort=0.4)
@given(straight=straight_calls(), asking=asking_calls())
def test_fallback_told(subject: Subject, plugin: GraphSource, straight: ModelCall, asking: ModelCall) -> None:
    """Compare a model that requests values with one that does not."""
    with _session():
        usual = _built(plugin, straight)
    expect_equal(usual.fallback_reason, "", "reason for falling back", f"{subject}: {straight}")
    where = f"{subject}: {asking}"
    with _session():
        graph = _built(plugin, asking)
    with _session():
        _expect_same(graph, asking.recorded(), "the graph", where)
    expect_equal(bool(graph.fallback_reason.strip()), graph.backend_type != usual.backend_type,
                 "whether there is a reason for falling back", f"{where}: a {graph.backend_type} graph")


@law("source.sends_nothing_when_traced", effort=0.2)
@given(call=straight_calls())
def test_sends_nothing_when_traced(subject: Subject, plugin: GraphSource, call: ModelCall) -> None:
    """Check a session's counters and tape, and the local generator."""
    model, where = call.model(), f"{subject}: {call}"
    args, kwargs = call.given()
    with _session():
        counters, generator = dict(djinn.stats()), torch.random.get_rng_state()
        with capture() as outside, torch.set_grad_enabled(call.wants_gradients):
            graph = plugin.build(model, args, kwargs)
        if graph.backend_type == _LAZY:
            return
        expect_equal([node.operation for node in outside.graph.nodes()], [], "what was recorded", where)
        expect_equal(dict(djinn.stats()), counters, "counters afterwards", where)
        expect_equal(torch.equal(torch.random.get_rng_state(), generator), True, "whether the generator is as it was",
                     where)


@law("source.refused_call")
@pytest.mark.parametrize("wants_gradients", [False, True])
def test_refused_call(subject: Subject, plugin: GraphSource, wants_gradients: bool) -> None:
    """Give inputs of the wrong size, too many inputs, and a model that raises."""

    class Stubborn(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # the name in PyTorch's calls
            raise LookupError("not today")

    for model, inputs in ((torch.nn.Linear(4, 4), [torch.ones(2, 3)]), (torch.nn.Linear(4, 4), [torch.ones(2, 4)] * 2),
                          (Stubborn(4, 4), [torch.ones(2, 4)])):
        with pytest.raises(Exception) as caught:  # noqa: PT011  # any exception is right
            model(*inputs)
        where = f"{subject}: {model} of {[tuple(given.size()) for given in inputs]}"
        with _session(), torch.set_grad_enabled(wants_gradients):
            expect_raises(caught.type, partial(plugin.build, model, inputs, {}), "the call", where)

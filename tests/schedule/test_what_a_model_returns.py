"""A schedule gives what the captured model returned, in its structure: the complete example of earlier documents."""

from __future__ import annotations

import copy
import gc
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from djinn.core.subgraph_builder import SubgraphBuilder
from torch import nn

import djinn
from djinn.errors import InputsError
from djinn_plugins.graph.graph import RecordedGraph
from djinn_plugins.schedule.schedule import ExecutionSchedule

D = "remote_accelerator:0"


@dataclass(frozen=True)
class Found:
    scores: torch.Tensor
    more: list[Any]


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.attention(x, x[:, :3], x[:, :3])


class Telling(nn.Module):
    def __init__(self, structure: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.structure = structure

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.linear(x)
        return self.structure(x, hidden, hidden.relu(), self.linear.weight)


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0)).eval()


def cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), (4, 8)),
    "cnn": (lambda: cnn().eval(), (2, 3, 8, 8)),
    "cnn that trains": (cnn, (2, 3, 8, 8)),
    "encoder": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 1),
                (4, 6, 16)),
    "encoder that evaluates": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1).eval(), (4, 6, 16)),
    "lstm": (lambda: nn.LSTM(8, 6, batch_first=True), (2, 5, 8)),
    "attention": (Attending, (2, 5, 16)),
    "gpt2": (gpt2, ()),
    "mapping": (lambda: Telling(lambda x, h, y, w: OrderedDict(y=y, more=[h, (y.sum(), None, 3)])), (4, 8)),
    "object": (lambda: Telling(lambda x, h, y, w: Found(y, [h, x, w, {"last": Found(h, [])}])), (4, 8)),
}


def plain(structure: Any) -> Any:
    """Bring a structure home, and let it be compared."""
    home = djinn.materialize(structure)
    if isinstance(home, torch.Tensor):
        return home.detach().cpu()
    if isinstance(home, Found):
        return [plain(home.scores), *map(plain, home.more)]
    if hasattr(home, "layers"):
        return [plain(tensor) for layer in home.layers for tensor in (layer.keys, layer.values)]
    if isinstance(home, dict):
        return {key: plain(value) for key, value in home.items()}
    return list(map(plain, home)) if isinstance(home, (list, tuple)) else home


@pytest.fixture(params=["here", "served"])
def session(request: pytest.FixtureRequest) -> Iterator[None]:
    djinn.init(request.getfixturevalue("server").address if request.param == "served" else None)
    yield
    djinn.shutdown()


@pytest.mark.parametrize("kind", MODELS)
def test_it_is_what_the_model_itself_returns(kind: str, session: None) -> None:
    make, size = MODELS[kind]
    for is_remote, with_gradients in itertools.product((False, True), repeat=2):
        original = make()
        model = copy.deepcopy(original).to(D) if is_remote else copy.deepcopy(original)
        with torch.set_grad_enabled(with_gradients), djinn.capture(model) as captured:
            x = torch.randn(size, device=D) if size else torch.randint(0, 50, (2, 7), device=D)
            y = model(x)
        graph, metadata = captured.graph, captured.semantic_metadata
        planned = djinn.schedule(captured, "single")
        others = ExecutionSchedule(planned.order, planned.devices, graph=planned.graph)
        for schedule, given in ((djinn.Scheduler(graph, metadata).schedule(), x),
                                (others, torch.randn(size) if size else torch.randint(0, 50, (2, 7)))):
            result = djinn.execute(schedule, inputs=[given])
            with torch.no_grad():
                expected = copy.deepcopy(original)(given.cpu())
            assert type(result) is type(y) or isinstance(result, djinn.LazyTuple)
            torch.testing.assert_close(plain(result), plain(expected))
            if isinstance(expected, torch.Tensor):
                assert (result.shape, result.numpy().shape) == (expected.shape, expected.shape)
                assert torch.equal(result.cpu(), result[0].cpu())


def test_one_tensor_is_a_tuple_of_it_and_stands_for_it() -> None:
    model = nn.Linear(4, 4)
    with djinn.capture(model) as captured:
        x = torch.randn(2, 4)
        y = model(x)
    result = djinn.execute(djinn.schedule(captured), inputs=[x])
    (tensor,) = result
    assert len(result) == 1
    assert isinstance(tensor, djinn.LazyTensor)
    expected = y.detach().cpu()
    for made, wanted in (
        (result * 2, expected * 2), (1 - result, 1 - expected), (result @ torch.eye(4), expected), (-result, -expected),
        (torch.relu(result), expected.relu()), (torch.cat([result, result]), torch.cat([expected, expected])),
        (result > 0, expected > 0), (result.sum(1), expected.sum(1)), (result.materialize(), expected),
        (djinn.materialize(result), expected), (torch.tensor(result.tolist()), expected),
    ):
        torch.testing.assert_close(made.cpu(), wanted)


def test_outputs_are_tensors_of_the_block() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with djinn.capture(model) as captured:
        x = torch.randn(2, 4)
        hidden = model[0](x)
        y = model(hidden)
        total = y.sum()
    schedule = djinn.schedule(captured)
    made = djinn.execute(schedule, [x], outputs=[total, hidden, x])
    for tensor, expected in zip(made, (total, hidden, x), strict=True):
        torch.testing.assert_close(tensor.cpu(), expected.detach().cpu())
    torch.testing.assert_close(djinn.execute(schedule, [x]).cpu(), y.detach().cpu())
    with pytest.raises(InputsError, match="gives no value"):
        djinn.execute(schedule, [x], outputs=[torch.ones(2, device=D)])
    with pytest.raises(InputsError, match="ordinary tensor"):
        djinn.execute(schedule, [x], outputs=[torch.ones(2)])


def test_a_number_that_stays_on_the_device_is_that_of_the_inputs() -> None:
    x, other = torch.tensor([1.0, -1, 2], device=D), torch.tensor([-1.0, -1, 5], device=D)
    with djinn.capture() as captured:
        y = x.add(torch.ones(3, device=D), alpha=x.sum())
    (made,) = djinn.execute(djinn.schedule(captured), inputs=[other], outputs=[y])
    assert made.tolist() == [2, 2, 8]


def test_what_comes_home_within_the_model_is_no_result() -> None:
    class Home(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).cpu()

    model = Home(4, 4)
    with djinn.capture(model) as captured:
        model(torch.randn(2, 4))
    with pytest.raises(InputsError, match="has run in this process"):
        djinn.execute(djinn.schedule(captured))


@pytest.mark.parametrize("modelled", [False, True])
def test_without_one_call_of_a_model_it_is_what_the_program_holds(modelled: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).to(D)
    with djinn.capture(model if modelled else None) as captured:
        x = torch.randn(2, 4)
        first = model(x)
        held = [model(first).sigmoid()]
        second = first.exp()
        first.sum().item()
    schedule = djinn.schedule(captured)
    expected = [held[0].detach().cpu(), second.detach().cpu()]
    del held, second
    result = djinn.execute(schedule, [x])
    assert type(result) is djinn.LazyTuple
    for tensor, wanted in zip(result, expected, strict=True):
        torch.testing.assert_close(tensor.cpu(), wanted)


def test_without_anything_held_it_is_the_last() -> None:
    w = torch.randn(4, 4, device=D, requires_grad=True)
    with djinn.capture() as captured:
        (torch.ones(2, 4) @ w).tanh()
    (made,) = djinn.execute(djinn.schedule(captured))
    torch.testing.assert_close(made.cpu(), (torch.ones(2, 4) @ w.detach().cpu()).tanh())


def test_graphs_of_traced_models_and_of_pending_operations_say_it_as_well() -> None:
    model = Telling(lambda x, h, y, w: {"last": y, "object": Found(h, [x])}).to(D)
    x = torch.randn(4, 8)
    graph = djinn.build_graph(model, x)
    assert graph.backend_type == "fx"
    weights = {name: value.detach() for name, value in model.named_parameters()}
    made = djinn.execute(djinn.schedule(graph), {"x": x, **weights})
    torch.testing.assert_close(plain(made), plain(model(x.to(D))))
    pending = torch.ones(3, device=D).exp()
    torch.testing.assert_close(djinn.execute(djinn.schedule(SubgraphBuilder().build(pending))).cpu(),
                               torch.ones(3).exp())


def test_the_structure_holds_no_tensor() -> None:
    model = nn.LSTM(4, 4).to(D)
    with djinn.capture(model) as captured:
        model(torch.randn(2, 3, 4))
    graph = djinn.schedule(captured).graph
    assert isinstance(graph, RecordedGraph)
    assert graph.returned is not None
    assert not [item for item in gc.get_objects()
                if type(item) is djinn.LazyTensor and f"v{item._value.slot.number}" in graph.returned.values]

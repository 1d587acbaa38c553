"""``torch.compile(model, backend="djinn")``: ordinary modules and tensors, computed remotely, equal to eager."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.processes.warm import clean_environment, run_python
from support.recording.compiled import nodes_executed, remotely, same
from torch import nn

import djinn

REMOTE = "remote_accelerator:0"
# Dynamo looks at the gradient of every tensor that it meets.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.inner = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.norm(x)
        mixed, weights = self.inner(normed, normed, normed)
        return x + mixed, weights


def tiny_gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=128, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    made: nn.Module = transformers.GPT2LMHeadModel(config)
    return made


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "mlp": lambda: (nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3)), torch.randn(5, 6)),
    "conv": lambda: (nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
                                   nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 16, 4)), torch.randn(4, 3, 8, 8)),
    "lstm": lambda: (nn.LSTM(6, 8, num_layers=2, batch_first=True), torch.randn(3, 5, 6)),
    "attention": lambda: (Attention(), torch.randn(2, 7, 16)),
    "gpt2": lambda: (tiny_gpt2(), torch.randint(0, 128, (2, 9))),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_what_it_gives_here_with_one_round_trip_a_call(name: str, mode: Any) -> None:
    model, x = MODELS[name]()
    model.eval()
    compiled, flipped = remotely(model), x.flip(0)
    with mode():
        expected, again = model(x), model(flipped)
        assert same(compiled(x), expected)
        assert same(compiled(x), expected), "repeated"
        djinn.synchronize()
        before = djinn.stats()
        assert same(compiled(flipped), again), "repeated with other values"
        after = djinn.stats()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert after["round_trips"] - before["round_trips"] == graphs
    assert after["nodes_executed"] > before["nodes_executed"], "something ran here"
    assert after["operations"] == before["operations"], "something was recorded again"
    assert after["programs_sent"] == before["programs_sent"]


@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_eager(name: str) -> None:
    model, x = MODELS[name]()
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    x = x.requires_grad_() if x.is_floating_point() else x
    twin, compiled = copy.deepcopy(model), remotely(model)
    for _ in range(3):
        found = []
        for owner, function in ((twin, twin), (model, compiled)):
            owner.zero_grad()
            x.grad = None
            result = function(x)
            first = next(leaf for leaf in torch.utils._pytree.tree_leaves(tuple(result.values()) if isinstance(
                result, dict) else result) if isinstance(leaf, torch.Tensor))
            first.square().sum().backward()
            found.append([result, [p.grad for p in owner.parameters() if p.grad is not None],
                          *([x.grad] if x.requires_grad else []), [*owner.buffers()]])
        assert same(found[1], found[0])


def test_repeated_calls_leave_the_weights_where_they_are(server: Any) -> None:
    djinn.init(server=server.address)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)).eval()
    compiled, x = remotely(model), torch.randn(2, 256)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    with torch.no_grad():
        djinn.reset_stats()
        compiled(x)
        assert djinn.stats()["bytes_sent"] > size
        djinn.reset_stats()
        for _ in range(5):
            assert same(compiled(x), model(x))
        stats = djinn.stats()
    assert stats["round_trips"] == 5
    assert stats["bytes_sent"] < 5 * (x.numel() * 4 + 1000) < size


def test_several_graphs_share_the_weights(server: Any) -> None:
    djinn.init(server=server.address)
    layer = nn.Linear(512, 512)

    def broken(x: torch.Tensor) -> torch.Tensor:
        x = layer(x)
        torch._dynamo.graph_break()
        return layer(x)

    compiled, x = remotely(broken), torch.randn(2, 512)
    with torch.no_grad():
        djinn.reset_stats()
        assert same(compiled(x), broken(x))
        assert djinn.stats()["bytes_sent"] < 1.5 * layer.weight.numel() * 4
        assert same(compiled(x[:1]), broken(x[:1])), "another shape"
        assert djinn.stats()["bytes_sent"] < 1.5 * layer.weight.numel() * 4


@pytest.mark.parametrize("change", ["step", "fused step", "load", "assign", "data", "in place", "new parameter"])
def test_a_changed_weight_is_seen(change: str) -> None:
    model = nn.Linear(4, 3)
    compiled, x = remotely(model), torch.randn(2, 4)
    others = nn.Linear(4, 3).state_dict()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=change == "fused step")
    for _ in range(2):
        before = compiled(x)
        assert same(before, model(x))
        if change.endswith("step"):
            model(x).sum().backward()
            optimizer.step()
        elif change in ("load", "assign"):
            model.load_state_dict({name: value + 1 for name, value in others.items()}, assign=change == "assign")
            others = model.state_dict()
        elif change == "data":
            model.weight.data = torch.randn(3, 4)
        elif change == "in place":
            with torch.no_grad():
                model.weight.mul_(2)
        else:
            model.weight = nn.Parameter(torch.randn(3, 4))
        assert same(compiled(x), model(x))
        assert not torch.equal(compiled(x), before)


def test_training_gives_the_weights_that_it_gives_here() -> None:
    model, x = MODELS["conv"]()
    twin = copy.deepcopy(model)
    target = torch.randint(0, 4, (4,))
    for trained, function in ((twin, twin), (model, remotely(model))):
        optimizer = torch.optim.AdamW(trained.parameters(), lr=0.01)
        for _ in range(4):
            optimizer.zero_grad()
            F.cross_entropy(function(x), target).backward()
            optimizer.step()
    assert same([value.detach() for value in model.state_dict().values()], [*twin.state_dict().values()])


def test_random_numbers_are_drawn_as_here() -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.3) + torch.rand(5) + torch.randn_like(x)

    compiled, x = remotely(noisy), torch.randn(4, 5)
    torch.manual_seed(7)
    expected = [noisy(x) for _ in range(3)]
    torch.manual_seed(7)
    found = [compiled(x) for _ in range(3)]
    assert same(found, expected)
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_other_shapes(dynamic: bool | None) -> None:
    def function(x: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
        flat = x.reshape(x.shape[0] * x.shape[1])
        return flat * factor + torch.arange(flat.shape[0]), torch.zeros(x.shape[1]) + x.shape[0]

    compiled = remotely(function, dynamic=dynamic)
    for rows, factor in ((2, 3), (3, 3), (4, 5), (2, 3), (7, 2), (4, 5)):
        x = torch.randn(rows, 4)
        assert same(compiled(x, factor), function(x, factor))
    assert nodes_executed(lambda: compiled(x, factor)) > 0


def test_a_float_that_changes_is_a_number_of_the_program() -> None:
    def function(x: torch.Tensor, scale: float) -> torch.Tensor:
        return (x * scale).softmax(-1)

    compiled, x = remotely(function), torch.randn(3, 4)
    for scale in (1.0, 0.5, 0.25, 0.125, 0.5):
        assert same(compiled(x, scale), function(x, scale))
    before = djinn.stats()
    compiled(x, 0.25)
    assert djinn.stats()["operations"] == before["operations"], "recorded again"


def test_autocast() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).eval()

    def inside(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x)

    x = torch.randn(3, 8)
    compiled, outside = remotely(inside), remotely(model)
    with torch.no_grad():
        for _ in range(2):
            found = compiled(x)
            assert found.dtype == torch.bfloat16
            assert same(found, inside(x))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert same(outside(x), model(x))
            assert same(outside(x), model(x))


def test_devices_named_in_the_code() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.arange(3, device="cpu") + x.to("cpu").cpu()
        return y.to(torch.device("cpu"), torch.float64) + torch.zeros(3, device=x.device)

    compiled, x = remotely(function), torch.randn(3)
    for _ in range(2):
        assert same(compiled(x), function(x))
    before = djinn.stats()
    compiled(x)
    after = djinn.stats()
    assert after["round_trips"] == before["round_trips"] + 1
    assert after["operations"] == before["operations"]


def test_shapes_that_depend_on_data() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = x[x > 0]
        return kept * 2, torch.nonzero(x)

    compiled = remotely(function)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        for _ in range(4):
            x = torch.randn(10)
            assert same(compiled(x), function(x))


def test_a_session_that_ends_and_another() -> None:
    layer = nn.Linear(4, 3)

    def model(x: torch.Tensor) -> torch.Tensor:
        return layer(x) * torch.tensor([1.0, 2.0, 3.0])

    compiled, x = remotely(model), torch.randn(2, 4)
    for _ in range(3):
        for _ in range(2):
            assert same(compiled(x), model(x))
        djinn.shutdown()
    assert same(compiled(x), model(x)), "started on demand"


def test_a_backward_pass_of_a_session_that_has_ended() -> None:
    model = nn.Linear(4, 3)
    compiled, x = remotely(model), torch.randn(2, 4)
    compiled(x)
    loss = compiled(x).sum()
    djinn.init()
    with pytest.raises(djinn.SessionClosedError):
        loss.backward()
    model.zero_grad()
    compiled(x).sum().backward()
    assert model.weight.grad is not None


def test_a_server_that_dies(start_server: Any) -> None:
    running = start_server()
    djinn.init(server=running.address)
    model = nn.Linear(4, 3)
    compiled, x = remotely(model), torch.randn(2, 4)
    with torch.no_grad():
        compiled(x)
        running.kill()
        running.process.wait()
        for _ in range(2):
            with pytest.raises(djinn.DjinnError, match="127.0.0.1"):
                compiled(x)
        djinn.init()
        assert same(compiled(x), model(x))


def test_an_error_that_only_data_shows_is_eagers_and_the_next_call_works() -> None:
    table = nn.Embedding(5, 2)
    compiled, good, bad = remotely(table), torch.tensor([0, 4]), torch.tensor([0, 5])
    with torch.no_grad():
        for _ in range(2):
            assert same(compiled(good), table(good))
            with pytest.raises(IndexError, match="out of range"):
                compiled(bad)
        assert same(compiled(good), table(good))


def test_a_failed_write_leaves_the_buffer_as_it_was() -> None:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(5.0))

        def forward(self, index: torch.Tensor) -> torch.Tensor:
            self.table += F.embedding(index, torch.arange(10.0).reshape(5, 2)).sum()
            return self.table.clone()

    model = Looking()
    twin, compiled, good, bad = copy.deepcopy(model), remotely(model), torch.tensor([0, 4]), torch.tensor([7, 7])
    for _ in range(2):
        assert same(compiled(good), twin(good))
        for function in (compiled, twin):
            with pytest.raises(IndexError):
                function(bad)
        assert same(model.table, twin.table)


def test_tensors_of_other_kinds_are_refused() -> None:
    compiled = remotely(lambda x: x * 2)
    with pytest.raises(djinn.errors.UnsupportedTensorError, match="meta"):
        compiled(torch.ones(2, device="meta"))


def test_a_module_that_is_there_already() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    x = torch.randn(2, 4)
    expected = model(x)
    moved = copy.deepcopy(model).to(REMOTE)
    compiled = remotely(moved)
    for _ in range(2):
        assert torch.equal(compiled(x.to(REMOTE)).cpu(), expected)
        assert torch.equal(compiled(x).cpu(), expected)


def test_weights_within_the_graph() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    twin, compiled, x = copy.deepcopy(model), remotely(model), torch.randn(5, 4)
    with torch._dynamo.config.patch(inline_inbuilt_nn_modules=False):
        for _ in range(3):
            for owner, function in ((twin, twin), (model, compiled)):
                owner.zero_grad()
                function(x).square().sum().backward()
            assert same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
            assert same([*model.buffers()], [*twin.buffers()])


def test_the_backend_is_found_without_djinn_and_djinn_does_without_dynamo() -> None:
    without_dynamo, without_djinn = ("\n".join(lines) for lines in ([
        "import sys, djinn",
        "djinn.init()",
        "late = 'torch._dynamo.backends', 'djinn_plugins.device.dynamo.'",
        "assert not [name for name in sys.modules if name.startswith(late)]",
        "djinn.shutdown()",
    ], [
        "import sys, torch",
        "model, x = torch.nn.Linear(2, 2), torch.ones(1, 2)",
        "assert 'djinn' in torch._dynamo.list_backends() and 'djinn' not in sys.modules",
        "assert torch.equal(torch.compile(model, backend='djinn')(x), model(x))",
        "import djinn",
        "assert djinn.stats()['round_trips'] == 1",
    ]))
    for done in (run_python(without_djinn), subprocess.run([sys.executable, "-c", without_dynamo], text=True,
                                                           env=clean_environment(), capture_output=True, check=False)):
        assert done.returncode == 0, done.stderr

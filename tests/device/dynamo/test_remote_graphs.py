"""``torch.compile(model, backend="djinn")`` on models whose tensors are remote, on a guarded server."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.models.generate_modes import generated, grouped_query_llama
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import djinn
from djinn_plugins.device.dynamo import remote_graphs

DEVICE = "remote_accelerator:0"
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def served(server: Any, fresh: None) -> Iterator[None]:
    djinn.init(server=server.address)
    with torch.no_grad():
        yield


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3)).to(DEVICE)


def counted(action: Callable[[], Any]) -> dict[str, int]:
    before = djinn.stats()
    action()
    after = djinn.stats()
    names = ("operations", "nodes_executed", "programs_sent", "round_trips")
    return {name: after[name] - before[name] for name in names}


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend="djinn", **options)


def test_a_further_call_is_one_known_program_and_records_nothing() -> None:
    model, x = small(), torch.randn(5, 6, device=DEVICE)
    call = compiled(model, fullgraph=True)
    assert torch.equal(call(x).cpu(), model(x).cpu())
    results: list[torch.Tensor] = []
    counts = counted(lambda: results.extend(call(x + 0) for _ in range(3)))
    assert counts["operations"] == 3, "only the additions are recorded"
    assert counts["nodes_executed"] > 3 * 3
    assert counts["round_trips"] == 0
    for result in results:
        assert torch.equal(result.cpu(), model(x).cpu())
    djinn.synchronize()
    assert counted(lambda: call(x))["programs_sent"] == 0


def test_calls_of_many_sizes_are_kept_if_they_are_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    # Alone, each size takes 42 operations.
    monkeypatch.setattr(remote_graphs, "MAX_OPERATIONS", 100)

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = x * 2 + 1
        return x.narrow(0, 1, x.shape[0] - 2).cumsum(0)

    call = compiled(function, dynamic=True)
    sizes = [torch.randn(rows, 3) for rows in range(4, 9)]
    remote = [x.to(DEVICE) for x in sizes]
    for _ in range(2):
        results: list[torch.Tensor] = []
        counts = counted(lambda: results.extend(map(call, remote)))  # noqa: B023  # called at once
        for x, result in zip(sizes, results, strict=True):
            assert torch.equal(result.cpu(), function(x))
    assert counts["operations"] == 0
    assert counts["nodes_executed"] == 5 * 42


@pytest.mark.usefixtures("without_collection")
def test_results_stay_on_the_device_and_values_are_freed() -> None:
    model, x = small(), torch.randn(5, 6, device=DEVICE)
    call = compiled(model)
    result = call(x)
    held = []
    for _ in range(20):
        result = call(result @ torch.ones(3, 6, device=DEVICE))
        result.cpu()
        held.append(djinn.stats()["live_handles"])
    assert result.device == torch.device(DEVICE)
    assert held[-1] == held[2]


def test_another_session_records_anew() -> None:
    model, x = small(), torch.randn(5, 6)
    call = compiled(model)
    wanted = call(x.to(DEVICE)).cpu()
    model.cpu()
    djinn.init()
    model.to(DEVICE)
    assert torch.equal(call(x.to(DEVICE)).cpu(), wanted)
    assert torch.equal(call(x.to(DEVICE)).cpu(), wanted)


def test_while_operations_are_captured_they_are_recorded() -> None:
    model, x = small(), torch.randn(5, 6, device=DEVICE)
    call = compiled(model)
    call(x), call(x)
    with djinn.capture(model) as captured:
        call(x)
    assert len(captured.graph.nodes()) > 2


def test_ordinary_tensors_in_a_graph_are_recorded_each_time() -> None:
    local, x = torch.randn(6), torch.randn(5, 6, device=DEVICE)
    call = compiled(lambda tensor: (tensor * local).sum(-1))
    for _ in range(3):
        assert torch.equal(call(x).cpu(), (x * local).sum(-1).cpu())
        local.add_(1)


def test_values_of_the_graph_that_come_home_are_fetched_each_time() -> None:
    call = compiled(lambda tensor: (tensor * 2).cpu() + 1)
    for number in range(3):
        made = call(torch.full((3,), float(number), device=DEVICE))
        assert made.device.type == "cpu"
        assert made.tolist() == [number * 2 + 1.0] * 3


def test_arguments_that_share_memory_are_written_in_order() -> None:
    def write(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        one.add_(1)
        return other * 2

    call = compiled(write)
    apart, base = torch.zeros(4, device=DEVICE), torch.zeros(4, device=DEVICE)
    for _ in range(2):
        call(apart, torch.zeros(3, device=DEVICE))
    for number in range(1, 4):
        assert call(base[1:], base[:3]).tolist()[1:] == [2.0 * number] * 2


def test_an_error_of_an_operation_is_that_of_the_wait() -> None:
    call = compiled(lambda table, index: table[index])
    table = torch.arange(4.0, device=DEVICE)
    assert call(table, torch.tensor([1], device=DEVICE)).tolist() == [1.0]
    wrong = call(table, torch.tensor([9], device=DEVICE))
    with pytest.raises(IndexError):
        wrong.cpu()
    assert call(table, torch.tensor([2], device=DEVICE)).tolist() == [2.0]


def test_backends_that_generate_code_leave_remote_tensors_to_eager() -> None:
    model, x = small(), torch.randn(5, 6, device=DEVICE)
    compiled(model)(x)
    assert torch.equal(torch.compile(model, backend="inductor")(x).cpu(), model(x).cpu())
    # Its code asks tensors for facts that Dynamo cannot know of these.
    query = torch.ones(1, 1, 4, 4, device=DEVICE)
    assert torch.compile(flex_attention)(query, query, query).tolist() == query.tolist()


@pytest.fixture(scope="module")
def llama() -> Any:
    pytest.importorskip("transformers")
    return grouped_query_llama(layers=1)


@pytest.mark.parametrize("mode", ["left padded batch", "static cache", "sampling"])
def test_generate_with_a_compiled_forward_gives_the_same_tokens(llama: Any, mode: str) -> None:
    wanted = generated(mode, llama, DEVICE)
    got = generated(mode, llama, DEVICE, compiles=True)
    assert all(torch.equal(mine.cpu(), theirs.cpu()) for mine, theirs in zip(got, wanted, strict=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_a_growing_cache_compiles_at_most_three_graphs(llama: Any) -> None:
    model = copy.deepcopy(llama).to(DEVICE)
    prompt = torch.tensor([[1, 2, 3, 4, 5, 6]], device=DEVICE)

    def generate() -> list[int]:
        return model.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0).tolist()

    wanted = generate()
    recorded = counted(generate)
    model.forward = compiled(model.forward)
    assert generate() == wanted
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3
    counts = counted(generate)
    assert counts["nodes_executed"] > 0.9 * recorded["nodes_executed"]
    assert counts["operations"] < 0.4 * recorded["operations"], "the forward passes are not recorded again"


NUMBERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "an integer": lambda x: x + torch.as_tensor(3, device=x.device),
    "a truth value": lambda x: x * torch.as_tensor(True, device=x.device),
    "a list": lambda x: x + torch.as_tensor([3, 4], device=x.device),
    "a new tensor": lambda x: x + x.new_tensor([1, 2]),
    "an item": lambda x: x + torch.as_tensor(3, device=x.device).item(),
    "an index": lambda x: x[torch.as_tensor(1, device=x.device)],
    "a mask": lambda x: x[x > 0] + torch.arange(2, device=x.device),
    "a decision": lambda x: x + 1 if x.sum() > 0 else x - torch.full((2,), 1, device=x.device),
}


@pytest.mark.parametrize("options", [{}, {"dynamic": True}, {"mode": "reduce-overhead"}, {"backend": "eager"},
                                     {"backend": "aot_eager"}, {"backend": "djinn"}], ids=str)
def test_dynamo_traces_nothing_of_djinn(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not methods that attrs has generated, which lie in no file."""
    traced: list[str] = []
    convert = torch._dynamo.convert_frame._compile

    def compile_frame(code: Any, *args: Any, **kwargs: Any) -> Any:
        traced.append(code.co_filename)
        return convert(code, *args, **kwargs)

    monkeypatch.setattr(torch._dynamo.convert_frame, "_compile", compile_frame)
    x = torch.ones(2, device=DEVICE)
    for name, function in NUMBERS.items():
        call = torch.compile(function, **options)
        assert all(torch.equal(call(x).cpu(), function(x).cpu()) for _ in range(2)), name
    assert traced
    assert {file for file in traced if "djinn" in file.rpartition("/tests/")[0] + file.rpartition("/")[2]} == set()

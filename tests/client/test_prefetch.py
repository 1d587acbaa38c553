"""What a program fetches one by one comes home together: counted in round trips, here and on a server."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils._pytree import tree_map

import djinn

DEVICE = "remote_accelerator:0"
LAYERS = 14


@pytest.fixture(params=["in process", "served"], autouse=True)
def _somewhere(request: pytest.FixtureRequest) -> Iterator[None]:
    address = request.getfixturevalue("server").address if request.param == "served" else None
    djinn.init(server=address)
    yield
    djinn.init()


def trips(action: Callable[[], Any]) -> tuple[int, Any]:
    """Count the round trips of something, and return its result."""
    djinn.synchronize()
    djinn.reset_stats()
    made = action()
    return djinn.stats()["round_trips"], made


@pytest.fixture
def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model of 28 parameters and an optimizer after a step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(LAYERS))).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 8, device=DEVICE)).sum().backward()
    optimizer.step()
    return model, optimizer


def _equal(got: dict[str, torch.Tensor], model: torch.nn.Module) -> bool:
    wanted = djinn.materialize(dict(model.state_dict()))
    return got.keys() == wanted.keys() and all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_checkpoint_is_saved_in_one_round_trip(trained: Any, zipped: bool) -> None:
    model, optimizer = trained
    file = io.BytesIO()
    count, _ = trips(lambda: torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file,
                                        _use_new_zipfile_serialization=zipped))
    assert count == 1
    file.seek(0)
    loaded = torch.load(file)
    assert _equal(loaded["model"], model)
    state = djinn.materialize(optimizer.state_dict()["state"])
    assert all(torch.equal(loaded["optimizer"]["state"][index][name], state[index][name])
               for index in state for name in state[index])


@pytest.mark.parametrize("fetch", [
    lambda model: {name: value.cpu() for name, value in model.state_dict().items()},
    lambda model: tree_map(lambda value: value.cpu(), dict(model.state_dict())),
    lambda model: {name: value.detach().to("cpu", copy=True) for name, value in model.named_parameters()},
    lambda model: dict(zip(model.state_dict(), [value.numpy() for value in model.state_dict().values()], strict=True)),
], ids=["comprehension", "tree_map", "parameters", "numpy"])
def test_a_state_dict_comes_home_in_one_round_trip(trained: Any, fetch: Callable[[Any], Any]) -> None:
    count, made = trips(lambda: fetch(trained[0]))
    assert count == 1
    assert _equal({name: torch.as_tensor(value) for name, value in made.items()}, trained[0])


def test_the_state_of_an_optimizer_comes_home_in_one_round_trip(trained: Any) -> None:
    optimizer = trained[1]
    wanted = djinn.materialize(copy.copy(optimizer.state_dict()["state"]))

    def bring_home() -> None:
        for state in optimizer.state.values():
            for name, value in state.items():
                state[name] = value.cpu()

    count, _ = trips(bring_home)
    assert count == 1
    assert all(torch.equal(state[name], wanted[index][name])
               for index, state in enumerate(optimizer.state.values()) for name in state)


@pytest.mark.parametrize("move", [lambda model: model.cpu(), lambda model: model.to("cpu")], ids=["cpu", "to"])
def test_a_module_with_its_gradients_moves_home_in_one_round_trip(trained: Any, move: Any) -> None:
    model, _ = trained
    wanted = djinn.materialize([*model.parameters()] + [parameter.grad for parameter in model.parameters()])
    gradient = model[0].weight.grad
    count, moved = trips(lambda: move(model))
    assert count == 1
    got = [*moved.parameters()] + [parameter.grad for parameter in moved.parameters()]
    assert {tensor.device.type for tensor in got} == {"cpu"}
    assert all(map(torch.equal, got, wanted))
    assert moved[0].weight.grad is gradient


def test_safetensors_and_distributed_checkpoints_take_one_round_trip(trained: Any, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model, _ = trained
    assert trips(lambda: safetensors.save_model(model, tmp_path / "model.safetensors"))[0] == 1
    assert _equal(safetensors.load_file(tmp_path / "model.safetensors"), model)
    with pytest.warns(UserWarning, match="assuming the intent is to save in a single process"):
        assert trips(lambda: dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp"))[0] == 1


def test_no_more_than_the_limit_is_on_the_way(trained: Any) -> None:
    djinn.init(server=djinn.ensure_initialized().config.server or None, prefetch_bytes=4000)
    tensors = [torch.full((256,), float(index), device=DEVICE) for index in range(12)]
    count, made = trips(lambda: [tensor.cpu() for tensor in tensors])
    assert count == 4, "three of 1,024 bytes each"
    assert [tensor[0].item() for tensor in made] == list(range(12))


def test_without_it_each_tensor_is_fetched_on_its_own() -> None:
    djinn.init(server=djinn.ensure_initialized().config.server or None, prefetch_bytes=0)
    tensors = [torch.full((2,), float(index), device=DEVICE) for index in range(5)]
    assert trips(lambda: [tensor.cpu() for tensor in tensors])[0] == 5
    assert "prefetched" not in djinn.stats()


@pytest.mark.parametrize("write", [
    lambda tensors: tensors[3].add_(1), lambda tensors: tensors[3].view(-1)[1:].zero_(),
    lambda tensors: tensors[3].data.copy_(torch.ones(2, 2)), lambda tensors: torch._foreach_mul_(tensors, 3.0),
], ids=["in place", "through a view", "from here", "all"])
def test_a_write_in_the_middle_of_a_loop_is_seen(write: Any) -> None:
    def run(device: str) -> list[torch.Tensor]:
        tensors = [torch.full((2, 2), float(index), device=device) for index in range(6)]
        made = []
        for index, tensor in enumerate(tensors):
            made.append(tensor.cpu().clone())
            if index == 1:
                write(tensors)
        return made

    assert all(map(torch.equal, run(DEVICE), run("cpu")))


@pytest.mark.parametrize("read", [torch.Tensor.item, float, lambda number: number.detach().item()],
                         ids=["item", "float", "item of a view"])
@pytest.mark.parametrize("at_rest", [True, False], ids=["at rest", "pending"])
def test_the_numbers_that_a_loop_reads_come_in_one_round_trip(read: Any, at_rest: bool) -> None:
    numbers = [torch.full((), float(index), device=DEVICE) / 2 for index in range(6)]
    if at_rest:
        djinn.synchronize()
    djinn.reset_stats()
    assert [read(number) for number in numbers] == [index / 2 for index in range(6)]
    assert djinn.stats()["round_trips"] == 1


def test_a_module_whose_constructor_reads_a_number_may_wait_to_call_pytorchs() -> None:
    class Late(torch.nn.Module):
        def __init__(self, sizes: torch.Tensor) -> None:
            self.size = sum(float(size) for size in sizes)
            super().__init__()

    assert Late(torch.arange(8.0, device=DEVICE)).size == 28


def test_a_number_that_is_written_while_a_loop_reads_others_is_seen() -> None:
    numbers = [torch.full((1,), float(index), device=DEVICE) for index in range(6)]
    made = []
    for index, number in enumerate(numbers):
        made.append(number.item())
        if index == 1:
            numbers[3].add_(1)
    assert made == [0.0, 1.0, 2.0, 4.0, 4.0, 5.0]


def test_a_lost_number_disturbs_no_others() -> None:
    numbers = [torch.full((2,), float(index), device=DEVICE)[:1] for index in range(4)]
    numbers.insert(2, numbers[0][torch.tensor([9], device=DEVICE)])
    made: list[Any] = []
    for number in numbers:
        try:
            made.append(number.item())
        except IndexError:
            made.append("raised")
    # The first wait reports the failure, and the third the value that it has cost.
    assert made == ["raised", 1.0, "raised", 2.0, 3.0]


def test_a_look_at_one_tensor_brings_only_that(trained: Any) -> None:
    model, _ = trained
    count, _ = trips(model[0].weight.cpu)
    assert (count, djinn.stats()["prefetched"]) == (1, 0)
    for _ in range(3):
        model[5].weight.cpu()
    assert djinn.stats()["prefetched"] == 0


def test_what_came_home_for_nothing_is_counted_and_not_tried_again_soon() -> None:
    tensors = [torch.full((8,), float(index), device=DEVICE) for index in range(10)]

    def first() -> None:
        for tensor in tensors:
            tensor.cpu()
            break

    djinn.reset_stats()
    for _ in range(6):
        first()
        tensors[0].add_(1)
    djinn.synchronize()
    stats = djinn.stats()
    assert stats["prefetched"] == stats["prefetched_unused"]
    assert 9 <= stats["prefetched"] <= 27, "at most three of the six times"
    assert stats["prefetched_unused_bytes"] == stats["prefetched_bytes"] == 32 * stats["prefetched"]


def test_failures_are_raised_where_eager_would_and_lost_values_disturb_no_others() -> None:
    good = [torch.full((2,), float(index), device=DEVICE) for index in range(6)]
    table, index = torch.ones(3, device=DEVICE), torch.tensor([7], device=DEVICE)
    lost = torch.nn.functional.embedding(index, table.view(3, 1))
    with pytest.raises(IndexError):
        djinn.synchronize()
    made = [tensor.cpu() for tensor in [*good[:3], *good[3:]]]
    assert [tensor[0].item() for tensor in made] == list(range(6))
    seen = []
    for tensor in [*good, lost]:
        try:
            seen.append(tensor.cpu()[0].item())
        except IndexError:
            seen.append("lost")
    assert seen == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, "lost"]


@pytest.mark.usefixtures("without_collection")
def test_tensors_live_no_longer_for_having_been_looked_at() -> None:
    def hold_none() -> int:
        tensors = [torch.ones(4, device=DEVICE) for _ in range(5)]
        for tensor in tensors:
            tensor.cpu()
        del tensors, tensor
        djinn.synchronize()
        return int(djinn.stats()["live_handles"])

    djinn.synchronize()
    before = djinn.stats()["live_handles"]
    assert hold_none() == before


def test_code_lives_no_longer_for_having_been_looked_at() -> None:
    made: dict[str, Any] = {}
    exec("def fetch(tensors):\n    for tensor in tensors:\n        tensor.cpu()\n    tensors[0].cpu()", made)
    code = weakref.ref(made["fetch"].__code__)
    djinn.reset_stats()
    made["fetch"]([torch.ones(4, device=DEVICE) for _ in range(5)])
    assert djinn.stats()["prefetched"]
    made.clear()
    gc.collect()
    assert code() is None

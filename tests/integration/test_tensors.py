"""A lazy tensor behaves as a tensor: printing, saving, copying, views, writes, data-dependent shapes."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import djinn
from djinn.errors import UnsupportedTensorError

DEVICE = torch.device("remote_accelerator:0")


def test_values_come_home_in_every_way() -> None:
    local = torch.arange(6.0).reshape(2, 3)
    remote = local.to(DEVICE)
    assert remote.tolist() == local.tolist()
    assert remote[1, 2].item() == 5.0
    assert (remote.numpy() == local.numpy()).all()
    assert bool((remote > -1).all())
    assert [row.sum().item() for row in remote] == [3.0, 12.0]
    assert f"{remote.sum():.2f}" == "15.00"
    assert int(remote.sum()) == 15
    assert len(remote) == 2
    assert 5.0 in remote
    assert torch.equal(djinn.materialize(remote), local)


def test_print_shows_values_device_and_gradient() -> None:
    x = torch.ones(2, device=DEVICE, requires_grad=True)
    assert repr(x) == "tensor([1., 1.], device='remote_accelerator:0', requires_grad=True)"
    assert repr(x * 2) == "tensor([2., 2.], device='remote_accelerator:0', grad_fn=<MulBackward0>)"
    assert repr(nn.Parameter(torch.zeros(1)).to(DEVICE)).startswith("tensor([0.]")
    assert "Parameter containing" in repr(nn.Linear(1, 1).to(DEVICE).weight)


def test_numpy_refuses_where_eager_refuses() -> None:
    with pytest.raises(RuntimeError, match="requires grad"):
        torch.ones(2, device=DEVICE, requires_grad=True).numpy()


def test_several_values_cost_one_round_trip() -> None:
    values = [torch.full((2,), float(i), device=DEVICE) for i in range(5)]
    djinn.reset_stats()
    locals_ = djinn.materialize(*values)
    assert djinn.stats()["round_trips"] == 1
    assert [value[0].item() for value in locals_] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_structures_of_values_cost_one_round_trip() -> None:
    x = torch.arange(4.0, device=DEVICE)
    outputs = {"loss": x.sum(), "logits": [x * 2, (x + 1, "text", None)], "tuple": djinn.LazyTuple((x, x - 1)),
               "local": torch.ones(1)}
    djinn.reset_stats()
    home = djinn.materialize(outputs)
    assert djinn.stats()["round_trips"] == 1
    assert type(home["loss"]) is torch.Tensor
    assert home["loss"].item() == 6
    assert home["logits"][0].tolist() == [0, 2, 4, 6]
    assert home["logits"][1][0].tolist() == [1, 2, 3, 4]
    assert home["logits"][1][1:] == ("text", None)
    assert [member.tolist() for member in home["tuple"]] == [[0, 1, 2, 3], [-1, 0, 1, 2]]
    assert home["local"] is outputs["local"]


def test_outputs_of_models_cost_one_round_trip() -> None:
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                                 intermediate_size=8)).eval()
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        expected = model(tokens)
        outputs = model.to(DEVICE)(tokens.to(DEVICE))
    djinn.reset_stats()
    home = djinn.materialize(outputs)
    assert djinn.stats()["round_trips"] == 1
    assert type(home) is type(expected)
    assert torch.equal(home.pooler_output, expected.pooler_output)


def test_the_values_of_a_tuple_cost_one_round_trip() -> None:
    several = djinn.LazyTuple(torch.full((2,), float(i), device=DEVICE) for i in range(3))
    djinn.reset_stats()
    assert several.tolist() == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    assert djinn.stats()["round_trips"] == 1


def test_metadata_never_travels() -> None:
    x = torch.randn(3, 4, device=DEVICE)
    djinn.reset_stats()
    y = (x @ x.t()).softmax(-1)[:, 1:].unsqueeze(0)
    assert (y.shape, y.dtype, y.dim(), y.stride(), y.is_contiguous(), y.numel()) == (
        (1, 3, 2), torch.float32, 3, (9, 3, 1), False, 6)
    assert djinn.stats()["round_trips"] == 0


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_saved_checkpoint_has_every_weight(tmp_path: Path, weights_only: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    remote = copy.deepcopy(model).to(DEVICE)
    torch.save(remote.state_dict(), tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=weights_only)
    assert all(type(value) is torch.Tensor and value.device.type == "cpu" for value in loaded.values())
    fresh = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    fresh.load_state_dict(loaded)
    for name, value in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value), name
    remote.load_state_dict(loaded)
    assert torch.equal(remote[0].weight.cpu(), model[0].weight)


def test_an_optimizer_checkpoint_has_its_state() -> None:
    model = nn.Linear(2, 2).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2, device=DEVICE)).sum().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    state = torch.load(file)["state"][0]
    assert torch.equal(state["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"].cpu())
    assert state["exp_avg"].abs().sum() > 0


def test_pickle_and_copies() -> None:
    x = torch.randn(3, device=DEVICE, requires_grad=True)
    loaded = pickle.loads(pickle.dumps(x))
    assert torch.equal(loaded, x.detach().cpu())
    assert loaded.requires_grad
    model = nn.Linear(2, 2).to(DEVICE)
    model.weight.label = "kept"
    twin = copy.deepcopy(model)
    assert not hasattr(twin.weight, "label"), "as in eager"
    assert isinstance(twin.weight, nn.Parameter)
    with torch.no_grad():
        twin.weight.zero_()
    assert model.weight.abs().sum().item() > 0
    tied = nn.ModuleList([model, nn.Linear(2, 2)])
    tied[1].weight = model.weight
    twins = copy.deepcopy(tied)
    assert twins[0].weight is twins[1].weight


def test_deepcopy_refuses_what_eager_refuses() -> None:
    x = torch.ones(1, device=DEVICE, requires_grad=True)
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(x * 2)


def _alias_program(device: str) -> torch.Tensor:
    x = torch.arange(12.0, device=device).reshape(3, 4)
    view, row, column = x.t(), x[1], x[:, 2]
    row.add_(100)
    column.mul_(view[2] + 1)
    y = x.clone()
    x[0] = row
    view.unsqueeze_(0)
    x.resize_(2, 4)
    z = torch.empty(0, device=device)
    torch.add(y, 1, out=z)
    return torch.cat([x.flatten(), view.flatten(), row, column, z.flatten()])


def test_views_and_in_place_writes_alias_as_in_eager() -> None:
    assert torch.equal(_alias_program("remote_accelerator").cpu(), _alias_program("cpu"))


@pytest.mark.parametrize("read", [
    lambda x: torch.kron(x, torch.ones_like(x)),
    lambda x: torch.ops.aten._unsafe_view(x, (3, 2)) * 2,
    lambda x: torch.unsafe_chunk(x, 2)[1] * 2,
    lambda x: torch.unsafe_split_with_sizes(x, (1, 1))[1] * 2,
    lambda x: torch.ops.aten.lift(x) * 2,
], ids=["kron", "_unsafe_view", "unsafe_chunk", "unsafe_split_with_sizes", "lift"])
def test_a_write_waits_for_readers_of_views_that_are_not_declared(
    read: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    local = torch.arange(6.0).reshape(2, 3)
    try:
        djinn.init(flush_every=None)
        remote = local.to(DEVICE)
        made = read(remote)
        remote.neg_()
        assert torch.equal(remote.cpu(), -local), "which is brought home first"
        assert torch.equal(made.cpu(), read(local))
    finally:
        djinn.init()


@pytest.mark.parametrize("operation", [
    torch.nonzero,
    torch.unique,
    lambda x: x[x > 1],
    lambda x: torch.masked_select(x, x > 1),
    lambda x: torch.where(x > 1)[0],
    lambda x: torch.repeat_interleave(torch.tensor([1, 2, 3]).to(x.device)),
    lambda x: torch.bincount(x.long().flatten()),
], ids=["nonzero", "unique", "boolean_index", "masked_select", "where", "repeat_interleave", "bincount"])
def test_data_dependent_shapes_bring_only_the_shape_home(operation: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.tensor([[0.0, 1.0, 2.0], [3.0, 2.0, 0.0]])
    remote = x.to(DEVICE)
    remote.sum().item()
    result = operation(remote)
    expected = operation(x)
    assert isinstance(result, djinn.LazyTensor)
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(result.cpu(), expected)


def test_setting_data_half_and_swapping() -> None:
    model = nn.Linear(2, 3).to(DEVICE)
    weight = model.weight.detach().cpu()
    model.half()
    assert model.weight.dtype == torch.float16
    assert torch.equal(model.weight.detach().cpu(), weight.half())
    model.float()
    model.weight.data = torch.ones(3, 2, device=DEVICE)
    assert model.weight.sum().item() == 6.0
    model.to("cpu")
    assert type(model.weight.data) is torch.Tensor
    assert model(torch.ones(1, 2)).shape == (1, 3)


def test_moving_a_module_keeps_identities_both_ways() -> None:
    model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    model[1].weight = model[0].weight
    weight, values = model[0].weight, model[0].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with djinn.capture():
        model[0](torch.ones(1, 2)).sum().item()
    model.to(DEVICE)
    assert model[0].weight is weight
    assert model[1].weight is weight
    assert isinstance(weight, djinn.LazyTensor)
    assert isinstance(weight, nn.Parameter)
    assert not hasattr(weight, "__tensor_flatten__")
    model[0](torch.ones(1, 2, device=DEVICE)).sum().backward()
    optimizer.step()
    assert torch.equal(weight.detach().cpu(), values - 1)
    model.cpu()
    assert model[0].weight is weight
    assert model[1].weight is weight
    assert type(weight) is nn.Parameter
    assert weight.requires_grad
    assert torch.equal(weight.detach(), values - 1)
    assert torch.equal(weight.grad, torch.ones(2, 2))
    model.to(DEVICE)
    assert torch.equal(weight.grad.cpu(), torch.ones(2, 2))


def test_there_is_no_memory_to_point_at() -> None:
    x = torch.ones(2, device=DEVICE)
    assert x.data_ptr() >= 1 << 64
    with pytest.raises(NotImplementedError, match="no memory"):
        torch.from_dlpack(x)


def test_dlpack_is_refused_as_its_protocol_says_and_gives_copies_on_the_cpu() -> None:
    x = torch.arange(3.0, device=DEVICE)
    for refused in (lambda: torch.from_dlpack(x), lambda: np.from_dlpack(x), x.__dlpack__,
                    lambda: x.__dlpack__(dl_device=(1, 0), copy=False)):
        with pytest.raises(BufferError, match="no memory"):
            refused()
    for loses in (torch.ones(2, device=DEVICE, requires_grad=True), torch.ones(2, device=DEVICE) * 1j):
        with pytest.raises(BufferError) as wanted:
            loses.cpu().conj().__dlpack__()
        with pytest.raises(BufferError, match=re.escape(str(wanted.value))):
            loses.conj().__dlpack__()
        with pytest.raises(BufferError, match=re.escape(str(wanted.value))):
            loses.conj().__dlpack__(dl_device=(1, 0))
    assert x.__dlpack_device__() == (torch.utils.dlpack.DLDeviceType.kDLExtDev, 0)
    copied = np.from_dlpack(x, device="cpu")
    assert copied.tolist() == [0, 1, 2]
    x.add_(1)
    assert copied.tolist() == [0, 1, 2]
    torch.from_dlpack(x.__dlpack__(dl_device=(1, 0))).zero_()
    assert x.tolist() == [1, 2, 3]


def test_a_capsule_without_data_makes_tensors_that_are_refused() -> None:
    capsule = partial(torch.utils.dlpack.to_dlpack, torch.arange(3.0, device=DEVICE))
    for used in (lambda: torch.asarray(capsule(), copy=True), lambda: torch.asarray(capsule()).add(1),
                 lambda: torch.from_dlpack(capsule()).tolist(), lambda: torch.from_dlpack(capsule()).cpu(),
                 lambda: torch.ones(3, device=DEVICE).mul_(torch.from_dlpack(capsule()))):
        with pytest.raises(UnsupportedTensorError, match="DLPack"):
            used()


def test_tensor_constructors() -> None:
    assert torch.tensor([[1, 2], [3, 4]], device=DEVICE).tolist() == [[1, 2], [3, 4]]
    assert torch.as_tensor([1.5], device=DEVICE).tolist() == [1.5]
    assert torch.tensor(3, device=DEVICE).item() == 3
    assert torch.arange(2, 8, 2, device=DEVICE).tolist() == [2, 4, 6]
    assert torch.eye(2, device=DEVICE).tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert torch.linspace(0, 1, 3, device=DEVICE).tolist() == [0.0, 0.5, 1.0]
    assert sorted(torch.randperm(5, device=DEVICE).tolist()) == [0, 1, 2, 3, 4]
    assert torch.zeros_like(torch.ones(2, device=DEVICE)).tolist() == [0.0, 0.0]
    with torch.device(DEVICE):
        assert isinstance(nn.Linear(2, 2).weight, djinn.LazyTensor)
    with pytest.raises(RuntimeError, match="does not exist"):
        torch.ones(1, device="remote_accelerator:7")


def test_random_numbers_equal_eager() -> None:
    torch.manual_seed(5)
    expected = [torch.randn(3), torch.rand(2), torch.nn.functional.dropout(torch.ones(8), 0.5), torch.randperm(6)]
    after = torch.randn(2)
    torch.manual_seed(5)
    remote = [torch.randn(3, device=DEVICE), torch.rand(2, device=DEVICE),
              torch.nn.functional.dropout(torch.ones(8, device=DEVICE), 0.5), torch.randperm(6, device=DEVICE)]
    assert all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(remote, expected, strict=True))
    state = torch.remote_accelerator.get_rng_state()
    assert torch.equal(torch.randn(2, device=DEVICE).cpu(), after)
    torch.remote_accelerator.set_rng_state(state)
    assert torch.equal(torch.randn(2, device=DEVICE).cpu(), after)


def test_dead_random_draws_still_count() -> None:
    torch.manual_seed(9)
    torch.randn(3)
    expected = torch.randn(3)
    torch.manual_seed(9)
    torch.randn(3, device=DEVICE)
    assert torch.equal(torch.randn(3, device=DEVICE).cpu(), expected)


@pytest.mark.usefixtures("without_collection")
def test_handles_return_to_where_they_were() -> None:
    torch.ones(1, device=DEVICE).item()
    djinn.synchronize()
    before = djinn.stats()["live_handles"]
    x = torch.randn(4, 4, device=DEVICE)
    for _ in range(50):
        x = (x @ x).tanh()
        x.sum().item()
    del x
    djinn.synchronize()
    assert djinn.stats()["live_handles"] == before


def test_ordinary_tensors_mix_and_strict_mode_refuses() -> None:
    x, y = torch.ones(3), torch.full((3,), 2.0, device=DEVICE)
    assert (x + y).tolist() == [3.0, 3.0, 3.0]
    x.add_(1)
    assert (y + x).tolist() == [4.0, 4.0, 4.0]
    x.copy_(y)
    assert x.tolist() == [2.0, 2.0, 2.0]
    assert (y * torch.tensor(3.0)).tolist() == [6.0, 6.0, 6.0]
    try:
        djinn.init(strict=True)
        y = torch.ones(3, device=DEVICE)
        with pytest.raises(RuntimeError, match="same device"):
            x + y
        assert (y * torch.tensor(3.0)).tolist() == [3.0, 3.0, 3.0]
    finally:
        djinn.init()


def test_a_captured_model_may_stay_local() -> None:
    model = nn.Linear(4, 2)
    with djinn.capture(model) as captured:
        assert djinn.is_capturing()
        x = torch.ones(3, 4)
        with torch.no_grad():
            y = model(x)
    assert not djinn.is_capturing()
    assert isinstance(x, djinn.LazyTensor)
    assert isinstance(y, djinn.LazyTensor)
    assert [node.operation for node in captured.graph.nodes()] == ["aten::ones", "aten::linear"]
    torch.testing.assert_close(y.cpu(), model(torch.ones(3, 4)).detach())
    assert type(torch.ones(1)) is torch.Tensor


def test_deep_graphs_need_no_recursion() -> None:
    try:
        djinn.init(flush_every=None)
        x = torch.zeros((), device=DEVICE)
        for _ in range(20_000):
            x = x + 1
        assert djinn.stats()["pending_nodes"] == 20_001
        assert x.item() == 20_000
    finally:
        djinn.init()


def test_only_what_is_needed_runs() -> None:
    try:
        djinn.init(flush_every=None)
        a, b = torch.ones(2, device=DEVICE), torch.ones(2, device=DEVICE)
        view = a[:1]
        c = b * 3
        view.add_(5)
        assert a.tolist() == [6.0, 1.0]
        assert djinn.stats()["pending_nodes"] == 2
        del c
        assert b.tolist() == [1.0, 1.0]
        assert "nothing is pending" in djinn.explain(a)
        first, second = a.split(1)
        a.mul_(2)
        torch._foreach_add_([second], 1.0)
        assert (first.tolist(), second.tolist()) == ([12.0], [3.0])
    finally:
        djinn.init()


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_losses_have_the_layout_of_eager(reduction: str) -> None:
    prediction, target = torch.arange(6.0).reshape(2, 3).T, torch.ones(3, 2)
    for loss in (nn.functional.mse_loss, nn.functional.smooth_l1_loss):
        local = loss(prediction, target, reduction=reduction)
        remote = loss(prediction.to(DEVICE), target.to(DEVICE), reduction=reduction)
        assert remote.stride() == local.stride()
        assert torch.equal(remote.cpu(), local)

"""``module.cpu()`` while something still refers to the parameters, and parameters made by the class of others."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from support.recording.eager import DEVICE
from torch import nn

from djinn import LazyTensor


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).eval()


X = torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.25, -0.75]])


@pytest.fixture
def moved() -> tuple[nn.Module, torch.Tensor]:
    """A module on the CPU, and a result that was computed when it was on the device."""
    model = _model().to(DEVICE)
    before = model[0].weight, model(X.to(DEVICE))  # type: ignore[index]  # it is a Sequential
    model.cpu()
    assert before[0] is model[0].weight, "optimizers must see the parameter move"  # type: ignore[index]  # as above
    return model, before[1]


def test_the_module_works_on_the_cpu_while_the_graph_lives(moved: tuple[nn.Module, torch.Tensor]) -> None:
    model, result = moved
    assert torch.equal(model(X), result.cpu())
    weight: Any = model[0].weight  # type: ignore[index]  # it is a Sequential
    assert (weight.device.type, weight.is_leaf, weight.requires_grad) == ("cpu", True, True)
    assert isinstance(weight, nn.Parameter)
    assert not isinstance(weight, LazyTensor)
    assert weight.detach().numpy().tolist() == weight.tolist() == _model()[0].weight.tolist()  # type: ignore[index]  # as above
    assert weight.data_ptr() == weight.detach().data_ptr()


def test_it_trains_on_as_a_module_that_never_left(moved: tuple[nn.Module, torch.Tensor]) -> None:
    def trained(model: nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(X).square().sum().backward()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    for here, there in zip(trained(moved[0]), trained(_model()), strict=True):
        assert torch.equal(here, there)


def test_a_backward_pass_of_the_old_graph_still_gives_gradients(moved: tuple[nn.Module, torch.Tensor]) -> None:
    model, result = moved
    result.sum().backward()
    want = _model()
    want(X).sum().backward()
    for here, there in zip(model.parameters(), want.parameters(), strict=True):
        assert here.grad is not None
        assert there.grad is not None
        torch.testing.assert_close(here.grad.cpu(), there.grad)


def test_copies_and_files_hold_ordinary_parameters(moved: tuple[nn.Module, torch.Tensor]) -> None:
    model, _ = moved
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for made in (copy.deepcopy(model), torch.load(file, weights_only=False), pickle.loads(pickle.dumps(model))):
        assert {type(parameter) for parameter in made.parameters()} == {nn.Parameter}
        assert torch.equal(made(X), model(X))


def test_writes_views_and_resizing_are_those_of_an_ordinary_tensor(moved: tuple[nn.Module, torch.Tensor]) -> None:
    weight: Any = moved[0][0].weight  # type: ignore[index]  # it is a Sequential
    with torch.no_grad():
        assert weight.zero_() is weight
        view = weight.view(-1)
        view.add_(2)
        assert weight.sum() == 24
        weight.t_()
        assert weight.shape == (3, 4)
        weight.t_()
        weight[0] = 1
    assert weight.tolist() == [[1.0] * 3] + [[2.0] * 3] * 3
    assert "Parameter containing" in repr(weight)


def test_it_goes_back_to_the_device(moved: tuple[nn.Module, torch.Tensor]) -> None:
    model, result = moved
    weight = model[0].weight  # type: ignore[index]  # it is a Sequential
    model.to(DEVICE)
    assert model[0].weight is weight  # type: ignore[index]  # as above
    assert isinstance(weight, LazyTensor)
    assert torch.equal(model(X.to(DEVICE)).cpu(), result.cpu())
    del result, moved
    assert torch.equal(model.cpu()(X), _model()(X))


def test_it_mixes_with_remote_tensors_as_ordinary_ones_do(moved: tuple[nn.Module, torch.Tensor]) -> None:
    weight: Any = moved[0][0].weight  # type: ignore[index]  # it is a Sequential
    with torch.no_grad():
        product = X.to(DEVICE) @ weight.t()
    assert isinstance(product, LazyTensor)
    torch.testing.assert_close(product.cpu(), X @ weight.detach().t())


@pytest.mark.parametrize("is_viewed", [False, True])
def test_attributes_of_parameters_stay_when_a_module_moves(is_viewed: bool) -> None:
    model = _model()
    weight: Any = model[0].weight  # type: ignore[index]  # it is a Sequential
    view = weight[0] if is_viewed else None
    weight.no_weight_decay, weight.group = True, {"rate": 0.1}
    model(X).sum().backward()
    for device in (DEVICE, "cpu"):
        model.to(device)
        assert (weight.no_weight_decay, weight.group, weight.device.type) == (
            True, {"rate": 0.1}, torch.device(device).type)
    assert set(vars(weight)) == {"no_weight_decay", "group"}
    assert not vars(weight.grad)
    del view


@pytest.mark.parametrize("where", [DEVICE, "cpu", "meta"])
def test_the_class_of_a_parameter_makes_parameters_of_any_device(where: Any) -> None:
    parameter: Any = nn.Linear(2, 2).to(DEVICE).weight
    for needs_gradient in (False, True):
        made = type(parameter)(torch.ones(2, device=where), requires_grad=needs_gradient)
        assert isinstance(made, nn.Parameter)
        assert (made.device, made.requires_grad) == (torch.device(where), needs_gradient)
    assert type(parameter)(torch.ones(2, device=where)).requires_grad
    # accelerate and PEFT make empty parameters in this way, and other libraries quantized ones.
    torch.multiprocessing.reductions.StorageWeakRef(parameter.untyped_storage())
    made = type(parameter)(torch.ones(2, device=where), **vars(parameter), requires_grad=False)
    assert (made.device, made.requires_grad) == (torch.device(where), False)

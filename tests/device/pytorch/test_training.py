"""Parts of training for which PyTorch looks at the type of a device, or of a tensor."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.recording.eager import assert_same, programs
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim.optimizer import _default_to_fused_or_foreach

from djinn import LazyTensor
from djinn.session import runtime
from djinn_plugins.device.interceptor import optimizers


def statistics_of_dropped_results(device: str) -> Any:
    """Nobody keeps the results, but the running statistics are written."""
    norm = nn.BatchNorm1d(3, momentum=None).to(device)
    for scale in (1.0, 2.0):
        norm((torch.arange(12.0).reshape(4, 3) * scale).to(device))
    return norm.state_dict()


def averaged_with_statistics(device: str) -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).to(device)
    averaged = torch.optim.swa_utils.AveragedModel(model, avg_fn=torch.optim.swa_utils.get_ema_avg_fn(0.9))
    data = [torch.arange(8.0).reshape(4, 2).to(device)] * 2
    torch.optim.swa_utils.update_bn(data, averaged, torch.device(device))
    return averaged.state_dict()


def lazy_modules(device: str) -> Any:
    model = nn.Sequential(nn.LazyConv1d(4, 2), nn.LazyBatchNorm1d(), nn.Flatten(), nn.LazyLinear(3)).to(device)
    torch.manual_seed(2)
    result = model(torch.arange(24.0).reshape(2, 3, 4).to(device))
    result.sum().backward()
    return result, model.state_dict(), [parameter.grad for parameter in model.parameters()]


def lazy_modules_are_copied(device: str) -> Any:
    model = nn.LazyLinear(3).to(device)
    other = copy.deepcopy(model)
    torch.manual_seed(2)
    return model(torch.ones(2, 4).to(device)), other(torch.ones(2, 5).to(device)), list(other.parameters())


def lazy_modules_are_loaded(device: str) -> Any:
    torch.manual_seed(3)
    state = nn.Linear(4, 3).to(device).state_dict()
    model = nn.LazyLinear(3).to(device).to(torch.float64)
    model.load_state_dict(state)
    return list(model.parameters())


def lazy_modules_come_home(device: str) -> Any:
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()).to(device).cpu()
    torch.manual_seed(2)
    return model(torch.ones(2, 4)), list(model.parameters())


def attention_within_functions(device: str) -> Any:
    torch.manual_seed(4)
    layer = nn.MultiheadAttention(4, 2).to(device)
    x = (torch.arange(24.0).reshape(3, 2, 4) / 24).to(device).requires_grad_()
    result, _ = layer(x, x, x, need_weights=False)
    return result, torch.autograd.grad(result.sum(), x)


def backward_of_activations(device: str) -> Any:
    x = (torch.arange(12.0) / 5).to(device).requires_grad_()
    return [torch.autograd.grad(function(x).sum(), x) for function in (nn.functional.silu, nn.functional.mish)]


def recurrent(kind: Any, grads: bool, device: str) -> Any:
    torch.manual_seed(5)
    layer = kind(3, 4, 2, bidirectional=True, dropout=0.5).to(device)
    x = (torch.arange(30.0).reshape(5, 2, 3) / 30).to(device)
    torch.manual_seed(6)  # on the CPU the layer's initial values have been drawn from the same stream
    with torch.set_grad_enabled(grads):
        result, state = layer(x)
    return (result, state, torch.autograd.grad(result.sum(), list(layer.parameters()))) if grads else (result, state)


@programs(
    statistics_of_dropped_results, averaged_with_statistics, lazy_modules, lazy_modules_are_copied,
    lazy_modules_are_loaded, lazy_modules_come_home, attention_within_functions, backward_of_activations,
)
def test_equals_eager(program: Any) -> None:
    assert_same(program)


@pytest.mark.parametrize("grads", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN], ids=lambda kind: kind.__name__)
def test_recurrent_layers_equal_eager(kind: Any, grads: bool) -> None:
    assert_same(lambda device: recurrent(kind, grads, device))


def test_lazy_module_on_the_device_is_uninitialized() -> None:
    norm = nn.LazyBatchNorm1d().to("remote_accelerator:0")
    assert isinstance(norm.weight, UninitializedParameter)
    assert isinstance(norm.running_mean, UninitializedBuffer)
    with pytest.raises(RuntimeError, match="uninitialized"):
        _ = norm.weight.shape
    norm(torch.ones(2, 3, device="remote_accelerator:0"))
    assert type(norm.weight) is LazyTensor


@pytest.mark.parametrize(("device", "foreach"), [("cpu", False), ("cuda:0", True)])
def test_optimizers_choose_as_on_the_executors_device(device: str, foreach: bool) -> None:
    parameters = [nn.Parameter(torch.ones(2, device="remote_accelerator:0"))]
    try:
        optimizers.follow(device)
        assert _default_to_fused_or_foreach(parameters, differentiable=False) == (False, foreach)
    finally:
        optimizers.follow(runtime.current().backend.welcome.device)

"""Quantization-aware training and products of scaled matrices, as PyTorch's own modules have them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.recording.eager import Program, assert_same, outcome, programs
from torch import nn
from torch.ao.quantization import (
    DeQuantStub,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    QuantStub,
    fake_quantize,
    fuse_modules_qat,
    get_default_qat_qconfig,
    prepare_qat,
)
from torch.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*:DeprecationWarning")


def _x(device: str, *size: int) -> torch.Tensor:
    return torch.linspace(-1, 2, torch.Size(size).numel()).sin().reshape(size).to(device).requires_grad_()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.conv, self.norm, self.relu = QuantStub(), nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU()
        self.linear, self.back = nn.Linear(12, 2), DeQuantStub()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.relu(self.norm(self.conv(self.quant(x))))
        return self.back(self.linear(hidden.flatten(1)))  # type: ignore[no-any-return]  # modules are untyped


def trained(device: str, *, engine: str) -> Any:
    model = Net().train()
    model.qconfig = get_default_qat_qconfig(engine)  # type: ignore[assignment]  # as PyTorch's own documents do
    model = prepare_qat(fuse_modules_qat(model, [["conv", "norm", "relu"]])).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(_x(device, 2, 2, 4, 4)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, model.eval()(_x(device, 2, 2, 4, 4)), dict(model.state_dict())


def fake_quantized(device: str, *, name: str) -> Any:
    module = getattr(fake_quantize, name)().to(device)
    x = _x(device, 4, 5)
    results = module(x), module(x * 2)
    results[0].sum().backward()
    return results, x.grad, dict(module.state_dict())


def learned(device: str, *, channels: int) -> Any:
    observer = MovingAveragePerChannelMinMaxObserver if channels > 0 else MovingAverageMinMaxObserver
    module = _LearnableFakeQuantize(observer, 0, 255, scale=0.1, zero_point=1.0, channel_len=channels,
                                    use_grad_scaling=True, dtype=torch.quint8).to(device)
    results = []
    for enable in (module.enable_static_estimate, module.enable_param_learning):
        enable()
        x = _x(device, 4, 5)
        made = module(x)
        made.sum().backward()
        results += [made, x.grad]
    return results, dict(module.state_dict()), [parameter.grad for parameter in module.parameters()]


def scaled_products(device: str) -> Any:
    left, right = (_x("cpu", 16, 32).detach().to(torch.float8_e4m3fn).to(device) for _ in range(2))
    kinds = F.ScalingType  # type: ignore[attr-defined]  # PyTorch has it and does not declare it
    return [F.scaled_mm(left, right.t(), torch.full(rows, 0.5, device=device), kind,  # type: ignore[attr-defined]
                        torch.full(columns, 0.25, device=device), kind, output_dtype=torch.bfloat16)
            for kind, rows, columns in ((kinds.TensorWise, (), ()), (kinds.RowWise, (16, 1), (1, 16)))]


def misfits(device: str) -> Any:
    two, matrix = torch.ones(2, device=device), torch.ones(2, 3, device=device)
    whole = torch.zeros(2, dtype=torch.int32, device=device)
    on = torch.ones(1, dtype=torch.int64, device=device)
    calls = (lambda: torch.fake_quantize_per_tensor_affine(matrix, two, whole, 0, 255),
             lambda: torch.fused_moving_avg_obs_fake_quant(matrix, on, on, two, two, two, whole, 0.01, 0, 255, 1, True))
    return [outcome(lambda call=call: call().tolist()).partition(":")[0] for call in calls]  # type: ignore[misc]  # ditto


@programs(
    *(functools.partial(trained, engine=engine) for engine in ("fbgemm", "qnnpack")),
    *(functools.partial(fake_quantized, name=name) for name in (
        "FakeQuantize", "FusedMovingAvgObsFakeQuantize", "default_fused_per_channel_wt_fake_quant",
        "default_per_channel_weight_fake_quant", "default_dynamic_fake_quant")),
    *(functools.partial(learned, channels=channels) for channels in (-1, 4)), scaled_products, misfits,
)
def test_quantization_equals_eager(program: Program) -> None:
    assert_same(program)

"""Operators that a program defines in Python: a server that does not know them runs what they consist of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.recording.eager import DEVICE, assert_same, outcome

import djinn


@torch.library.custom_op("test_custom_operators::scaled_sine", mutates_args=())
def scaled_sine(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.sin(x) * factor


@scaled_sine.register_fake
def _(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.factor = inputs[1]


scaled_sine.register_autograd(lambda ctx, grad: (grad * ctx.saved_tensors[0].cos() * ctx.factor, None),
                              setup_context=_keep)


@torch.library.custom_op("test_custom_operators::fill", mutates_args={"x"}, device_types=("cpu", "cuda"))
def fill(x: torch.Tensor, value: float) -> None:
    x.copy_(torch.full_like(x, value))


@torch.library.custom_op("test_custom_operators::numpy_sum", mutates_args=())
def numpy_sum(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.asarray(x.cpu().numpy() + other.cpu().numpy())).to(x.device)


@torch.library.custom_op("test_custom_operators::refuse", mutates_args=())
def refuse(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("not today")


def program(device: str) -> Any:
    x = torch.linspace(0, 1, 4, device=device).requires_grad_()
    pending = x.detach() + 1
    y = scaled_sine(x, 2.0)
    y.sum().backward()
    written = torch.ones(3, device=device)
    fill(written[1:], 5.0)
    return x, x.grad, pending, y, written, numpy_sum(pending, torch.ones(4)), outcome(lambda: refuse(pending))


def test_operators_defined_in_python_give_what_eager_gives() -> None:
    assert_same(program)


def test_kernels_for_cuda_that_are_written_in_python_run_here() -> None:
    with torch.library._scoped_library("test_custom_kernels", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.define("fill(Tensor(a!) x, float value) -> ()")
        library.impl("twice", lambda x: x * 2, "CUDA")
        library.impl("fill", lambda x, value: x.copy_(torch.full_like(x, value)) and None, "CUDA")
        x = torch.ones(2, device=DEVICE)
        torch.ops.test_custom_kernels.fill(x[1:], 5.0)
        assert torch.ops.test_custom_kernels.twice(x).tolist() == [2.0, 10.0]


def test_an_executor_in_this_process_needs_no_kernel_for_the_cpu(in_process: None) -> None:
    @torch.library.custom_op("test_custom_kernels::thrice", mutates_args=(), device_types="cuda")
    def thrice(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    assert thrice(torch.ones(2, device=DEVICE)).tolist() == [3.0, 3.0]
    assert scaled_sine(torch.zeros(2, device=DEVICE), 2.0).tolist() == [0.0, 0.0]


def test_only_the_first_call_asks_the_server() -> None:
    x = torch.ones(2, device=DEVICE)
    scaled_sine(x, 2.0)
    djinn.reset_stats()
    for _ in range(3):
        x = scaled_sine(x, 2.0)
    assert djinn.stats()["round_trips"] == 0
    assert x.tolist() == pytest.approx(scaled_sine(scaled_sine(scaled_sine(torch.ones(2), 2.0), 2.0), 2.0).tolist())

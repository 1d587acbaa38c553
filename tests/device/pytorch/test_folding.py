"""Products of many matrices with one round as local ones do, also where PyTorch looks whether a gradient is wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

REMOTE = "remote_accelerator:0"
PRODUCTS: dict[str, Callable[..., Any]] = {
    "linear": F.linear,
    "linear without bias": lambda x, w, b: F.linear(x, w),
    "linear, other strides": lambda x, w, b: F.linear(x.transpose(0, 1), w, b),
    "linear without bias, other strides": lambda x, w, b: F.linear(x.transpose(0, 1), w),
    "matmul": lambda x, w, b: x @ w.t(),
    "matmul, other strides": lambda x, w, b: x.transpose(0, 1) @ w.t(),
    "matmul, other strides, plain weight": lambda x, w, b: torch.matmul(x.transpose(0, 1), w[:16]),
    "matmul from the left": lambda x, w, b: torch.matmul(w, x.transpose(1, 2)),
    "linear without bias, of one row": lambda x, w, b: F.linear(x[:1, -1:], w),
    "matmul, of one row": lambda x, w, b: x[:1, 2:3] @ w.t(),
    "matmul of a vector": lambda x, w, b: torch.matmul(x.transpose(0, 1), w[0]),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_round_as_local_ones(name: str, mode: Callable[[], Any], requires_grad: bool) -> None:
    torch.manual_seed(0)
    x, w, b = torch.randn(2, 7, 16), torch.randn(48, 16), torch.randn(48)
    remote = [tensor.to(REMOTE) for tensor in (x, w, b)]
    # First with the other answer: what is remembered of a call must not depend on it.
    for wanted in (not requires_grad, requires_grad, requires_grad):
        for tensor in (w, b, *remote[1:]):
            tensor.requires_grad_(wanted)
        with mode():
            assert torch.equal(PRODUCTS[name](*remote).cpu(), PRODUCTS[name](x, w, b))


@pytest.mark.parametrize("needs", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("sizes", [((2, 3, 8), (1, 8, 5)), ((1, 3, 8), (2, 8, 5)), ((1, 1, 8), (2, 8, 1))], ids=str)
def test_a_batch_times_one_matrix_rounds_as_local_ones(sizes: Any, mode: Callable[[], Any], needs: Any) -> None:
    torch.manual_seed(0)
    for swap in (False, True):
        local = [torch.randn(size) for size in sizes]
        if swap:
            local[1] = local[1].mT.contiguous().mT
        remote = [tensor.to(REMOTE) for tensor in local]
        for tensor, other, wanted in zip(local, remote, needs, strict=True):
            tensor.requires_grad_(wanted)
            other.requires_grad_(wanted)
        with mode():
            made, expected = torch.matmul(*remote), torch.matmul(*local)
        assert torch.equal(made.cpu(), expected)
        assert made.stride() == expected.stride()
        if expected.requires_grad:
            for result in (made, expected):
                (result * result.detach().cos()).sum().backward()
            for tensor, other in zip(local, remote, strict=True):
                assert tensor.grad is None or torch.equal(other.grad.cpu(), tensor.grad)

"""``out=`` of composites whose parts PyTorch writes in another way if a tensor has no storage, or is of a subclass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.recording.eager import Program, assert_same, outcome, programs

SIZES = [((1, 2, 2), (2, 3)), ((2, 2, 3), (3,)), ((0, 1, 3), (3, 2)), ((0, 2, 3), (3, 2)), ((2, 1, 2, 3), (2, 3, 2)),
         ((3,), (2, 3, 2)), ((2, 3), (3, 2))]


def _numbers(device: str, *size: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(size).numel()), device=device).sin().reshape(size)


def products(device: str) -> Any:
    results = []
    for first, second in SIZES:
        operands = _numbers(device, *first), _numbers(device, *second)
        size = torch.matmul(*operands).shape
        for multiply in (torch.matmul, torch.linalg.matmul, torch.ops.aten.matmul.out):
            apart = torch.full((*size, 2), 7.0, device=device)
            results += [multiply(*operands, out=torch.full(size, 7.0, device=device)),
                        multiply(*operands, out=torch.empty(0, device=device)),
                        multiply(*operands, out=apart[..., 0]), apart]
    return results


def ranks(device: str) -> Any:
    matrices = torch.stack([_numbers(device, 3, 3), torch.eye(3, device=device)])
    out = [torch.full((2,), 7, device=device) for _ in range(3)]
    tolerance = torch.tensor([0.5, 2.0], device=device)
    torch.linalg.matrix_rank(matrices, atol=0.1, out=out[0])
    torch.linalg.matrix_rank(matrices, atol=tolerance, rtol=tolerance, out=out[1])
    torch.linalg.matrix_rank(matrices, 0.1, hermitian=True, out=out[2])
    return out, torch.linalg.matrix_rank(matrices.requires_grad_(), out=torch.full((2,), 7, device=device))


def misfits(device: str) -> Any:
    x, w = _numbers(device, 2, 2, 3), _numbers(device, 3, 2)
    out = torch.empty(2, 2, 2, device=device)
    return (outcome(lambda: torch.matmul(x.clone().requires_grad_(), w, out=out)),
            outcome(lambda: torch.matmul(x, w, out=out.double())), outcome(lambda: torch.matmul(x, x, out=out.clone())))


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@programs(products, ranks, misfits)
def test_destinations_are_written_as_eager_writes_them(program: Program, mode: Any) -> None:
    with mode():
        assert_same(program)

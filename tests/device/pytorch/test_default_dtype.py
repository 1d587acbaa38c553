"""PyTorch's default dtype is that of the moment in which an operation is written down, on both sides."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import djinn

REMOTE = "remote_accelerator:0"
CALLS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda numbers: numbers / 2,
    lambda numbers: numbers * 1.5,
    lambda numbers: numbers.sqrt(),
    lambda numbers: torch.where(numbers > 0, 1.5, 2.5),
    lambda numbers: torch.nn.functional.one_hot(numbers) / 3,
    lambda numbers: numbers.float() / 2,
    lambda numbers: numbers.double() + 1.5,
]


@pytest.fixture(autouse=True)
def default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.fixture(params=["in_process", "tcp"])
def numbers(request: pytest.FixtureRequest) -> Iterator[torch.Tensor]:
    djinn.init(server=request.getfixturevalue("server").address if request.param == "tcp" else "", flush_every=None)
    yield torch.arange(4, device=REMOTE)
    djinn.shutdown()


@pytest.mark.parametrize("call", CALLS, ids=map(str, range(len(CALLS))))
def test_results_depend_on_it_as_eager_ones_do(numbers: torch.Tensor, call: Callable[..., torch.Tensor]) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        wanted, got = call(torch.arange(4)), call(numbers)
        assert got.dtype == wanted.dtype
        # What is handed over later is computed as it was written down.
        torch.set_default_dtype(torch.float32)
        assert torch.equal(got.cpu(), wanted)
        assert torch.get_default_dtype() == torch.float32

"""Kernels that do not compare their operands: what does not fit is refused, over the wire, and the rest is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import djinn
from djinn_plugins.common.calls.checked import checked_call
from djinn_plugins.guard.kernels import RULES

DEVICE = torch.device("remote_accelerator:0")
aten = torch.ops.aten
Make = Callable[[torch.Tensor], torch.Tensor]
LEAST = {dtype: torch.iinfo(dtype).min for dtype in (torch.int32, torch.int64)}


def least(make: Make, dtype: torch.dtype, *, divisor: int) -> tuple[torch.Tensor, torch.Tensor]:
    return make(torch.tensor([4, LEAST[dtype], 9], dtype=dtype)), make(torch.tensor([1, divisor, 3], dtype=dtype))


def noise(*size: int) -> torch.Tensor:
    return torch.arange(torch.Size(size).numel(), dtype=torch.float32).mul(0.7).sin().view(size)


def pivots(batch: int) -> torch.Tensor:
    return torch.arange(1, 6, dtype=torch.int32).repeat(batch, 1)


RIGHT: dict[str, Callable[[Make], Any]] = {
    **{f"div trunc {dtype}": lambda make, dtype=dtype: aten.div.Tensor_mode(
        *least(make, dtype, divisor=2), rounding_mode="trunc") for dtype in LEAST},
    "div trunc of small integers": lambda make: aten.div.Tensor_mode(
        make(torch.tensor([-128, 7], dtype=torch.int8)), make(torch.tensor([-1, 2], dtype=torch.int8)),
        rounding_mode="trunc"),
    "div trunc of real numbers": lambda make: aten.div.Tensor_mode(
        make(torch.tensor([-(2.0**63), 7.0])), make(torch.tensor([-1.0, 2.0])), rounding_mode="trunc"),
    **{f"{operator.__name__} {dtype}": lambda make, operator=operator, dtype=dtype: operator(
        *least(make, dtype, divisor=-1))
       for dtype in LEAST for operator in (torch.floor_divide, torch.remainder, torch.fmod, torch.gcd)},
    "lcm": lambda make: aten.lcm(make(torch.tensor([4, 6])), make(torch.tensor([6, -9]))),
    "_masked_softmax of queries": lambda make: aten._masked_softmax(
        make(noise(2, 3, 8, 8)), make(torch.eye(8) > 0), 3, 0),
    "_masked_softmax of lengths": lambda make: aten._masked_softmax(
        make(noise(2, 3, 8, 8)), make(noise(2, 8) > 0), 3, 1),
    "_masked_softmax of all": lambda make: aten._masked_softmax(
        make(noise(2, 3, 8, 8)), make(noise(2, 3, 8, 8) > 0), 3, 2),
    "_compute_linear_combination": lambda make: aten._compute_linear_combination(make(noise(4, 30)), make(noise(2, 4))),
    "_upsample_nearest_exact2d": lambda make: aten._upsample_nearest_exact2d(
        make(torch.arange(192, dtype=torch.uint8).view(1, 3, 8, 8)), [16, 12], 2.0, 1.5),
    "linalg_ldl_solve": lambda make: aten.linalg_ldl_solve(
        make(torch.eye(5).repeat(2, 1, 1)), make(pivots(2)), make(noise(5, 3))),
    "linalg_lstsq": lambda make: aten.linalg_lstsq(make(noise(5, 3)), make(noise(5, 2)), driver="gelss")[0],
    "pdist": lambda make: aten._pdist_backward(
        make(torch.zeros(0)), make(noise(1, 3)), 2.0, make(torch.zeros(0))),
}


REFUSED: dict[str, Callable[[Make], Any]] = {
    "a gradient of other dtype than its layer": lambda make: aten.native_layer_norm_backward(
        make(noise(2, 3).double()), make(noise(2, 3)), [3], make(noise(2, 1)), make(noise(2, 1)), None, None,
        [True, False, False])[0],
    "a row that is exempt and does not exist": lambda make: aten.embedding_dense_backward(
        make(noise(3, 2)), make(torch.tensor([0, 1, 2])), 4, 4, False),
    "more statistics than rows": lambda make: aten.native_layer_norm_backward(
        make(noise(2, 3)), make(noise(2, 3)), [3], make(noise(3, 1)), make(noise(3, 1)), None, None,
        [True, False, False])[0],
    "more noise than elements": lambda make: aten.rrelu_with_noise(make(noise(3)), make(noise(4)), 0.1, 0.3, True),
    "more coefficients than terms": lambda make: aten._softmax_backward_data(
        make(noise(3)), make(noise(4)), 0, torch.float32),
    "a series that begins far below 0": lambda make: torch.special.zeta(make(noise(2)).double(), -(2.0**20) - 0.5),
    "many rows without elements": lambda make: aten.adaptive_max_pool2d(make(noise(1, 3, 3)), [2**20 + 1, 0])[0],
}
"""Operands that do not fit, none of them too short; and loops that are too long, none of them by much."""


@pytest.mark.parametrize("name", list(REFUSED))
def test_operands_that_do_not_fit_are_refused(session: Any, name: str) -> None:
    def ask() -> None:
        djinn.materialize(REFUSED[name](lambda tensor: tensor.to(DEVICE)))

    with torch.no_grad(), pytest.raises(RuntimeError):
        ask()


@pytest.mark.parametrize("name", list(RIGHT))
def test_what_is_beside_it_is_right(session: Any, name: str) -> None:
    with torch.no_grad():
        made = RIGHT[name](lambda tensor: tensor.to(DEVICE)).cpu()
        assert torch.equal(made, RIGHT[name](lambda tensor: tensor.clone()))


@pytest.mark.parametrize("gradient", ["grad", "grad_output"])
def test_the_gradient_of_distances_is_checked_by_either_name(gradient: str) -> None:
    """PyTorch 2.14 calls it by another name than 2.13."""
    left, right = noise(3, 2), noise(4, 2)
    RULES["_cdist_backward"]({gradient: noise(3, 4), "x1": left, "x2": right, "cdist": noise(3, 4)})
    RULES["_pdist_backward"]({gradient: noise(3), "self": left, "pdist": noise(3)})
    with pytest.raises(RuntimeError, match=gradient):
        RULES["_pdist_backward"]({gradient: noise(2), "self": left, "pdist": noise(3)})
    with pytest.raises(RuntimeError, match="size"):
        RULES["_cdist_backward"]({gradient: noise(3, 3), "x1": left, "x2": right, "cdist": noise(3, 4)})


def test_a_tensor_that_cannot_be_given_memory_reaches_no_further_than_before() -> None:
    """A stand-in for a kernel that resizes a tensor and then finds no memory; nobody reads the tensor."""
    tensor = torch.ones(8)

    def without_memory(out: torch.Tensor) -> None:
        out.untyped_storage().resize_(0)
        raise RuntimeError("not enough memory")

    def nothing(*_: Any) -> None:
        return None

    with pytest.raises(RuntimeError, match="not enough memory"):
        checked_call(nothing, [tensor], {}, without_memory, nothing)
    assert not tensor.numel()


@pytest.mark.parametrize("size", [[-1, 3], [-2, -2], [-2, -2, 0]])
def test_a_tensor_that_got_a_size_that_cannot_be_has_none(size: list[int]) -> None:
    """PyTorch leaves it with that size when it raises."""
    tensor = torch.ones(8)

    def resized(out: torch.Tensor) -> None:
        out.resize_(size)

    def nothing(*_: Any) -> None:
        return None

    with pytest.raises(RuntimeError, match="overflow|negative"):
        checked_call(nothing, [tensor], {}, resized, nothing)
    assert tensor.shape == (0,)

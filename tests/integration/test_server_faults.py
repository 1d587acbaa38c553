"""Kernels that end the process, or read beyond their operands, on tensors that lie as ordinary ones: over the wire."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from djinn_guard_core.kernels import RULES

import djinn

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


REFUSED: dict[str, Callable[[Make], Any]] = {
    **{f"div trunc {dtype}": lambda make, dtype=dtype: aten.div.Tensor_mode(
        *least(make, dtype, divisor=-1), rounding_mode="trunc") for dtype in LEAST},
    "div trunc by a number": lambda make: aten.div.Scalar_mode(
        least(make, torch.int64, divisor=1)[0], -1, rounding_mode="trunc"),
    "div_ trunc": lambda make: least(make, torch.int64, divisor=1)[0].div_(-1, rounding_mode="trunc"),
    "lcm": lambda make: aten.lcm(*least(make, torch.int64, divisor=7)),
    "_masked_softmax of other queries": lambda make: aten._masked_softmax(
        make(noise(2, 3, 8, 800)), make(torch.zeros(8, 8, dtype=torch.bool)), 3, 0),
    "_masked_softmax of another length": lambda make: aten._masked_softmax(
        make(noise(2, 3, 8, 800)), make(torch.zeros(2, 8, dtype=torch.bool)), 3, 1),
    "_compute_linear_combination": lambda make: aten._compute_linear_combination(
        make(noise(4, 30)), make(noise(2, 400))),
    "_upsample_nearest_exact2d": lambda make: aten._upsample_nearest_exact2d(
        make(torch.ones(1, 3, 8, 8, dtype=torch.uint8)), [16, 16], 1e-30, 1e-30),
    "linalg_ldl_solve": lambda make: aten.linalg_ldl_solve(
        make(torch.eye(5).repeat(2, 1, 1)), make(pivots(2)), make(noise(5, 2, 5, 5))),
    "linalg_lstsq": lambda make: aten.linalg_lstsq(make(noise(5, 3)), make(torch.zeros(5, 0)), driver="gelss"),
    "_embedding_bag of two dimensions": lambda make: aten._embedding_bag_forward_only(
        make(noise(4, 4)), make(torch.zeros(6, 6, dtype=torch.int64)), make(torch.zeros(4, 4, dtype=torch.int64))),
    "_weight_norm": lambda make: aten._weight_norm(make(noise(2, 3, 4, 4)), make(torch.zeros(6, 0)), 0),
    "_pdist_backward": lambda make: aten._pdist_backward(
        make(torch.zeros(0)), make(torch.zeros(0, 3)), 2.0, make(torch.zeros(0))),
    "native_batch_norm_backward of nothing": lambda make: aten.native_batch_norm_backward(
        make(torch.zeros(3, 0)), make(torch.zeros(3, 0)), *[make(torch.zeros(0)) for _ in range(5)], True, 1e-5,
        [True] * 3)[0],
    "_weight_norm_interface of nothing": lambda make: aten._weight_norm_interface(
        make(torch.zeros(0, 4)), make(torch.zeros(0, 1)), 0)[0],
    "_masked_softmax of nothing": lambda make: aten._masked_softmax(
        make(torch.zeros(3, 0)), make(torch.zeros(3, 0, dtype=torch.bool))),
    "_embedding_bag without bags": lambda make: aten._embedding_bag(
        make(noise(4, 3)), make(torch.zeros(3, dtype=torch.int64)), make(torch.zeros(1, dtype=torch.int64)), False, 2,
        False, None, True)[0],
    "attention without heads": lambda make: aten._scaled_dot_product_flash_attention_for_cpu(
        *[make(torch.zeros(2, 0, 3, 4)) for _ in range(3)])[0],
    "embedding_backward": lambda make: aten.embedding_backward(
        make(torch.ones(3, 2)), make(torch.tensor([0, -1, 2])), 4, 1, True, False),
    "histogram into out of more edges than can be counted": lambda make: aten.histogram.bin_ct_out(
        make(noise(4)), 2**63 - 1, hist=make(torch.zeros(1)), bin_edges=make(torch.zeros(2)))[1],
    "cat into a stride of 0": lambda make: aten.cat.out(
        [make(torch.ones(1, 1))], 1, out=make(torch.zeros(1)).as_strided((1, 1), (0, 0))),
    "rrelu_with_noise out": lambda make: aten.rrelu_with_noise.out(
        make(noise(2000)), make(noise(2000)), out=make(torch.zeros(0))),
}
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


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_ends_a_process_is_refused(session: Any, name: str) -> None:
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


def test_a_tensor_that_cannot_be_given_memory_reaches_no_further_than_before(start_server: Any) -> None:
    server = start_server("--program-mib", str(2**40))
    [worker] = server.workers
    djinn.init(server=server.address)
    with torch.no_grad():
        small = torch.ones(8, device=DEVICE)
        with pytest.raises(RuntimeError, match="memory"):
            djinn.materialize(aten.empty.out([2**56], out=small))
        try:
            beyond = (small[2**40 : 2**40 + 4] + 1).cpu()
        except (RuntimeError, djinn.DjinnError):
            beyond = torch.empty(0)
    assert not beyond.numel()
    assert server.workers == [worker], "the process that runs operations died"
    djinn.init()

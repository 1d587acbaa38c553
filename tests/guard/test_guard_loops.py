"""Rules about loops that only an argument bounds, asked just beyond their limits, where kernels still end at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.operators.asking import ask, empty

MOST = 2**20
LOW = torch.tensor([0.5, -MOST - 0.5], dtype=torch.float64)
HIGHER = torch.tensor([0.5, -MOST + 0.5, -MOST - 1, torch.nan], dtype=torch.float64)
LARGEST = {torch.float64: 2**53, torch.float32: 2**24, torch.float16: 2**11, torch.bfloat16: 2**8}
"""The least integer above which a dtype does not have all."""


@pytest.mark.parametrize("dtype", list(LARGEST))
def test_random_integers_begin_below_the_largest_one_in_the_words_of_eager(dtype: torch.dtype) -> None:
    high, tensor = LARGEST[dtype], torch.empty(2, dtype=dtype)
    ask("random_.from", (tensor, high - 1, None), {})
    with pytest.raises(RuntimeError) as eager:
        tensor.random_(high, None)
    with pytest.raises(RuntimeError) as guard:
        ask("random_.from", (tensor, high, None), {})
    assert str(guard.value) == str(eager.value)


def test_random_integers_of_integers_and_below_a_limit_begin_anywhere() -> None:
    ask("random_.from", (empty(2, dtype=torch.int64), 2**62, None), {})
    ask("random_.from", (empty(2), -(2**62), None), {})
    ask("random_.from", (empty(2), 2**62, 2**62 + 2**40), {})
    ask("random_.to", (empty(2), 2**62), {})
    ask("random_", (empty(2),), {})


@pytest.mark.parametrize(("name", "right", "wrong"), [
    ("special_chebyshev_polynomial_t", {"x": empty(2), "n": empty()}, {"n": torch.tensor(MOST + 1.0)}),
    ("special_hermite_polynomial_h.n_scalar", {"x": empty(2), "n": MOST}, {"n": MOST + 1}),
    *((name, {"self": empty(2, 3, 4, 5), "kernel_size": [3], "padding": [1]}, {"padding": [MOST + 1]})
      for name in ("max_pool2d", "max_pool2d_with_indices.out", "max_pool3d", "max_pool3d_with_indices",
                   "max_pool1d_with_indices")),
    ("max_pool1d", {"self": empty(2, 3), "kernel_size": [3], "padding": [1], "dilation": [1]},
     {"padding": [MOST + 1], "kernel_size": [2 * MOST + 2]}),
    ("adaptive_max_pool1d", {"self": empty(2, 3), "output_size": [0]}, {}),
    *((name, {"self": empty(2, 3, 4, 5), "output_size": [MOST, 0, 1][:rank]},
       {"output_size": [MOST + 1, 0, 1][:rank]})
      for name, rank in (("adaptive_max_pool2d", 2), ("adaptive_max_pool3d", 3), ("adaptive_max_pool3d.out", 3))),
    ("_masked_softmax_backward", {name: empty(MOST, 0, dtype=dtype) for name, dtype in (
        ("grad_output", torch.float32), ("output", torch.float32), ("mask", torch.bool))},
     {name: empty(MOST + 1, 0, dtype=dtype) for name, dtype in (
        ("grad_output", torch.float32), ("output", torch.float32), ("mask", torch.bool))}),
    *((name, {"self": empty(MOST, 1, 0, 1)}, {"self": empty(MOST + 1, 1, 0, 1)})
      for name in ("nll_loss2d", "nll_loss2d_forward", "nll_loss_nd", "cross_entropy_loss")),
    *((name, {"self": empty(2, 3, 4, 5), "padding": [1, 1, 2, 2]}, {"padding": [2**40, -1, 2, 2]})
      for name in ("replication_pad2d", "replication_pad3d.out", "reflection_pad2d.out")),
    ("replication_pad2d_backward",
     {"self": empty(2, 3, 4, 5), "grad_output": empty(2, 3, 4, 7), "padding": [1, 1, 0, 0]},
     {"padding": [2**40, 2 - 2**40, 0, 0]}),
    ("constant_pad_nd", {"self": empty(2, 3), "pad": [-3, 0]}, {"pad": [-3, 0, MOST, 0]}),
    *((name, {"self": empty(2), "other": HIGHER}, {"other": LOW}) for name in ("special_zeta", "special_zeta.out")),
    ("special_zeta.self_scalar", {"self": 2.0, "other": empty(2)}, {"other": LOW}),
    ("special_zeta.other_scalar", {"self": empty(2), "other": -1.5}, {"other": float(LOW[1])}),
    *((name, {"n": 2, "self": HIGHER}, {"self": LOW})
      for name in ("polygamma", "polygamma.out", "polygamma_", "special_polygamma")),
    ("combinations", {"self": empty(1), "r": 512}, {"r": 513}),
    *((name, {"self": empty(2), "p": MOST}, {"p": MOST + 1})
      for name in ("mvlgamma", "mvlgamma_", "mvlgamma.out", "special_multigammaln.out")),
])
def test_loops_that_an_argument_bounds_are_short(name: str, right: dict[str, Any], wrong: dict[str, Any]) -> None:
    ask(name, (), right)
    if wrong:
        with pytest.raises(RuntimeError, match="is the limit|begins before"):
            ask(name, (), {**right, **wrong})


def test_counts_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not a number is a stand-in: 7, of which draws end."""
    given: Sequence[Any] = torch.tensor([3.0, 7.0]), torch.tensor([0.5, 0.5])
    ask("binomial", given, {})
    ask("binomial", (empty(2), empty(2)), {})
    monkeypatch.setattr(torch.Tensor, "isnan", lambda tensor: tensor == 7)
    ask("binomial", (given[0][:1], given[1]), {})
    with pytest.raises(RuntimeError, match="count is not a number"):
        ask("binomial", given, {})

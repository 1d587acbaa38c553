"""Conditions for kernels whose loops nothing but an argument bounds: one number would keep a server busy for ever."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from djinn_plugins.guard.fused_kernels import Rule
from djinn_plugins.guard.preconditions import Named, expect, expect_as_eager, has_elements

__all__ = ("LOOPS", "POLYNOMIALS")

MAX_ROUNDS = 2**20
"""Maximum number of rounds of such a loop, for each element of a result."""
MAX_COMBINED = 512
"""Maximum number of elements that are combined: the kernel has a dimension for each, and compares all pairs."""
LARGEST_PADDING = 2**40
PADDINGS = ("constant_pad_nd", "pad", "_pad_circular", "_pad_enum", *(
    f"{kind}_pad{rank}d{more}" for kind in ("reflection", "replication") for rank in (1, 2, 3)
    for more in ("", "_backward")))
POLYNOMIALS = tuple(f"special_{name}" for name in (
    *(f"{shifted}chebyshev_polynomial_{kind}" for shifted in ("", "shifted_") for kind in "tuvw"),
    "hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p"))


def _degree(named: Named) -> None:
    """Check how many terms are summed one by one."""
    degree = named["n"]
    if isinstance(degree, torch.Tensor):
        degree = degree.double().max().item() if degree.numel() and has_elements(degree) else 0
    expect(degree <= MAX_ROUNDS, f"a polynomial of degree {degree}; {MAX_ROUNDS} is the limit")


def _random_integers(named: Named) -> None:
    """Check the lowest integer as the kernel does, which first looks for the next one that its real dtype has."""
    dtype, low = named["self"].dtype, named.get("from")
    if low is None or named["to"] is not None or not dtype.is_floating_point:
        return
    # aten/src/ATen/native/DistributionTemplates.h, random_from_to_impl: all integers up to this one have a real number.
    high = int(2 / torch.finfo(dtype).eps)
    expect_as_eager(low < high, "random_ expects 'from' casted to dtype to be less than or equal to 'to_inc' casted to "
                                f"dtype, but got from={low} > to_inc={high}")


def _padded_pool(named: Named) -> None:
    """Check the padding: for each result, the kernel steps through that before it."""
    padding = named["padding"]
    most = padding if isinstance(padding, int) else max(padding, default=0)
    expect(most <= MAX_ROUNDS, f"a padding of {most}; {MAX_ROUNDS} is the limit")


def _adaptive_pool(named: Named) -> None:
    """Check how many rows a result without elements has: the kernel goes through them."""
    size = [named["output_size"]] if isinstance(named["output_size"], int) else named["output_size"]
    _few_rows(size)


def _rows_of(name: str) -> Rule:
    """Rule for a kernel that goes through the rows of a tensor even if they have no elements."""
    return lambda named: _few_rows(named[name].shape)


def _padded(named: Named) -> None:
    """Check what is added to sizes: kernels add in integers that overflow, and go through rows without elements."""
    padding, size = named["pad" if "pad" in named else "padding"], list(named["self"].shape)
    most = max(map(abs, padding), default=0)
    expect(most < LARGEST_PADDING, f"a padding of {most}; {LARGEST_PADDING} is the limit")
    if len(padding) <= 2 * len(size):
        for dim, (before, behind) in enumerate(zip(padding[::2], padding[1::2], strict=False), 1):
            size[-dim] += before + behind
        _few_rows(size)


def _few_rows(size: list[int] | torch.Size) -> None:
    rows = prod(extent for extent in size if extent > 0)
    expect(0 not in size or rows <= MAX_ROUNDS, f"{rows} rows without elements; {MAX_ROUNDS} is the limit")


def _zeta(named: Named) -> None:
    _few_terms(named["other"])


def _polygamma(named: Named) -> None:
    _few_terms(named["self"])


def _few_terms(given: torch.Tensor | float) -> None:
    """Check that no series begins far below 0: kernels of zeta sum its terms one by one."""
    begin = given if isinstance(given, torch.Tensor) else torch.tensor(given, dtype=torch.float64)
    if not begin.dtype.is_floating_point or not has_elements(begin):
        return
    # Where there is a pole, they do not.
    expect(not bool(((begin < -MAX_ROUNDS) & (begin != begin.floor())).any()),
           f"a series that begins before {-MAX_ROUNDS}")


def _binomial(named: Named) -> None:
    """Check that every count is a number: the kernel draws until it has more than that."""
    count = named["count"]
    expect(not has_elements(count) or not bool(count.isnan().any()), "count is not a number")


def _dimensions(named: Named) -> None:
    terms = named["p"]
    expect(terms <= MAX_ROUNDS, f"a sum of {terms} terms; {MAX_ROUNDS} is the limit")


def _combinations(named: Named) -> None:
    taken = named["r"]
    expect(taken <= MAX_COMBINED, f"combinations of {taken} elements; {MAX_COMBINED} is the limit")


LOOPS: Mapping[str, Rule] = {
    **dict.fromkeys(POLYNOMIALS, _degree),
    "random_": _random_integers,
    **{f"max_pool{rank}d{more}": _padded_pool for rank in (1, 2, 3) for more in ("", "_with_indices")},
    **{f"adaptive_max_pool{rank}d": _adaptive_pool for rank in (1, 2, 3)},
    "_masked_softmax_backward": _rows_of("grad_output"),
    **dict.fromkeys(("nll_loss2d", "nll_loss2d_forward", "nll_loss2d_backward", "nll_loss_nd", "cross_entropy_loss"),
                    _rows_of("self")),
    **dict.fromkeys(PADDINGS, _padded),
    "special_zeta": _zeta,
    **dict.fromkeys(("polygamma", "polygamma_", "special_polygamma"), _polygamma),
    "binomial": _binomial,
    "combinations": _combinations,
    **dict.fromkeys(("mvlgamma", "mvlgamma_", "special_multigammaln"), _dimensions),
}
"""Rules by operator name, without overload."""

"""Strategies for calls of element-wise operators: every layout and dtype of each operand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from hypothesis import strategies as st

from djinn_conformance.layouts import LAYOUTS, Operands
from djinn_plugins.common.operators.operators import operator_named

__all__ = ("FORMS", "DrawnLayout", "calls_of", "operands")

_ONE = ("abs acos asin asinh atan atanh bitwise_not ceil clone cos cosh digamma elu empty_like erf erfc exp expm1 "
        "flip:[0] floor frac gelu hardsigmoid hardswish hardtanh isfinite isinf isnan isneginf isposinf leaky_relu "
        "lgamma log log10 log1p log2 logical_not logit mish nan_to_num neg ones_like reciprocal relu round rsqrt sgn "
        "sigmoid sign signbit silu sin sinh softplus sqrt square tan tanh tril trunc zeros_like triu pow.Scalar:2 "
        "clamp:0,2 threshold:1,2 hardshrink:0.5 softshrink:0.5 clamp_min:1 clamp_min:1.5 full_like:2").split()
_TWO = ("add.Tensor atan2 bitwise_and.Tensor bitwise_or.Tensor copysign.Tensor div.Tensor eq.Tensor floor_divide fmax "
        "fmin fmod.Tensor ge.Tensor gelu_backward gt.Tensor heaviside huber_loss hypot le.Tensor "
        "logaddexp logical_and logical_or logical_xor lt.Tensor maximum minimum mse_loss mul.Tensor ne.Tensor "
        "nextafter pow.Tensor_Tensor remainder.Tensor rsub.Tensor sigmoid_backward silu_backward smooth_l1_loss "
        "sub.Tensor tanh_backward xlogy.Tensor lerp.Scalar:0.5 threshold_backward:1 hardtanh_backward:-1,1 "
        "leaky_relu_backward:0.1,False softplus_backward:1,20 where.ScalarOther:2.5").split()
_NUMBERED = ("add.Tensor add.Scalar bitwise_and.Scalar div.Tensor eq.Scalar floor_divide.Scalar fmod.Scalar ge.Scalar "
             "lt.Scalar maximum mul.Tensor pow.Tensor_Scalar remainder.Scalar rsub.Scalar sub.Tensor").split()
_THREE = "addcdiv addcmul clamp.Tensor lerp.Tensor where.self".split()
FORMS: Mapping[int, Sequence[str]] = {
    1: [*_ONE, *(f"{name}:{number}" for name in _NUMBERED for number in ("2", "2.5"))], 2: _TWO, 3: _THREE}
"""By number of tensors: overloads, each with the numbers that follow the tensors."""
_DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.int64, torch.bool)


@attrs.frozen
class DrawnLayout:
    """How one operand lies in memory.

    Attributes:
        dtype: Its dtype.
        narrowed: The dimensions that it broadcasts along.
        how: Functions of `djinn_conformance.layouts`, applied in turn.
        choose: Draws what they leave open.
    """

    dtype: torch.dtype
    narrowed: tuple[bool, ...]
    how: tuple[str, ...]
    choose: Any

    def tensor(self, size: Sequence[int]) -> torch.Tensor:
        """Make the operand of a call of this size."""
        made = torch.ones([1 if narrow else extent for extent, narrow in zip(size, self.narrowed, strict=True)],
                          dtype=self.dtype)
        for name in self.how:
            # An empty tensor has strides that nothing reads; only those functions apply that choose strides alone.
            if name == "odd" or made.numel():
                made = LAYOUTS[name](made, self.choose)
        return made


@st.composite
def operands(draw: Callable[..., Any], count: int) -> list[torch.Tensor]:
    """Draw tensors that can be broadcast to one size; some dimensions have one element, or none."""
    size = draw(st.lists(st.sampled_from((1, 2, 1, 3, 4, 1, 2, 0)), min_size=1, max_size=4))
    dtype, choose = draw(st.sampled_from(_DTYPES)), draw(st.randoms(use_true_random=False))
    made = []
    for _ in range(count):
        own = draw(st.booleans()) or draw(st.booleans())
        narrowed = tuple(draw(st.lists(st.booleans(), min_size=len(size), max_size=len(size)))
                         if draw(st.integers(0, 3)) == 3 else [False] * len(size))
        how = draw(st.lists(st.sampled_from(tuple(LAYOUTS)), min_size=1, max_size=2))
        made.append(DrawnLayout(dtype if own else draw(st.sampled_from(_DTYPES)), narrowed, tuple(how),
                                choose).tensor(size))
    return made


def calls_of(tensors: Sequence[torch.Tensor]) -> list[Operands]:
    """List the calls of all operators that take these tensors."""
    made: list[Operands] = []
    for form in FORMS[len(tensors)]:
        name, _, numbers = form.partition(":")
        given: list[Any] = list(tensors)
        if name.startswith("where"):
            given[0] = given[0] > 0
        rest = [[int(number[1:-1])] if number[0] == "[" else number == "True" if number in ("True", "False")
                else float(number) if "." in number else int(number) for number in numbers.split(",") if number]
        args = (*rest, *given) if name == "pow.Scalar" else (*given, *rest)
        if name in ("huber_loss", "mse_loss", "smooth_l1_loss"):
            args = (*args, 0)
        made.append((operator_named(f"aten::{name}"), args, {}))
    return made

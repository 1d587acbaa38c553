"""Composites with ``out=`` that stay whole, because their parts would not write to a destination that is lazy.

PyTorch's code asks for the storage of a destination, or whether an argument is of a tensor subclass. ``matmul`` then
copies from a view of the destination into the destination, and ``linalg.matrix_rank`` leaves the destination as it was.

Source:
    ``_matmul_impl`` (``is_alias_of``) and ``matrix_rank_impl`` (``isTensorSubclassLike``) of
    aten/src/ATen/native/LinearAlgebra.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from djinn_plugins.device.interceptor import gradients

__all__ = ("NAMES", "kernel")

DIFFERENTIABLE = "matmul.out"
NAMES = (DIFFERENTIABLE, *(f"linalg_matrix_rank.{overload}" for overload in (
    "atol_rtol_tensor_out", "atol_rtol_float_out", "out", "out_tol_tensor")))
"""The overloads, without namespace."""


def kernel(name: str, find: Callable[[str], Any]) -> Callable[..., Any]:
    """Return the kernel of an overload for autograd's key, which otherwise takes the overload apart.

    Args:
        name: One of `NAMES`.
        find: Returns an operator by its name.
    """

    def write(*args: Any, **kwargs: Any) -> Any:
        operator = find(name)
        if name == DIFFERENTIABLE and gradients.are_needed(args, kwargs):
            # PyTorch's kernel refuses that.
            return operator._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args, **kwargs)

    return write

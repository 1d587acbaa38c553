"""The operators of the namespace ``djinn_sparse``, one for each kind of result."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from djinn_plugins.common.once import once, registering
from djinn_plugins.common.sparse.rebuilding import called, taken_apart

__all__ = ("NAMES", "NAMESPACE", "define")

NAMESPACE = "djinn_sparse"
_GIVEN = "str call, Tensor[] tensors, Scalar[] numbers"
_RETURNS = {"dense": "Tensor", "pair": "(Tensor, Tensor)", "coo": "(Tensor, Tensor, Tensor)",
            "compressed": "(Tensor, Tensor, Tensor, Tensor)"}
NAMES = frozenset(f"{NAMESPACE}::{name}" for name in (*_RETURNS, "dynamic_coo", "dynamic_compressed", "write_"))


def _plainly(text: str, tensors: list[torch.Tensor], numbers: list[Any]) -> Any:
    return called(text, tensors, numbers)


def _in_parts(layout: str, text: str, tensors: list[torch.Tensor], numbers: list[Any]) -> Any:
    parts = taken_apart(called(text, tensors, numbers), layout)
    held = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    # Some kernels return components of their operands. To the client, results are new.
    return tuple(part.clone() if part.untyped_storage().data_ptr() in held else part for part in parts)


def _writing(text: str, written: torch.Tensor, tensors: list[torch.Tensor], numbers: list[Any]) -> torch.Tensor:
    called(text, tensors, numbers, written)
    return written


@once
def define() -> None:
    """Define the operators, once per process."""
    with registering(NAMESPACE, "DEF") as library:
        kernels: dict[str, Callable[..., Any]] = {}
        for name, returns in _RETURNS.items():
            kernels[name] = _plainly if name in ("dense", "pair") else partial(_in_parts, name)
            library.define(f"{name}({_GIVEN}) -> {returns}")
        for name in ("coo", "compressed"):
            kernels[f"dynamic_{name}"] = kernels[name]
            library.define(f"dynamic_{name}({_GIVEN}) -> {_RETURNS[name]}", tags=(torch.Tag.dynamic_output_shape,))
        kernels["write_"] = _writing
        library.define(f"write_({_GIVEN.replace('call,', 'call, Tensor(a!) self,')}) -> Tensor(a!)")
        for name, kernel in kernels.items():
            for key in ("CPU", "CUDA"):
                library.impl(name, kernel, key)

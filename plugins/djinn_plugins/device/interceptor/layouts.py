"""Layouts without a remote form: PyTorch itself can create such tensors for any device, but using one is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from djinn.errors import UnsupportedTensorError
from djinn.ir.spec import tensors_in
from djinn.record import devices
from djinn_plugins.common.once import once, registering

_ACCESSORS = ("crow_indices", "col_indices", "ccol_indices", "row_indices", "values", "_nnz")
"""Operators of compressed tensors that PyTorch implements for any device, with a misleading error."""
_KEYS = ("SparsePrivateUse1", "SparseCsrPrivateUse1", "NestedTensorPrivateUse1", "QuantizedPrivateUse1")

_NESTED: tuple[tuple[Any, str], ...] = (
    (torch._C._nested, "nested_tensor"),  # type: ignore[attr-defined]  # no stub declares this module
    (torch, "_nested_tensor_from_tensor_list"),
)
"""Functions of `torch.nested` that make nested tensors which are not jagged: in C++, of memory that is not there."""


def install() -> None:
    """Let these functions refuse to make a remote tensor. Called once per process."""
    for owner, name in _NESTED:
        setattr(owner, name, _without_remote(getattr(owner, name)))


def _without_remote(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def make_at_home(*args: Any, **kwargs: Any) -> Any:
        named = [item for item in (*args, *kwargs.values()) if isinstance(item, (torch.device, str))]
        given = [item.device for item in tensors_in((args, tuple(kwargs.values())))]
        kind = devices.logical_device().type
        if any(torch.device(item).type == kind for item in (*named, *given)):
            _refuse(make.__name__)
        return make(*args, **kwargs)

    return make_at_home


@once
def refuse() -> None:
    """Register the kernels that refuse, which takes milliseconds."""
    for key in _KEYS:
        with registering("_", "IMPL") as library:
            library.fallback(_refuse, key)
    with registering("aten", "IMPL") as compressed:
        for name in _ACCESSORS:
            compressed.impl(name, functools.partial(_refuse, name), "SparseCsrPrivateUse1")


def _refuse(operator: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise UnsupportedTensorError(f"{operator} on a sparse, nested or quantized tensor has no remote form.",
                                 hint="Convert it to a dense tensor; nested ones may have layout=torch.jagged.")

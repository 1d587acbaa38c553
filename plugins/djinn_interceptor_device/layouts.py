"""Layouts that have no remote form: PyTorch itself can build such tensors for any device, and using one is refused."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from djinn.errors import UnsupportedTensorError

_KEYS = ("SparsePrivateUse1", "SparseCsrPrivateUse1", "NestedTensorPrivateUse1", "QuantizedPrivateUse1")


def register() -> list[torch.library.Library]:
    """Register what refuses; it lasts as long as the libraries that are given back."""
    libraries = []
    for key in _KEYS:
        library = torch.library.Library("_", "IMPL")
        library.fallback(_refuse, key)
        libraries.append(library)
    return libraries


def _refuse(operator: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise UnsupportedTensorError(f"{operator} on a sparse, nested or quantized tensor has no remote form.",
                                 hint="Convert it to a dense tensor; nested ones may have layout=torch.jagged.")

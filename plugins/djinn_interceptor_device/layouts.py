"""Layouts without a remote form: PyTorch itself can create such tensors for any device, but using one is refused."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

from djinn_lib_service.once import once, registering

from djinn.errors import UnsupportedTensorError

_ACCESSORS = ("crow_indices", "col_indices", "ccol_indices", "row_indices", "values", "_nnz")
"""Operators of compressed tensors that PyTorch implements for any device, with a misleading error."""
_KEYS = ("SparsePrivateUse1", "SparseCsrPrivateUse1", "NestedTensorPrivateUse1", "QuantizedPrivateUse1")


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

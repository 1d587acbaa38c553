"""Rows of a sparse matrix as indices and as pointers: libraries for graphs convert between them.

PyTorch's kernels write where the values say, without a check, so a server does not run them. Others give the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from djinn.session.session import Session

__all__ = ("from_indices", "to_indices")


def from_indices(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return for each row, and the end, how many of the sorted indices come before it."""
    indices, size = args
    rows = torch.arange(size + 1, dtype=indices.dtype, device=indices.device)
    return torch.searchsorted(indices, rows, out_int32=kwargs.get("out_int32", False))


def to_indices(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the row and the column of each element, of one matrix."""
    pointers, columns = args
    if pointers.dim() > 1:
        return NotImplemented
    dtype = torch.int32 if kwargs.get("out_int32", False) else torch.int64
    rows = torch.repeat_interleave(pointers.diff(), output_size=columns.numel()).to(dtype)
    columns = columns.to(dtype)
    return torch.stack((columns, rows) if kwargs.get("transpose", False) else (rows, columns))

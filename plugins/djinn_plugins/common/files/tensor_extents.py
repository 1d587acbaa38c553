"""Where tensors lie in files. Commands that run without PyTorch import this."""

from __future__ import annotations

import attrs

__all__ = ("TensorExtent",)


@attrs.frozen
class TensorExtent:
    """Where a tensor lies in a file.

    Attributes:
        dtype: Its dtype, by the name that it has in ``torch``.
        size: Its sizes; it is contiguous.
        begin: Where it begins, in bytes from the begin of the file.
        end: Where it ends.
    """

    dtype: str
    size: tuple[int, ...]
    begin: int
    end: int

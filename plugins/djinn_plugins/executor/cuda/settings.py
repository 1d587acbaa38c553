"""The settings of executors on CUDA devices."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from djinn.settings import setting
from djinn_plugins.executor.cuda.staging_sizes import PIECE_BYTES, STAGING_BYTES

__all__ = ("CudaSettings",)


def _fraction(value: Any) -> float:
    """Read a fraction.

    Raises:
        ValueError, TypeError: It is none.
    """
    made = float(value)
    if not 0 < made <= 1:
        raise ValueError
    return made


@attrs.frozen
class CudaSettings:
    """What an executor does on a CUDA device."""

    cuda_overlap: bool = setting(
        False, help="copies overlap with computing, and programs that repeat are recorded as CUDA graphs")
    cuda_graphs: Literal["off", "static", "piecewise"] = setting(
        "piecewise", help="with cuda_overlap, which programs that repeat are recorded as CUDA graphs: `off`: none; "
                          "`static`: those that can be recorded whole; `piecewise`: segments of the others, too")
    cuda_memory_fraction: float = setting(
        1.0, help="fraction of a CUDA device's memory that one process may allocate; a server has a process for each "
                  "tenant", reads=_fraction, allowed="a number above 0, and at most 1")
    cuda_expandable_segments: bool = setting(
        False, help="PyTorch's allocator lets its segments of a CUDA device's memory grow, which avoids fragments; "
                    "PYTORCH_CUDA_ALLOC_CONF takes precedence")
    cuda_staging_bytes: int = setting(
        STAGING_BYTES, help="with cuda_overlap, page-locked memory for the copies of each direction",
        minimum=2 * PIECE_BYTES)

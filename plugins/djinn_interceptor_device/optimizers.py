"""Which tensors PyTorch's optimizers and gradient clipping work on many at a time.

They decide by the names of device types, of which this one is on all lists, and by the exact classes of tensors, of
which lazy tensors are on none. The lists are extended as `torch.distributed.tensor` extends them for its own class.
"""

from __future__ import annotations

from typing import Any

from torch.optim import optimizer
from torch.utils import _foreach_utils

from djinn.tensor import LazyTensor


def follow(device: str) -> None:
    """Choose as eager does on an executor's device: optimizers go one by one on a CPU only; clipping never does."""
    kinds: list[Any] = optimizer._foreach_supported_types
    if LazyTensor in kinds:
        kinds.remove(LazyTensor)
    if not device.startswith("cpu"):
        kinds.append(LazyTensor)
    clipped: list[Any] = _foreach_utils._foreach_supported_types
    if LazyTensor not in clipped:
        clipped.append(LazyTensor)

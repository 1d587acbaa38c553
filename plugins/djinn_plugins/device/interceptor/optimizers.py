"""Selects the tensors that PyTorch's optimizers and gradient clipping process in groups.

They decide by device type, and all lists include this one, and by the exact class of tensors, where no list includes
lazy tensors. The lists are extended as `torch.distributed.tensor` extends them for its own class.
"""

from __future__ import annotations

from typing import Any

from torch.optim import optimizer
from torch.utils import _foreach_utils

from djinn.record.tensor import LazyTensor


def follow(kind: str) -> None:
    """Choose as eager does on the executor's device: optimizers loop over tensors only on a CPU; clipping never."""
    kinds: list[Any] = optimizer._foreach_supported_types
    if LazyTensor in kinds:
        kinds.remove(LazyTensor)
    if kind != "cpu":
        kinds.append(LazyTensor)
    clipped: list[Any] = _foreach_utils._foreach_supported_types
    if LazyTensor not in clipped:
        clipped.append(LazyTensor)

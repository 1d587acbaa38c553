"""The kernels that make sparse tensors on the device. Their modules are imported when the first one is made."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from djinn_plugins.common.once import registering

__all__ = ("register",)

_MAKERS = {"empty.memory_format": "memory_format", "zeros": "default", "_to_copy": "default",
           "_sparse_coo_tensor_with_dims": "default"}
"""Operators with their overloads."""


def register() -> None:
    """Register the kernels for sparse tensors."""
    with registering("aten", "IMPL") as library:
        for name in _MAKERS:
            for key in ("SparsePrivateUse1", "SparseCsrPrivateUse1"):
                library.impl(name, partial(_made, name), key)


def _made(name: str, *args: Any, **kwargs: Any) -> Any:
    from djinn_plugins.device.sparse.recording import run

    packet = getattr(torch.ops.aten, name.partition(".")[0])
    return run(getattr(packet, _MAKERS[name]), args, kwargs)

"""NCCL, which connects GPUs of the processes' own machines: a process group that names it is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from djinn_lib_accelerator.patches import Patches

__all__ = ("replace",)


def replace(patches: Patches) -> None:
    """Replace what makes process groups until the patches are closed."""
    if torch.distributed.is_available():
        module = import_module("torch.distributed.distributed_c10d")
        patches.set(module, "_new_process_group_helper", _without_nccl(module._new_process_group_helper))


def _without_nccl(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def new_group(size: int, rank: int, ranks: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        if "nccl" in str(backend).lower():
            raise RuntimeError("NCCL needs CUDA devices of this process, and here CUDA is a name of the remote device. "
                               "Use the backend 'gloo': remote tensors take part with copies on the CPU.")
        return original(size, rank, ranks, backend, *args, **kwargs)

    return new_group

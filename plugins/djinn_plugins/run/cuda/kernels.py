"""Kernels for the dispatch key CUDA: tensors created on ``cuda`` are created on the remote device.

PyTorch dispatches the functions that create tensors, and copies between devices, by the device that they name. So the
kernels cover all of Python's and C++'s ways to name it, in all threads, and cost operations on remote tensors nothing.

Some functions in C++ ask for the current CUDA device first, which fails in a process without CUDA; `tensors` replaces
these.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from djinn_plugins.device.accelerator.patches import Patches
from djinn_plugins.run.cuda.translation import remote_device

__all__ = ("register",)


def register(patches: Patches) -> None:
    """Register the kernels until the patches are closed."""
    aten = torch.library.Library("aten", "IMPL")
    patches.on_close(aten._destroy)
    with warnings.catch_warnings():
        # PyTorch warns about composites, and about kernels of a CUDA build, that get another kernel: intended here.
        warnings.simplefilter("ignore")
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("BackendSelect"):
            namespace, _, operator = name.partition("::")
            if namespace == "aten":
                aten.impl(operator, _kernel(operator), "CUDA")


def _kernel(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def kernel(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        # Pinned memory is memory of the host; CUDA's own factories ignore the argument.
        return operator(*args, **kwargs, device=remote_device(device))

    return kernel

"""``torch.nn.DataParallel`` on one device, which distributes nothing but uses kernels of CUDA builds to do so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from djinn_lib_accelerator.patches import Patches
from torch.utils._pytree import tree_map_only

from djinn.record import devices

__all__ = ("replace",)


def replace(patches: Patches) -> None:
    """Replace the choice of the device type, and the distribution, until the patches are closed."""
    # `torch.nn.parallel.data_parallel` is also the name of a function.
    for owner in ("torch._utils", "torch.nn.parallel.data_parallel"):
        patches.set(import_module(owner), "_get_available_device_type", lambda: devices.logical_device().type)
    patches.set(torch.nn.DataParallel, "scatter", _scatter(torch.nn.DataParallel.scatter))


def _scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    def scatter(self: Any, inputs: Any, kwargs: Any, device_ids: Sequence[int]) -> Any:
        """As the original; one device gets everything."""
        if len(device_ids) > 1:
            return original(self, inputs, kwargs, device_ids)
        moved = tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.src_device_obj), (inputs, kwargs or {}))
        return (moved[0],), (moved[1],)

    return scatter

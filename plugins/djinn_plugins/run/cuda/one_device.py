"""``torch.nn.DataParallel`` on one device, which distributes nothing but uses kernels of CUDA builds to do so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from djinn.record import devices
from djinn_plugins.device.accelerator.patches import Patches
from djinn_plugins.run.cuda.translation import remote_index

__all__ = ("replace",)


def replace(patches: Patches) -> None:
    """Replace the choice of the device type, and the distribution, until the patches are closed."""
    # `torch.nn.parallel.data_parallel` is also the name of a function.
    for owner in ("torch._utils", "torch.nn.parallel.data_parallel"):
        patches.set(import_module(owner), "_get_available_device_type", lambda: devices.logical_device().type)
    for name, function in (("_scatter", _scattered), ("_gather", _gathered), ("_broadcast_coalesced", _broadcast)):
        patches.set(torch._C, name, function)
    patches.set(torch.nn.DataParallel, "scatter", _scatter(torch.nn.DataParallel.scatter))


def _scattered(tensor: torch.Tensor, places: Sequence[int], sizes: Any, dim: int, streams: Any) -> list[torch.Tensor]:
    """Divide a tensor between devices; PyTorch's own function, as the next two, is part of its CUDA builds."""
    parts = tensor.chunk(len(places), dim) if sizes is None else tensor.split(list(sizes), dim)
    return [part.to(remote_index(place)) for part, place in zip(parts, places, strict=False)]


def _gathered(tensors: Sequence[torch.Tensor], dim: int, place: int | None) -> torch.Tensor:
    where = torch.device("cpu") if place is not None and place < 0 else remote_index(place)
    return torch.cat([tensor.to(where) for tensor in tensors], dim)


def _broadcast(tensors: Sequence[torch.Tensor], places: Sequence[int], buffer_bytes: int) -> list[list[torch.Tensor]]:
    return [[tensor.to(remote_index(place)) for tensor in tensors] for place in places]


def _scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    def scatter(self: Any, inputs: Any, kwargs: Any, device_ids: Sequence[int]) -> Any:
        """As the original; one device gets everything."""
        if len(device_ids) > 1:
            return original(self, inputs, kwargs, device_ids)
        moved = tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.src_device_obj), (inputs, kwargs or {}))
        return (moved[0],), (moved[1],)

    return scatter

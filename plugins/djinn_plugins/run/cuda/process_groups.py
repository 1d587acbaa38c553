"""Process groups and meshes of ``cuda``: those of the remote device, whose backend is gloo.

NCCL connects GPUs of the processes' own machines, so a group that names it is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from djinn.record import devices
from djinn_plugins.device.accelerator.patches import Patches
from djinn_plugins.run.cuda.translation import remote_device

__all__ = ("replace",)


def replace(patches: Patches) -> None:
    """Replace what makes process groups and meshes until the patches are closed."""
    if not torch.distributed.is_available():
        return
    from torch.distributed import device_mesh, distributed_c10d

    kind = devices.logical_device().type
    backends: Any = distributed_c10d.Backend
    patches.set(backends, "default_device_backend_map",
                {**backends.default_device_backend_map, "cuda": backends.default_device_backend_map[kind]})
    patches.set(distributed_c10d, "_new_process_group_helper", _helper(distributed_c10d._new_process_group_helper))
    for module in (torch.distributed, distributed_c10d):
        patches.set(module, "init_process_group", _init(module.init_process_group))
    config, mesh = distributed_c10d.BackendConfig, device_mesh.DeviceMesh
    patches.set(config, "__init__", _config(config.__init__, kind))
    patches.set(mesh, "__init__", _mesh(mesh.__init__, kind))


def _init(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        if "device_id" in kwargs:
            kwargs["device_id"] = remote_device(kwargs["device_id"])
        return original(*args, **kwargs)

    return init_process_group


def _helper(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def new_group(size: int, rank: int, ranks: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        if "nccl" in str(backend).lower():
            raise RuntimeError("NCCL needs CUDA devices of this process, and here CUDA is a name of the remote device. "
                               "Use the backend 'gloo': remote tensors take part with copies on the CPU.")
        return original(size, rank, ranks, backend, *args, **kwargs)

    return new_group


def _config(original: Callable[..., None], kind: str) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, backend: Any) -> None:  # noqa: N807  # replaces that method
        """As the original; the backend of CUDA is also that of the remote device."""
        named = str(backend)
        original(self, f"{named},{kind}:{named.partition('cuda:')[2].partition(',')[0]}"
                 if "cuda:" in named and kind not in named else backend)

    return __init__


def _mesh(original: Callable[..., None], kind: str) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # replaces that method
        """As the original; the devices of a mesh of CUDA are the processes' remote devices, as those of tensors are."""
        original(self, kind if device_type == "cuda" else device_type, *args, **kwargs)

    return __init__

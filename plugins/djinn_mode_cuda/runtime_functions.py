"""The functions of ``torch.cuda``: those of ``torch.remote_accelerator``, which accept CUDA devices here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from djinn.record import devices
from djinn.session import runtime
from djinn_mode_cuda.patches import Patches
from djinn_mode_cuda.translation import with_device

__all__ = ("replace",)

_OF_DEVICE = (
    "get_device_capability get_device_name get_device_properties get_rng_state is_bf16_supported is_tf32_supported "
    "max_memory_allocated max_memory_cached max_memory_reserved mem_get_info memory_allocated memory_cached "
    "memory_reserved memory_stats memory_stats_as_nested_dict memory_summary reset_accumulated_memory_stats "
    "reset_max_memory_allocated reset_max_memory_cached reset_peak_memory_stats set_device synchronize current_stream "
    "default_stream"
).split()
"""Their first argument is a device, if anything."""
_OTHERS = (
    "empty_cache get_rng_state_all initial_seed ipc_collect is_initialized manual_seed "
    "manual_seed_all seed seed_all set_rng_state set_rng_state_all set_stream stream Event Stream StreamContext"
).split()
_MODULES = (torch.cuda, torch.cuda._utils, torch.cuda.memory, torch.cuda.random, torch.cuda.streams)
"""Modules that publish them; names that were imported from there earlier stay what they were."""
_NEEDS_CUDA = (
    "CUDAGraph CUDAPluggableAllocator ExternalStream GreenContext MemPool caching_allocator_alloc "
    "caching_allocator_delete caching_allocator_enable change_current_allocator clock_rate cudart current_blas_handle "
    "current_solver_handle device_memory_used get_allocator_backend get_per_process_memory_fraction "
    "get_stream_from_external get_sync_debug_mode graph graph_pool_handle host_memory_stats "
    "host_memory_stats_as_nested_dict list_gpu_processes make_graphed_callables memory_snapshot memory_usage "
    "power_draw reset_accumulated_host_memory_stats reset_peak_host_memory_stats set_per_process_memory_fraction "
    "set_sync_debug_mode temperature use_mem_pool utilization"
).split()
"""What acts on the process's own CUDA runtime."""


def replace(patches: Patches) -> None:
    """Replace them until the patches are closed."""
    remote = getattr(torch, devices.logical_device().type)
    for name in (*_OF_DEVICE, *_OTHERS):
        if name in _FACTS:
            continue
        found = getattr(remote, name, None)
        made = _refusal(name) if found is None else _of_device(found) if name in _OF_DEVICE else found
        _set(patches, name, made)
    for name in _NEEDS_CUDA:
        _set(patches, name, _refusal(name))
    for name, function in _FACTS.items():
        _set(patches, name, function)
    _set(patches, "_get_device_index", _index_of(torch.cuda._utils._get_device_index))
    patches.set(torch._utils, "_get_available_device_type", lambda: devices.logical_device().type)
    from torch.nn.parallel import data_parallel

    patches.set(data_parallel, "_get_available_device_type", lambda: devices.logical_device().type)


def _set(patches: Patches, name: str, value: Any) -> None:
    for module in _MODULES:
        if name in vars(module):
            patches.set(module, name, value)


def _of_device(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if args:
            args = (with_device(args[0]), *args[1:])
        elif "device" in kwargs:
            kwargs["device"] = with_device(kwargs["device"])
        return function(*args, **kwargs)

    return call


def _refusal(name: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"torch.cuda.{name} needs a CUDA device of this process. Under `djinn run --as cuda` the "
                           "device is remote, and has no such thing.")

    return refuse


def _index_of(original: Callable[..., int]) -> Callable[..., int]:
    kind = devices.logical_device().type

    def index_of(device: Any, optional: bool = False, allow_cpu: bool = False) -> int:
        """As the original; it also accepts the remote device, which is that of remote tensors."""
        named = torch.device(device) if isinstance(device, str) else device
        if isinstance(named, torch.device) and named.type == kind:
            return named.index or 0
        return original(device, optional, allow_cpu)

    return index_of


def _exchange_device(index: int) -> int:
    """Make a device the current one, and return the index of the one before."""
    if index >= 0:
        getattr(torch, devices.logical_device().type).set_device(with_device(index))
    return 0 if index >= 0 else -1


def _init() -> None:
    """Start the session."""
    runtime.ensure_initialized()


_FACTS: dict[str, Callable[..., Any]] = {
    "is_available": lambda: True,
    "device_count": devices.device_count,
    "current_device": lambda: 0,
    "init": _init,
    "_lazy_init": lambda: None,
    "_exchange_device": _exchange_device,
    "_maybe_exchange_device": _exchange_device,
    "_is_in_bad_fork": lambda: False,
    "is_current_stream_capturing": lambda: False,
    "can_device_access_peer": lambda *_: False,
    "get_arch_list": list,
    "get_gencode_flags": str,
}
"""What holds without asking ``torch.remote_accelerator``: no CUDA code is built in, nothing is captured as a graph."""

"""The functions of ``torch.cuda``: those of ``torch.remote_accelerator``, which accept CUDA devices here."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from djinn.record import devices
from djinn.session import runtime
from djinn_plugins.device.accelerator.patches import Patches
from djinn_plugins.run.cuda.classes import class_like
from djinn_plugins.run.cuda.translation import with_device

__all__ = ("replace",)

_FIRST = (
    "current_stream default_stream device_memory_used get_device_name get_device_properties get_rng_state "
    "max_memory_allocated max_memory_reserved mem_get_info memory_allocated memory_reserved memory_stats "
    "memory_stats_as_nested_dict memory_summary reset_accumulated_memory_stats reset_peak_memory_stats set_device "
    "synchronize"
).split()
"""Functions whose first argument is a device, if any."""
_SECOND = ("set_rng_state",)
_NONE = (
    "empty_cache get_rng_state_all initial_seed is_bf16_supported is_initialized is_tf32_supported manual_seed "
    "manual_seed_all seed seed_all set_rng_state_all set_stream stream StreamContext"
).split()
_MODULES = (torch.cuda, torch.cuda._utils, torch.cuda.graphs, torch.cuda.memory, torch.cuda.random, torch.cuda.streams)
"""Modules that publish them; names that were imported from there earlier stay what they were."""
_NEEDS_CUDA = (
    "CUDAGraph CUDAPluggableAllocator ExternalStream GreenContext MemPool _snapshot caching_allocator_alloc "
    "caching_allocator_delete caching_allocator_disabled caching_allocator_enable change_current_allocator check_error "
    "clock_rate cudart "
    "current_blas_handle current_solver_handle get_allocator_backend get_per_process_memory_fraction "
    "get_stream_from_external graph graph_pool_handle host_memory_stats "
    "host_memory_stats_as_nested_dict list_gpu_processes make_graphed_callables memory_snapshot "
    "memory_usage power_draw reset_accumulated_host_memory_stats "
    "reset_peak_host_memory_stats set_per_process_memory_fraction temperature use_mem_pool "
    "utilization"
).split()
"""Functions and classes of the process's own CUDA runtime."""
_LEFT_OUT = {
    "_record_memory_history": "No memory history is recorded: the memory is the server's.",
    "_dump_snapshot": "No snapshot of memory is written: the memory is the server's.",
}
"""Functions that only observe: the program continues without them."""


def replace(patches: Patches) -> None:
    """Replace them until the patches are closed."""
    remote = _remote()
    delegated = {
        **{name: _with_device(getattr(remote, name), 0) for name in _FIRST},
        **{name: _with_device(getattr(remote, name), 1) for name in _SECOND},
        **{name: getattr(remote, name) for name in _NONE},
        "Stream": class_like(remote.Stream, _with_device(remote.Stream, 0)),
        "Event": class_like(type(remote.Event()), remote.Event),
    }
    refused = {name: _refusal(name) for name in _NEEDS_CUDA}
    index_of = _index_of(torch.cuda._utils._get_device_index)
    left_out = {name: _left_out(why) for name, why in _LEFT_OUT.items()}
    for name, item in {**delegated, **refused, **left_out, **_FACTS, "_get_device_index": index_of}.items():
        for module in _MODULES:
            if name in vars(module):
                patches.set(module, name, item)
    patches.set(torch.cuda.nvtx, "_nvtx", _MARKERS)
    for name in ("start", "stop"):
        patches.set(torch.cuda.profiler, name, lambda: None)
    for name in torch.cuda.tunable.__all__:
        off = (lambda: False) if name.endswith("is_enabled") else _refusal(f"tunable.{name}")
        patches.set(torch.cuda.tunable, name, off)
    patches.set(remote.Stream, "cuda_stream", property(lambda self: self.stream_id))
    patches.set(remote.Stream, "priority_range", staticmethod(lambda: (0, 0)))
    modes = _SyncDebugMode()
    patches.set(torch.cuda, "get_sync_debug_mode", modes.get)
    patches.set(torch.cuda, "set_sync_debug_mode", modes.set)


class _SyncDebugMode:
    """What is to happen where the program waits: it is kept, and a warning says that it has no effect."""

    def __init__(self) -> None:
        self._mode = 0

    def get(self) -> int:
        """Return the mode: 0, 1 or 2."""
        return self._mode

    def set(self, debug_mode: int | str) -> None:
        """Set the mode, by its number or name.

        Raises:
            RuntimeError: There is no such mode.
        """
        named = _SYNC_DEBUG_MODES.index(debug_mode) if debug_mode in _SYNC_DEBUG_MODES else debug_mode
        if named not in range(len(_SYNC_DEBUG_MODES)):
            raise RuntimeError("invalid value of debug_mode, expected one of `default`, `warn`, `error`")
        if named:
            warnings.warn("torch.cuda.set_sync_debug_mode finds no waits for a remote device. djinn.stats() has them.",
                          stacklevel=2)
        self._mode = int(named)


_SYNC_DEBUG_MODES = ("default", "warn", "error")
_MARKERS = SimpleNamespace(
    **dict.fromkeys(("rangePushA", "rangePop", "rangeStartA"), lambda *_: _NOT_TRACKED),
    **dict.fromkeys(("rangeEnd", "markA", "deviceRangeStart", "deviceRangeEnd"), lambda *_: None),
)
"""Markers for NVIDIA's profilers, none of which looks at this process: they do nothing, as where none is attached."""
_NOT_TRACKED = -2
"""What NVIDIA's library returns if no profiler is attached."""


def _remote() -> Any:
    return getattr(torch, devices.logical_device().type)


def _with_device(function: Callable[..., Any], position: int) -> Callable[..., Any]:
    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > position:
            args = (*args[:position], with_device(args[position]), *args[position + 1:])
        elif "device" in kwargs:
            kwargs["device"] = with_device(kwargs["device"])
        return function(*args, **kwargs)

    return call


def _refusal(name: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"torch.cuda.{name} needs a CUDA device of this process, and here CUDA is a name of the "
                           "remote device. Leave the call out where torch.version.cuda is None, or run the program "
                           "on the machine that has the device.")

    original = getattr(torch.cuda, name, None)
    return class_like(original, refuse) if isinstance(original, type) else refuse


def _left_out(why: str) -> Callable[..., None]:
    def leave_out(*args: Any, **kwargs: Any) -> None:
        warnings.warn(f"{why} torch.cuda.memory_stats() has the present and the highest amounts, and `djinn top` shows "
                      "them.", stacklevel=2)

    return leave_out


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
    if index < 0:
        return -1
    _remote().set_device(with_device(index))
    return 0


def _init() -> None:
    """Start a session unless one is running."""
    runtime.ensure_initialized()


def _capability(device: Any = None) -> tuple[int, int]:
    """Return the compute capability of the server's device; zeros if it is no CUDA device."""
    found = torch.cuda.get_device_properties(device)
    return found.major, found.minor


_FACTS: dict[str, Callable[..., Any]] = {
    "is_available": lambda: True,
    "device_count": devices.device_count,
    "current_device": lambda: 0,
    "get_device_capability": _capability,
    "init": _init,
    "_lazy_init": lambda: None,
    "_exchange_device": _exchange_device,
    "_maybe_exchange_device": lambda index: _exchange_device(index),  # noqa: PLW0108  # dynamo tells the two apart
    "_is_in_bad_fork": lambda: False,
    "is_current_stream_capturing": lambda: False,
    "can_device_access_peer": lambda *_: False,
    "ipc_collect": lambda: None,
    "get_arch_list": list,
    "get_gencode_flags": str,
}
"""Answers that do not depend on the server: no CUDA code is built in, no graph is captured, no memory is shared."""

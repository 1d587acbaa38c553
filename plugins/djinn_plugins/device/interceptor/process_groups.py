"""Process groups and meshes of ``torch.distributed`` on the device: gloo is its backend, and meshes accept its name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from djinn.session import runtime
from djinn_plugins.common.device_report import device_of
from djinn_plugins.common.imports import follow_imports
from djinn_plugins.device.interceptor.backend import BackendModule

__all__ = ("install",)

_BACKEND = "gloo"
_BEFORE_DEVICE_IDS = 2
"""Positional parameters of a barrier before the numbers of devices."""
_SHARDING = {"torch.distributed.fsdp._fully_shard._fully_shard": ("fully_shard", None),
             "torch.distributed._composable.replicate_with_fsdp": ("replicate", ("replicate",))}
"""Functions that move a module to the devices of a mesh, and the names of the dimensions of the one that they make."""


def install(kind: str) -> None:
    """Register the backend, and change what makes groups and meshes; once in a process.

    Args:
        kind: The type of the device.
    """
    if not dist.is_available():
        return
    from torch.distributed import device_mesh, distributed_c10d

    made: Any = distributed_c10d.Backend
    made.default_device_backend_map[kind] = _BACKEND
    made.backend_capability[_BACKEND] = [*made.backend_capability[_BACKEND], kind]
    made = distributed_c10d.BackendConfig
    made.__init__ = _with_copies(made.__init__, kind)
    made = device_mesh.DeviceMesh
    made.__init__ = _with_session(made.__init__, kind)
    _redefine(device_mesh._get_device_handle, functools.partial(_handles, kind))
    _redefine(device_mesh.init_device_mesh, functools.partial(_named, kind))
    _redefine(inspect.unwrap(distributed_c10d.barrier), functools.partial(_anywhere, kind))
    made = torch.nn.parallel.DistributedDataParallel
    for name in ("_ddp_init_helper", "_set_static_graph"):
        setattr(made, name, _with_map_at_home(getattr(made, name), kind))
    follow_imports(_SHARDING, functools.partial(_shard_there, kind))


def _redefine(function: Any, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Change what a function of PyTorch does, for those as well that have taken it by its name before.

    Args:
        function: A function of a module, without a closure.
        make: Makes the new function from one that does the same as the present one.
    """
    original = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    original.__kwdefaults__ = function.__kwdefaults__
    name = f"_djinn_{function.__name__}"
    function.__globals__[name] = make(original)
    function.__code__ = _call.__code__.replace(co_name=function.__name__, co_names=(name,))
    function.__wrapped__ = original


def _call(*args: Any, **kwargs: Any) -> Any:
    """Call a function whose name `_redefine` replaces."""
    return _redefined(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821  # see above


def _with_copies(original: Callable[..., None], kind: str) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, backend: Any) -> None:  # noqa: N807  # replaces that method
        """As the original; a group of the device also takes tensors of the CPU, as the device's go as copies there."""
        original(self, backend)
        backends = self.device_backend_map
        if kind in backends:
            backends.setdefault("cpu", backends[kind])

    return __init__


def _with_session(original: Callable[..., None], kind: str) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # replaces that method
        """As the original; a process's device is its session's, and not chosen by the rank among those of a host."""
        if device_type == kind:
            runtime.ensure_initialized()
        original(self, str(device_type), *args, **kwargs)

    return __init__


class _Handle(BackendModule):
    """The device's module as meshes see it: the device is there, whichever is the accelerator of the process."""

    def is_available(self) -> bool:
        """Return True: a mesh of the device exists."""
        return True

    def __getattribute__(self, name: str) -> Any:
        # Distributed tensors divide CUDA's random numbers between processes, if there is a function for it.
        if name == "set_rng_state" and device_of(runtime.current().backend.welcome).kind != "cuda":
            raise AttributeError(name)
        return super().__getattribute__(name)


def _anywhere(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def barrier(*args: Any, **kwargs: Any) -> Any:
        # Programs name devices by ranks among the processes of a host. A process has one device, and gloo none.
        if torch._C._get_accelerator().type == kind:
            args = args[:_BEFORE_DEVICE_IDS]
            kwargs.pop("device_ids", None)
        return original(*args, **kwargs)

    return barrier


def _handles(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
    handle = _Handle()

    @functools.wraps(original)
    def get_device_handle(device_type: str = "cuda") -> Any:
        return handle if device_type == kind else original(device_type)

    return get_device_handle


class _Letters(str):
    """The name of the device, which has an underscore: PyTorch takes a name with one for a name with an index."""

    __slots__ = ()

    def isalpha(self) -> bool:
        """Return True: it names a type of devices."""
        return True


def _named(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return original(_Letters(kind) if device_type == kind else device_type, *args, **kwargs)

    return init_device_mesh


class _MapAtHome(TorchDispatchMode):
    """Makes integers on the CPU: which parameters a reducer has seen; it would send them through pinned memory.

    Its other tensors are gradients.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped there
        self._kind = kind

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device, named = (kwargs or {}).get("device"), kwargs or {}
        if device is not None and device.type == self._kind and named.get("dtype") is torch.int32:
            named = {**named, "device": torch.device("cpu")}
        return func(*args, **named)


def _with_map_at_home(original: Callable[..., None], kind: str) -> Callable[..., None]:
    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> None:
        with _MapAtHome(kind):
            original(*args, **kwargs)

    return method


def _shard_there(kind: str, module: ModuleType) -> None:
    name, dimensions = _SHARDING[module.__name__]
    _redefine(inspect.unwrap(getattr(module, name)), functools.partial(_on_device, kind, dimensions))


def _on_device(kind: str, dimensions: tuple[str, ...] | None, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def shard(module: Any, *args: Any, **kwargs: Any) -> Any:
        """As the original; a module on the device stays there, also where another accelerator is the process's."""
        modules = [module] if isinstance(module, torch.nn.Module) else module
        if kwargs.get("mesh") is None and any(parameter.device.type == kind for one in modules
                                              for parameter in one.parameters()):
            from torch.distributed import device_mesh

            if not dist.is_initialized():
                dist.init_process_group()
            kwargs["mesh"] = device_mesh.init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=dimensions)
        return original(module, *args, **kwargs)

    return shard

"""TorchScript modules on the device are read and written as modules on the CPU: PyTorch does both in C++, by addresses.

A copy of a module in C++ asks for a clone of each of its tensors. So a copy is made whose tensors are on the other
side: all of them, also attributes and members of lists that are neither parameters nor buffers. Constants of graphs
belong to the code, which copies share; they are replaced in place.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from djinn.errors import UnsupportedTensorError
from djinn.record import devices
from djinn.record.tensor import LazyTensor
from djinn.session import runtime
from djinn_plugins.device.interceptor import saving

__all__ = ("install",)

_SAVES = ("save", "save_to_buffer", "_save_for_mobile", "_save_to_buffer_for_mobile")
_FUNCTIONS_THAT_SAVE = ("_save_jit_module", "_save_jit_module_to_bytes")
_READERS: Mapping[str, int] = {
    "import_ir_module": 2, "import_ir_module_from_buffer": 2, "_import_ir_module_from_package": 3}
"""Functions that read a module, and where in their arguments the device is."""
_MOBILE_READERS = ("_load_for_lite_interpreter", "_load_for_lite_interpreter_from_buffer")
_CPU = torch.device("cpu")


def install() -> None:
    """Replace what reads and what saves modules and functions."""
    for kind, names in ((torch._C.ScriptModule, _SAVES), (torch._C.ScriptFunction, _SAVES[:2]),
                        (torch._C.ScriptModuleSerializer, ("serialize",))):
        for name in names:
            setattr(kind, name, _saving(getattr(kind, name), 1 if name == "serialize" else 0))
    for name in _FUNCTIONS_THAT_SAVE:
        setattr(torch._C, name, _saving(getattr(torch._C, name), 0))
    for name, place in _READERS.items():
        read = _reading(getattr(torch._C, name), place)
        for owner in (torch._C, torch):
            if hasattr(owner, name):
                setattr(owner, name, read)
    for name in _MOBILE_READERS:
        setattr(torch._C, name, _refusing(getattr(torch._C, name)))


def _saving(save: Callable[..., Any], position: int) -> Callable[..., Any]:
    @functools.wraps(save)
    def save_copy(*args: Any, **kwargs: Any) -> Any:
        if not runtime.is_initialized():
            return save(*args, **kwargs)
        with _brought_home(args[position]) as local:
            return save(*args[:position], local, *args[position + 1:], **kwargs)

    return save_copy


def _reading(read: Callable[..., Any], place: int) -> Callable[..., Any]:
    @functools.wraps(read)
    def read_here(unit: Any, *args: Any, **kwargs: Any) -> Any:
        given = (unit, *args)
        device = given[place] if place < len(given) else None
        if not _is_remote(device):
            return read(*given, **kwargs)
        where = devices.checked_device(torch.device(device))  # type: ignore[arg-type]  # a device, as was just found
        known = {function.qualified_name for function in unit.get_functions()}
        module = read(*given[:place], _CPU, *given[place + 1:], **kwargs)
        move = _Move(where)
        for constant in _constants(function.graph for function in unit.get_functions()
                                   if function.qualified_name not in known):
            constant.replace([move(tensor) for tensor in constant.tensors])
        return _copied(module, move)

    return read_here


def _refusing(read: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(read)
    def refuse(source: Any, map_location: Any = None) -> Any:
        if _is_remote(map_location):
            raise UnsupportedTensorError(
                "PyTorch's lite interpreter has no modules on a remote accelerator.",
                hint="Load the file with torch.jit.load, which takes this map_location, if it was saved by "
                "torch.jit.save; else give map_location='cpu'.")
        return read(source, map_location)

    return refuse


def _is_remote(device: Any) -> bool:
    return device is not None and torch.device(device).type == devices.logical_device().type


class _Move:
    """Uploads tensors; those that share a storage share it there, too."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[int, tuple[torch.UntypedStorage, saving.RemoteStorage]] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return tensor.to(self._device)
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known[storage._cdata] = storage, saving.uploaded(storage, self._device)
        made = torch.empty(0, dtype=tensor.dtype, device=self._device)
        made.set_(self._known[storage._cdata][1], tensor.storage_offset(), tensor.size(), tensor.stride())
        return made.requires_grad_(tensor.requires_grad)


class _Clones(TorchDispatchMode):
    """Gives PyTorch another tensor where it asks for a clone."""

    def __init__(self, clone: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped there
        self._clone = clone

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            return self._clone(args[0])
        return func(*args, **(kwargs or {}))


def _copied(module: Any, clone: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Copy a module of TorchScript; ``clone`` gives the copy of each of its tensors."""
    with torch.no_grad(), _Clones(clone):
        return copy.deepcopy(module)


@attrs.frozen
class _Constant:
    """A constant of a graph that consists of tensors."""

    node: Any
    is_list: bool
    tensors: list[torch.Tensor]

    def replace(self, tensors: list[torch.Tensor]) -> None:
        """Give it other tensors."""
        if self.is_list:
            self.node.ts_("value", tensors)
        else:
            self.node.t_("value", tensors[0])


def _constants(graphs: Iterable[Any]) -> Iterator[_Constant]:
    blocks = list(graphs)
    while blocks:
        for node in blocks.pop().nodes():
            blocks.extend(node.blocks())
            if node.kind() == "prim::Constant" and node.hasAttribute("value"):
                kind = node.kindOf("value")
                if kind in ("t", "ts"):
                    yield _Constant(node, kind == "ts", node.ts("value") if kind == "ts" else [node.t("value")])


def _graphs(script: Any) -> Iterator[Any]:
    """Return the graphs of a function, or of all methods of a module."""
    if not isinstance(script, torch._C.ScriptModule):
        yield script.graph
        return
    modules = [script]
    while modules:
        module = modules.pop()
        modules.extend(child for _, child in torch._C.ModuleDict(module).items())
        for name in module._method_names():
            yield module._get_method(name).graph


@contextmanager
def _brought_home(script: Any) -> Iterator[Any]:
    """Give a copy of a module on the CPU, and have constants there meanwhile; itself, if nothing is on the device."""
    lazy: dict[int, LazyTensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, LazyTensor):
            lazy[id(tensor)] = tensor
        return tensor

    constants = [constant for constant in _constants(_graphs(script))
                 if {type(note(tensor)) for tensor in constant.tensors} & {LazyTensor}]
    is_module = isinstance(script, torch._C.ScriptModule)
    if is_module:
        _copied(script, note)
    if not lazy:
        yield script
        return
    local = dict(zip(lazy, saving.brought_home([*lazy.values()]), strict=True))
    try:
        for constant in constants:
            constant.replace([local.get(id(tensor), tensor) for tensor in constant.tensors])
        yield _copied(script, lambda tensor: local.get(id(tensor), tensor)) if is_module else script
    finally:
        for constant in constants:
            constant.replace(constant.tensors)

"""The function modes for tracing models and rehearsing graphs."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # PyTorch's own name for it
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from djinn.ir.schema import facts_of
from djinn.ir.spec import tensors_in
from djinn.record.dispatcher import dispatcher
from djinn_plugins.graph.fx_source.dry_run import DryRunSession

_OF_NUMBERS = (torch.tensor, torch.as_tensor)
_INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
_MOVES = (torch.Tensor.cpu, torch.Tensor.cuda)
_SETTINGS = ("cudnn_enable", "cudnn_enabled")
_NAMES_A_DEVICE = (torch.Tensor.to, torch.amp.autocast_mode._enter_autocast)
"""Functions that take a device, or its type, as a positional string."""


class OnRemote(TorchFunctionMode):
    """Gives factories without a device the logical device, and replaces noted operators by the functions behind them.

    Some functions do more on the remote device than the operator that they result in: attention uses a fused kernel,
    and composites stay whole without gradients.

    Args:
        rehearsal: The rehearsal that owns tensors made from numbers.
    """

    def __init__(self, rehearsal: DryRunSession) -> None:
        super().__init__()
        self._rehearsal = rehearsal
        self._device = rehearsal.device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.new_tensor:
            func, args, kwargs = torch.tensor, args[1:], {"dtype": args[0].dtype, "device": args[0].device, **kwargs}
        if func in _INDEXING:
            args = (args[0], self._index(args[1]), *args[2:])
        if func in _device_constructors() and kwargs.get("device") is None:
            kwargs["device"] = self._device
        if func in _OF_NUMBERS and not tensors_in(args) and torch.device(kwargs["device"]).type == self._device.type:
            # Below all modes, PyTorch would upload them to the running session.
            return self.from_numbers(func(*args, **{**kwargs, "device": torch.device("cpu")}))
        return self.call(func, args, kwargs)

    def _index(self, index: Any) -> Any:
        """Convert lists of numbers to tensors, as PyTorch would do below all modes."""
        if isinstance(index, tuple):
            return tuple(map(self._index, index))
        return self.from_numbers(torch.tensor(index)) if isinstance(index, list) and _is_plain(index) else index

    def from_numbers(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the remote tensor for one made from numbers; the device makes one without elements itself."""
        if tensor.numel():
            return self._rehearsal.upload(tensor)
        made: torch.Tensor = torch.ops.aten.empty_strided.default(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=self._device)
        return made

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the actual call."""
        if isinstance(function, torch._ops.OpOverload):
            function = function_of(function) or function
        return function(*args, **kwargs)

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor to use for one that a graph contains: itself, because it was not remote."""
        return tensor

    def lifted(self, constant: torch.Tensor) -> torch.Tensor:
        """Return the tensor to use where a graph takes a constant as a new tensor: the constant itself."""
        return constant


class InRemoteTerms(OnRemote):
    """Redirects a graph's uses of its tracer's device to the remote one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _MOVES:
            return args[0]
        if any(isinstance(item, (str, torch.device)) for item in args):
            args = tuple(self._moved(item, is_text=func in _NAMES_A_DEVICE) for item in args)
        for name in ("device", "device_type"):
            if name in kwargs:
                kwargs[name] = self._moved(kwargs[name], is_text=True)
        return super().__torch_function__(func, types, args, kwargs)

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call it with the current backend settings; tracers switch some off, and record that in the graph."""
        if isinstance(function, torch._ops.OpOverload):
            for position, argument in enumerate(function._schema.arguments[: len(args)]):
                if argument.name in _SETTINGS:
                    args = (*args[:position], torch.backends.cudnn.enabled, *args[position + 1 :])
        return super().call(function, args, kwargs)

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return its remote copy."""
        return self._rehearsal.upload(tensor)

    def lifted(self, constant: torch.Tensor) -> torch.Tensor:
        """Return the constant, or the tensor without elements that the device makes in its place."""
        return constant if constant.numel() else self.from_numbers(constant)

    def _moved(self, item: Any, *, is_text: bool) -> Any:
        if isinstance(item, torch.device):
            return item if item.type == "meta" else self._device
        return self._device.type if is_text and item in ("cpu", "cuda") else item


def _is_plain(items: Any) -> bool:
    return isinstance(items, int) or (isinstance(items, list) and all(map(_is_plain, items)))


@cache
def function_of(operator: torch._ops.OpOverload) -> Any:
    """Return the function of PyTorch's Python interface for a composite operator, if that function has a handler."""
    if not facts_of(operator).is_composite:
        return None
    name = operator.overloadpacket.__name__
    found = (getattr(owner, name, None) for owner in (torch, F, torch._C._nn))
    return next((function for function in found if function in dispatcher.functions), None)


@cache
def is_special(function: Any) -> bool:
    """Whether a function of PyTorch's Python interface is a composite operator with a handler."""
    name = getattr(function, "__name__", "").strip("_")
    packet = getattr(torch.ops.aten, name, None) if function in dispatcher.functions else None
    overloads = [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]
    # TorchScript's own overloads never reach a device.
    return any(torch._C._dispatch_has_kernel(overload.name()) and facts_of(overload).is_composite
               for overload in overloads)

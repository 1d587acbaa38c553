"""Numbers that are tensors of the device, such as ``alpha`` of ``add_``: they stay where they are.

PyTorch asks such a tensor for its number, which is a wait. Here the executor reads the number in the step before, and
calls the operator with it: the same kernel with the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from djinn.ir.schema import facts_of
from djinn.ir.tape import Node
from djinn.ir.value import Slot, Value
from djinn.record.dispatcher import torch_dispatch
from djinn.record.tensor import LazyTensor, wrap
from djinn.session import runtime
from djinn_plugins.device.interceptor import gradients
from djinn_plugins.device.interceptor.fast_path import call_plainly

if TYPE_CHECKING:
    from djinn.session.session import Session

_NAMES = ("alpha", "beta", "value")
_TAKING = (
    "add sub subtract rsub addcmul addcdiv addmm addmv addr addbmm baddbmm index_add _foreach_add _foreach_sub "
    "_foreach_addcmul _foreach_addcdiv").split()
TAKING = [getattr(owner, name) for taking in _TAKING for name in (taking, f"{taking}_")
          for owner in (torch, torch._C.TensorBase) if hasattr(owner, name)]
"""Functions that take such numbers."""


def call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function; if nothing else needs its numbers here, the executor reads them."""
    if kwargs:
        numbers = {name: kwargs[name] for name in _NAMES if type(kwargs.get(name)) is LazyTensor}
        if numbers and all(map(_is_number, numbers.values())) and not gradients.are_needed(args, kwargs):
            session = runtime.current()
            # Between executors, only tensors travel.
            if len(session.backend.executors) == 1:
                with _Reading(session, numbers) as reading:
                    return call_plainly(function, args, {**kwargs, **reading.stand_ins})
    return call_plainly(function, args, kwargs)


def _is_number(tensor: LazyTensor) -> bool:
    # For a truth value, PyTorch's parser chooses by which one it is.
    return not tensor.dim() and tensor.dtype is not torch.bool


class _Reading(TorchDispatchMode):
    """Puts numbers that the executor reads in the place of others, in the operator that they reach.

    Args:
        session: The session.
        numbers: The tensors, by the names of the arguments.

    Attributes:
        stand_ins: Numbers of the same types; no defaults, which PyTorch leaves out.
    """

    def __init__(self, session: Session, numbers: dict[str, LazyTensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped there
        self._session = session
        self._numbers = numbers
        self.stand_ins = {name: 2j if tensor.dtype.is_complex else 2.0 if tensor.dtype.is_floating_point else 2
                          for name, tensor in numbers.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        positions = dict(zip(facts_of(func).argument_names, range(len(args)), strict=False))
        read = {name: _read(self._session, tensor) for name, tensor in self._numbers.items()
                if name in given or name in positions}
        if not read:
            return func(*args, **given)
        by_position = {positions[name]: number for name, number in read.items() if name in positions}
        args = [by_position.get(place, item) for place, item in enumerate(args)]
        return torch_dispatch(LazyTensor, func, types, tuple(args), {
            **given, **{name: number for name, number in read.items() if name in given}})


def _read(session: Session, tensor: LazyTensor) -> LazyTensor:
    """Record that the executor reads a number, and return what stands for it."""
    recorder, operator = session.recorder, torch.ops.aten._local_scalar_dense.default
    plan = recorder.plan(recorder.binding(operator), operator, (tensor,), {})
    number = next(recorder.numbers)
    slot, spec = Slot(number, number), tensor._value.spec
    recorder.append(Node(plan.signature, (tensor._value.slot,), (slot,), ()))
    return wrap(spec, Value(slot, spec, recorder.released))

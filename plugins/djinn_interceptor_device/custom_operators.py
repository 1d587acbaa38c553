"""Operators that the program has defined in Python, with ``torch.library``, and that its server does not run.

Their functions run here, and the operations in them on the server, as if the program had called the functions itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._pytree import tree_map_only

from djinn.errors import UnknownOperatorError
from djinn.ir.schema import facts_of
from djinn.kinds.interceptor import Handler
from djinn.record import devices
from djinn_interceptor_device import collectives
from djinn_interceptor_device.overlaps import WithWrites, ask

if TYPE_CHECKING:
    from djinn.session.session import Session

__all__ = ("WithCustomOperators",)

_KEYS = ("PrivateUse1", "CUDA", "CompositeExplicitAutograd")
"""Keys of kernels that run for this device, in order."""
_NOT_THE_PROGRAMS = ("aten", "djinn", "prim", "prims")
"""Namespaces of operators that a program does not define, and that each server runs."""
_DECOMPOSES = torch._C.DispatchKey.CompositeExplicitAutograd
_are_run_there: weakref.WeakKeyDictionary[Session, dict[Any, bool]] = weakref.WeakKeyDictionary()


class WithCustomOperators(WithWrites):
    """Handlers, with one for each such operator."""

    def _writer(self, operator: Any) -> Handler | None:
        if operator.namespace in collectives.NAMESPACES:
            return collectives.run
        if _is_generated(operator):
            return _decompose
        is_custom = _function_of(operator) is not None and not _is_run_here(self._session, operator)
        return _run if is_custom else super()._writer(operator)


def _is_generated(operator: Any) -> bool:
    """Whether PyTorch has made an operator of one that writes; AOTAutograd calls these, and servers refuse them."""
    return torch.Tag.generated in operator.tags and not facts_of(operator).written and (
        torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), _DECOMPOSES.name))


def _decompose(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let PyTorch copy the operands, and call the operator that writes."""
    return operator._op_dk(_DECOMPOSES, *args, **kwargs)


def _is_run_here(session: Session, operator: Any) -> bool:
    """Whether the executor is in this process, and so has the kernel that the operator may have for the CPU."""
    return _is_local(session) and any(
        torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key)
        for key in ("CPU", "CompositeExplicitAutograd"))


def _is_local(session: Session) -> bool:
    return session.backend.address.startswith("local:")


def _function_of(operator: Any) -> Callable[..., Any] | None:
    """Return the function of an operator for this device, if the program has defined one in Python."""
    defined = OPDEFS.get(operator.name().partition(".")[0])
    functions = {} if defined is None else defined._backend_fns
    kinds = (devices.logical_device().type, None, "cuda")
    return next((functions[kind] for kind in kinds if kind in functions), None) or _kernel_of(operator)


def _kernel_of(operator: Any) -> Callable[..., Any] | None:
    """Return the kernel that the program has given an operator with ``Library.impl``."""
    if operator.namespace in _NOT_THE_PROGRAMS:
        return None
    _, _, name = operator.name().partition("::")
    key = next((key for key in _KEYS if f"{operator.namespace}/{name}/{key}" in torch.library._impls), None)
    return None if key is None else partial(operator._op_dk, getattr(torch._C.DispatchKey, key))


def _run(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the function of an operator, or let it be recorded if the server runs it, which its first call finds out."""
    known = _are_run_there.setdefault(session, {})
    if operator not in known:
        known[operator] = _is_run_there(session, operator, args, kwargs)
    function = _function_of(operator)
    return NotImplemented if known[operator] or function is None else function(*args, **kwargs)


def _is_run_there(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if _is_local(session):
        return False
    # On copies, after everything else: an unknown operator spoils its operands, and what is sent along with it.
    copied_args, copied_kwargs = tree_map_only(
        torch.Tensor, lambda tensor: tensor.to(session.device, copy=True), (args, kwargs))
    session.flush()
    try:
        made = ask(session, operator, copied_args, copied_kwargs)
        session.synchronize()
    except UnknownOperatorError:
        return False
    del made  # alive until here, as what nobody needs is not run
    return True

"""Operators that the program has defined, with ``torch.library`` or an extension, and that its server does not run.

Their functions in Python run here, and the operations in them on the server, as if the program had called the functions
itself. What has only a kernel for the CPU, runs here on copies.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch._library.custom_ops import OPDEFS
from torch._library.utils import check_aliasing_constraint
from torch.utils._pytree import tree_map_only

from djinn.errors import UnknownOperatorError
from djinn.ir.schema import ReturnKind, facts_of
from djinn.ir.spec import tensors_in
from djinn.kinds.interceptor import Handler
from djinn.record import devices
from djinn.record.call_plans import lazy_tensors
from djinn.record.tensor import LazyTensor, user_frame
from djinn_plugins.common.tracing.waits import DjinnWarning
from djinn_plugins.device.interceptor import collectives
from djinn_plugins.device.interceptor.overlaps import WithWrites, ask

if TYPE_CHECKING:
    from djinn.session.session import Session

__all__ = ("WithCustomOperators",)

_KEYS = ("PrivateUse1", "CUDA", "CompositeExplicitAutograd")
"""Keys of kernels that run for this device, in order."""
_NOT_THE_PROGRAMS = ("aten", "djinn", "prim", "prims")
"""Namespaces of operators that a program does not define, and that each server runs."""
_COUNTS_WRITES = torch._C.DispatchKey.ADInplaceOrView
_DECOMPOSES = torch._C.DispatchKey.CompositeExplicitAutograd
_are_run_there: weakref.WeakKeyDictionary[Session, dict[Any, bool]] = weakref.WeakKeyDictionary()


class WithCustomOperators(WithWrites):
    """Handlers, with one for each such operator."""

    def _writer(self, operator: Any) -> Handler | None:
        if operator.namespace in collectives.NAMESPACES:
            return collectives.run
        if _is_generated(operator):
            return _decompose
        is_custom = (_function_of(operator) is not None or _can_run_on_copies(operator)) and not _is_run_here(
            self._session, operator)
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
    has_kernel = partial(torch._C._dispatch_has_kernel_for_dispatch_key, operator.name())
    # How long a list of results is has to be known before.
    return _is_local(session) and any(map(has_kernel, ("CPU", "CompositeExplicitAutograd"))) and (
        ReturnKind.LIST not in facts_of(operator).returns or has_kernel("Meta"))


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
        if not known[operator] and _function_of(operator) is None and not _is_local(session):
            _warn(operator)
    if known[operator]:
        return NotImplemented
    function = _function_of(operator)
    if function is None:
        return _on_copies(session, operator, args, kwargs)
    return _called(function, operator, args, kwargs)


def _called(function: Callable[..., Any], operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function as eager does: writes are counted, also undeclared ones, and results share no memory.

    Raises:
        RuntimeError: A result shares memory with an argument or with another result.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set()
    if not torch.is_inference_mode_enabled():
        excluded = excluded.remove(_COUNTS_WRITES)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        made = function(*args, **kwargs)
    defined = OPDEFS.get(operator.name().partition(".")[0])
    if defined is not None:
        known = {tensor._value.slot.storage for tensor in lazy_tensors(args, kwargs)}
        for tensor in tensors_in([made]):
            if isinstance(tensor, LazyTensor):
                if tensor._value.slot.storage in known:
                    # PyTorch looks for memory, which these have not; the error is its own.
                    check_aliasing_constraint(defined._name, [tensor], tensor, lambda: defined._init_fn.__module__)
                known.add(tensor._value.slot.storage)
    return made


def _can_run_on_copies(operator: Any) -> bool:
    """Whether an operator of the program has a kernel for the CPU, and its results are no views of its arguments."""
    if operator.namespace in _NOT_THE_PROGRAMS or not torch._C._dispatch_has_kernel_for_dispatch_key(
            operator.name(), "CPU"):
        return False
    facts = facts_of(operator)
    return all(alias is None or kind is ReturnKind.WRITTEN
               for kind, alias in zip(facts.returns, facts.aliases, strict=True))


def _warn(operator: Any) -> None:
    frame = user_frame()
    warnings.warn_explicit(
        f"{operator.name()} has only a kernel for the CPU, and the server does not run it: it runs here, on copies of "
        f"its arguments, and each call waits. Serve with the extension and --allow-namespace {operator.namespace}, or "
        "register a kernel in Python for PrivateUse1.",
        DjinnWarning, frame.f_code.co_filename, frame.f_lineno)


def _on_copies(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Download the arguments, call the kernel, and upload what it gives and what it writes."""
    facts, lazy = facts_of(operator), lazy_tensors(args, kwargs)
    named = {**dict(zip(facts.argument_names, args, strict=False)), **kwargs}
    written = [tensor for tensor in tensors_in([item for name, item in named.items() if name in facts.written])
               if isinstance(tensor, LazyTensor)]
    unique = {id(tensor): tensor for tensor in lazy}
    storages = {tensor._value.slot.storage for tensor in unique.values()}
    if written and len(storages) < len(unique):
        raise UnknownOperatorError(
            f"{operator.name()} writes memory of which two of its arguments are views, and the server does not run it.",
            hint="Give it copies of its other arguments.")
    homes = dict(zip(unique, session.materialize(list(unique.values())), strict=True))
    # A tensor may keep what was downloaded of it.
    homes.update((id(tensor), homes[id(tensor)].clone()) for tensor in written)
    made = operator(*tree_map_only(LazyTensor, lambda tensor: homes[id(tensor)], args),
                    **tree_map_only(LazyTensor, lambda tensor: homes[id(tensor)], kwargs))
    for tensor in {id(tensor): tensor for tensor in written}.values():
        tensor.copy_(homes[id(tensor)])
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
    arguments = {id(homes[key]): tensor for key, tensor in unique.items()}
    return tree_map_only(torch.Tensor, lambda result: arguments.get(id(result)) if id(result) in arguments
                         else session.upload(result), made)


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
    del made  # alive until here: a result without a reference is not computed
    return True

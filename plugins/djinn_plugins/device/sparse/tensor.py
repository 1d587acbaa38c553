"""Sparse tensors on a remote accelerator, as the client has them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from threading import get_ident
from typing import Any

import torch

from djinn.record import devices
from djinn.record.dispatcher import dispatcher, pending_errors

__all__ = ("LazySparse", "at_home", "made_of", "same_parts")

_without_functions = torch._C.DisableTorchFunctionSubclass
_below_autograd = torch._C._AutoDispatchBelowAutograd
aten = torch.ops.aten
_BACKWARD = frozenset((torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad))
"""Functions with a handler that gives back the errors that a device guard of autograd takes."""


class LazySparse(torch.Tensor):
    """A sparse tensor on a remote accelerator. Its components are lazy tensors.

    Its operations are recorded. One whose result has as many elements as its operands' elements tell, such as
    ``coalesce``, waits for that count.
    """

    _parts: tuple[Any, ...]
    _is_unique: bool
    __torch_dispatch__: Any = classmethod(lambda cls, func, types, args=(), kwargs=None: _dispatched(
        func, args, kwargs or {}))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = dispatcher.functions.get(func) if func in _BACKWARD else None
        try:
            if handler is not None:
                return handler(func, args, kwargs or {})
            return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})
        except SystemError:
            hidden = pending_errors.get(get_ident())
            if hidden is None:
                raise
            raise hidden from hidden.__cause__
        finally:
            pending_errors.pop(get_ident(), None)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # untyped there
        with _without_functions():
            needs_gradient, function, device = self.requires_grad, self.grad_fn, self.device
            suffix = (f", grad_fn=<{function.name().rpartition('::')[2]}>" if function is not None
                      else ", requires_grad=True" if needs_gradient else "")
        text = torch._tensor_str._str(at_home(self))
        return f"{text[:-1]}, device='{device}'{suffix})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _without_functions():
            return self._reduce_ex_internal(protocol)  # type: ignore[no-untyped-call]  # untyped there

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with _without_functions(), torch.no_grad():
                memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
        return memo[id(self)]

    def tolist(self) -> Any:
        """Raise what eager raises for a sparse tensor."""
        return at_home(self).tolist()


def _dispatched(func: Any, args: Any, kwargs: Any) -> Any:
    from djinn_plugins.device.sparse.recording import run

    try:
        return run(func, args, kwargs)
    except BaseException as error:
        # A device guard of autograd may take it; `LazySparse.__torch_function__` finds it here, and removes it.
        if not torch._C._is_torch_function_enabled():
            pending_errors[get_ident()] = error
        raise


def made_of(
    layout: torch.layout, parts: Sequence[Any], size: Sequence[int], *, is_unique: bool = False
) -> LazySparse:
    """Make a sparse tensor of lazy components.

    Args:
        layout: Its layout.
        parts: Indices and values, of compressed layouts in the order of their constructors.
        size: Its size.
        is_unique: Whether the indices are known to be coalesced.
    """
    values = parts[-1]
    options = {"dtype": values.dtype, "layout": layout, "device": values.device, "pin_memory": False}
    with _without_functions(), _below_autograd():
        if layout is torch.sparse_coo:
            sparse_dim = parts[0].shape[0]
            bare = aten._sparse_coo_tensor_with_dims_and_tensors.default._op_dk(
                torch._C.DispatchKey.SparseMeta, sparse_dim, len(size) - sparse_dim, list(size), *parts,
                is_coalesced=is_unique, **options)
        else:
            bare = aten._sparse_compressed_tensor_unsafe.default(*parts, list(size), **options)
        made: LazySparse = torch.Tensor._make_subclass(LazySparse, bare)
    made._parts, made._is_unique = tuple(parts), is_unique or layout is not torch.sparse_coo
    return made


def same_parts(sparse: LazySparse) -> LazySparse:
    """Make another tensor of the same components."""
    with _without_functions():
        return made_of(sparse.layout, sparse._parts, sparse.shape, is_unique=sparse._is_unique)


def at_home(sparse: LazySparse) -> torch.Tensor:
    """Fetch a sparse tensor, in one round trip."""
    local = devices.current_session().materialize(sparse._parts)
    with _without_functions():
        layout, size = sparse.layout, sparse.shape
    return of_local(layout, local, size, is_unique=sparse._is_unique)


def of_local(
    layout: torch.layout, parts: Sequence[torch.Tensor], size: Sequence[int], *, is_unique: bool
) -> torch.Tensor:
    """Make an ordinary sparse tensor of ordinary components that are known to fit."""
    made: Any = (partial(torch.sparse_coo_tensor, is_coalesced=is_unique) if layout is torch.sparse_coo
                 else partial(torch.sparse_compressed_tensor, layout=layout))
    local: torch.Tensor = made(*parts, size, check_invariants=False)
    return local

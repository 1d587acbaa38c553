"""Operators that are carried out in a special way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from djinn.kinds.interceptor import Handler
from djinn.protocol.tensors import is_dense
from djinn.tensor import LazyTensor

if TYPE_CHECKING:
    from djinn.session import Session

aten = torch.ops.aten


def _record(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return session.recorder.record(session.recorder.binding(operator), operator, args, kwargs)


def to_copy(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Convert, upload or bring home, by source and target device."""
    tensor, device = args[0], kwargs.get("device")
    here = device is not None and device.type != session.device.type
    if isinstance(tensor, LazyTensor):
        if not here:
            return _record(session, operator, args, kwargs)
        return operator(session.materialize([tensor])[0], **kwargs)
    if here:
        return operator(tensor, **kwargs)
    local = operator(tensor, **{**kwargs, "device": torch.device("cpu")}) if _converts(tensor, kwargs) else tensor
    return _mark_conversion(session, session.upload(local), tensor)


def _mark_conversion(session: Session, made: LazyTensor, source: torch.Tensor) -> LazyTensor:
    """Let ``Module.to`` keep the identity of a parameter that it moves here.

    Optimizers, tied weights and everybody else who holds the parameter must see it move, as they do with any other
    accelerator. ``Module._apply`` swaps the two tensors if the new one announces itself as a wrapper subclass; these
    attributes are looked for, never called, and do not outlive the conversion. PyTorch does not swap a tensor that
    somebody refers to weakly, as the cache of uploads does.
    """
    if isinstance(source, torch.nn.Parameter):
        session.mixer.forget(source)
        made.__tensor_flatten__ = made.__tensor_unflatten__ = _not_traceable  # type: ignore[attr-defined]  # see above
    return made


def _not_traceable(*_: Any) -> Any:
    raise NotImplementedError("A tensor on a remote accelerator does not consist of other tensors.")


def _converts(tensor: torch.Tensor, kwargs: Mapping[str, Any]) -> bool:
    return kwargs.get("dtype") not in (None, tensor.dtype) or kwargs.get("memory_format") is not None


def copy_(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy into a tensor, whichever of the two is remote."""
    target, source = args[0], args[1]
    if not isinstance(target, LazyTensor):
        return operator(target, session.materialize([source])[0], *args[2:], **kwargs)
    if isinstance(source, LazyTensor):
        return _record(session, operator, args, kwargs)
    spec = target._value.spec
    if source.shape == spec.size and source.device.type == "cpu" and is_dense(tuple(spec.size), spec.stride):
        dense = source.detach()
        if dense.dtype != spec.dtype or dense.stride() != spec.stride or dense.is_conj() or dense.is_neg():
            dense = torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype).copy_(dense)
        if not spec.storage_offset and session.upload_into(target, dense):
            return _mark_conversion(session, target, source)
    _record(session, operator, (target, session.mixer.upload(source), *args[2:]), kwargs)
    return _mark_conversion(session, target, source)


def lift_fresh(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give the argument back: it is ours already."""
    return args[0]


def is_pinned(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Answer no: pinned memory is memory of this machine."""
    return False


def pin_memory(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse as PyTorch does for every accelerator's tensors.

    Raises:
        RuntimeError: Always.
    """
    raise RuntimeError(f"cannot pin '{session.device.type}' tensors; only dense CPU tensors can be pinned")


def is_same_size(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Compare sizes, which are known here."""
    return bool(args[0].shape == args[1].shape)


def set_source(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let a tensor take over another's storage: from here on the two are ordered as one."""
    made = _record(session, operator, args, kwargs)
    if isinstance(args[1], LazyTensor):
        args[0]._value.slot.storage = args[1]._value.slot.storage
    return made


HANDLERS: Mapping[torch._ops.OpOverload, Handler] = {
    aten._to_copy.default: to_copy,
    aten.copy_.default: copy_,
    aten.lift_fresh.default: lift_fresh,
    aten.lift_fresh_copy.default: lambda session, operator, args, kwargs: args[0].clone(),
    aten.is_pinned.default: is_pinned,
    aten._pin_memory.default: pin_memory,
    aten.is_same_size.default: is_same_size,
    aten.set_.source_Tensor: set_source,
    aten.set_.source_Tensor_storage_offset: set_source,
}

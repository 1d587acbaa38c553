"""Handlers of operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch._prims_common import make_contiguous_strides_for

from djinn.kinds.interceptor import Handler
from djinn.record import devices
from djinn.record.call_plans import placeholder
from djinn.record.tensor import LazyTensor
from djinn.wire.tensors import is_dense
from djinn_plugins.common.operators.operators import operator_named
from djinn_plugins.device.interceptor import (
    destinations,
    divisions,
    files_read,
    histograms,
    index_pointers,
    jagged,
    quantization,
    remote_norms,
    zeros,
)
from djinn_plugins.device.interceptor.factories import WHOLE
from djinn_plugins.device.interceptor.in_place_move import become
from djinn_plugins.device.interceptor.overlaps import ask, is_refused_overlap
from djinn_plugins.device.interceptor.saving import conjugated_storages, set_storage
from djinn_plugins.device.interceptor.sequences import pack_padded
from djinn_plugins.device.interceptor.subclasses import can_be_lazy
from djinn_plugins.device.interceptor.uninitialized import keep_uninitialized, keep_uninitialized_at_home
from djinn_plugins.device.sparse import recording as sparse

if TYPE_CHECKING:
    from djinn.session.session import Session

aten = torch.ops.aten
UNDECLARED_VIEWS = {
    aten._unsafe_view.default: aten.view.default,
    aten.unsafe_split.Tensor: aten.split.Tensor,
    aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
}
"""Operators whose results share storage with their argument although their schemas do not declare it, and the operators
that declare it.

A later write to the argument has to wait for operations that read the result; `torch.kron` relies on that.
"""

_WRAPPED = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
"""Dtypes of numbers that operators take in place of tensors."""


def record(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record an operator as part of its handler."""
    return session.recorder.record(session.recorder.binding(operator), operator, args, kwargs)


def keep_whole(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let an operator be recorded as it is, although it is a composite."""
    return NotImplemented


def as_view(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record the operator that declares its result a view."""
    return record(session, UNDECLARED_VIEWS[operator], args, kwargs)


def to_copy(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Convert, upload or download, by source and target device."""
    tensor, device = args[0], kwargs.get("device")
    here = device is not None and device.type != session.device.type
    if isinstance(tensor, LazyTensor):
        if not here:
            return session.recorder.record_across(operator, args, kwargs)
        if device is not None and device.type == "meta":
            return operator(placeholder(tensor._value.spec), **kwargs)
        return keep_uninitialized_at_home(_as_copied(session.materialize([tensor])[0], operator, kwargs), tensor)
    if here:
        return operator(tensor, **kwargs)
    if tensor.layout is not torch.strided:
        return sparse.run(operator, args, kwargs)
    if not tensor.numel() and kwargs.get("memory_format") is None and type(tensor) is torch.Tensor:
        # There is nothing to send. Caches of models begin with such tensors.
        options = {"dtype": kwargs.get("dtype") or tensor.dtype, "device": devices.checked_device(device)}
        return record(session, aten.empty_strided.default, (tensor.size(), tensor.stride()), options)
    if (stored := files_read.stored(session, tensor, device)) is not None:
        return operator(stored, **{**kwargs, "device": stored.device}) if _converts(tensor, kwargs) else stored
    local = operator(tensor, **{**kwargs, "device": torch.device("cpu")}) if _converts(tensor, kwargs) else tensor
    made = session.upload(local, devices.checked_device(device))
    keep_uninitialized(made, tensor)
    return made


def _as_copied(local: torch.Tensor, operator: Any, kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Return the same result as copying ``local``, an exclusively owned dense tensor; without a copy if possible."""
    if (kwargs["device"].type != "cpu" or kwargs.get("pin_memory") or kwargs.get("dtype") not in (None, local.dtype)
            or kwargs.get("layout") not in (None, torch.strided)
            or kwargs.get("memory_format") not in (None, torch.preserve_format)):
        return operator(local, **kwargs)  # type: ignore[no-any-return]  # the type of operators is Any
    if not torch.is_inference_mode_enabled():
        return local
    return torch.empty(0, dtype=local.dtype).set_(local.untyped_storage(), 0, local.size(), local.stride())


def _converts(tensor: torch.Tensor, kwargs: Mapping[str, Any]) -> bool:
    return kwargs.get("dtype") not in (None, tensor.dtype) or kwargs.get("memory_format") is not None


def copy_(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy into a tensor, whichever of the two is remote."""
    target, source = args[0], args[1]
    if isinstance(source, torch.Tensor) and source.layout is not torch.strided:
        return sparse.run(operator, args, kwargs)
    if not isinstance(source, torch.Tensor):
        return copy_(session, operator, (target, torch.tensor(source, dtype=_WRAPPED[type(source)]), *args[2:]), kwargs)
    if not isinstance(source, LazyTensor) and not can_be_lazy(type(source)):
        return NotImplemented  # It contains other tensors, and its class copies these.
    if not isinstance(target, LazyTensor):
        if target.device.type == "meta":
            return target
        return operator(target, session.materialize([source])[0], *args[2:], **kwargs)
    if isinstance(source, LazyTensor):
        if is_refused_overlap(operator, target, source):
            return ask(session, operator, args, kwargs)
        return session.recorder.record_across(operator, args, kwargs)
    spec = target._value.spec
    if (stored := files_read.stored(session, source, spec.device)) is not None:
        record(session, operator, (target, stored, *args[2:]), kwargs)
        return target
    if source.shape == spec.size and source.device.type == "cpu" and is_dense(tuple(spec.size), spec.stride):
        dense = source.detach()
        if dense.dtype != spec.dtype or dense.stride() != spec.stride or dense.is_conj() or dense.is_neg():
            dense = torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype).copy_(dense)
        if not spec.storage_offset and _upload_into(session, target, dense):
            return target
    # Not through the mixer, which would keep the upload for the lifetime of the source: weights would exist there
    # twice.
    record(session, operator, (target, session.upload(source, spec.device), *args[2:]), kwargs)
    return target


def _upload_into(session: Session, target: LazyTensor, tensor: torch.Tensor) -> bool:
    """Replace the factory that made ``target`` by an upload, if nothing has used its result yet.

    Returns:
        Whether that was possible; if not, nothing has happened.
    """
    slot = target._value.slot
    with session.lock:
        nodes = session.tape.nodes
        last = nodes[-1] if nodes else None
        if last is None or tuple(last.outputs) != (slot,) or last.inputs or last.signature.is_random:
            return False
        nodes.pop()
        try:
            session.backend.upload(slot.number, tensor, target._value.spec.device)
        except BaseException:
            nodes.append(last)
            raise
    return True


def lift_fresh(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the argument: it is already a tensor of this device."""
    return args[0]


def is_pinned(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return false: only local memory can be pinned."""
    return False


def pin_memory(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse as PyTorch does for every accelerator's tensors.

    Raises:
        RuntimeError: Always.
    """
    raise RuntimeError(f"cannot pin '{session.device.type}' tensors; only dense CPU tensors can be pinned")


def is_same_size(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Compare sizes, which are known locally."""
    return bool(args[0].shape == args[1].shape)


def batch_norm(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record a training step by the overload whose schema says that it writes the running statistics."""
    if not kwargs and (made := remote_norms.batch_norm(session, *args)) is not NotImplemented:
        return made
    _, _, _, mean, variance, training, *_ = args
    writes = training and mean is not None and variance is not None
    return record(session, aten._native_batch_norm_legit.default, args, kwargs) if writes else NotImplemented


def batch_norm_backward(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record the backward pass for the device to choose a kernel, if it may."""
    return NotImplemented if kwargs else remote_norms.batch_norm_backward(session, *args)


def set_source(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a tensor use another one's storage: from here on, operations on both are ordered."""
    with session.lock:
        # Earlier operations refer to the previous storage.
        session.flush()
        slot = args[0]._value.slot
        before = slot.storage
        if isinstance(args[1], LazyTensor):
            # First, because the operation may be sent as soon as it is recorded.
            slot.storage = args[1]._value.slot.storage
        try:
            return record(session, operator, args, kwargs)
        except BaseException:
            slot.storage = before
            raise


def conjugate(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record a conjugated view, and mark it as such for PyTorch: ``imag`` and others treat it differently."""
    made = record(session, operator, args, kwargs)
    conjugated_storages.add(args[0])
    torch._C._set_conj(made, not args[0].is_conj())
    return made


def view_as_real(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let it be recorded, unless the tensor is a conjugated view.

    Raises:
        RuntimeError: It is a conjugated view.
    """
    if args[0].is_conj():
        raise RuntimeError("view_as_real doesn't work on unresolved conjugated tensors.  To resolve the conjugate "
                           "tensor so you can view it as real, use self.resolve_conj(); however, be warned that the "
                           "resulting tensor will NOT alias the original.")
    return NotImplemented


def negate(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record a negated view in the same way."""
    made = record(session, operator, args, kwargs)
    conjugated_storages.add(args[0])
    torch._C._set_neg(made, not args[0].is_neg())
    return made


def repeat_interleave(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record a repetition of positions whose length is given; a wrong one fails where it runs."""
    repeats, length = args[0], kwargs.get("output_size")
    if type(length) is not int or length < 0 or not repeats.numel() or repeats.dim() != 1 or (
            repeats.dtype not in (torch.int32, torch.int64)):
        return NotImplemented
    return _of_size(session, (length,), operator, args, kwargs)


def one_hot(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record an encoding of a given number of classes; classes that do not exist fail where it runs."""
    classes, number = args[0], args[1] if len(args) > 1 else kwargs.get("num_classes")
    if type(number) is not int or number <= 0 or classes.dtype is not torch.int64:
        return keep_whole(session, operator, args, kwargs)
    return _of_size(session, (*classes.shape, number), operator, args, kwargs)


def _of_size(session: Session, size: tuple[int, ...], operator: Any, args: tuple[Any, ...],
             kwargs: dict[str, Any]) -> Any:
    """Record an operation that gives a contiguous result of the first operand's dtype, and whose size is known."""
    recorder, first = session.recorder, args[0]
    device = first._value.spec.device
    spec = session.specs.intern(torch.Size(size), make_contiguous_strides_for(size), 0, first.dtype, device)
    plan = recorder.plan(recorder.binding(operator), operator, args, kwargs).told((spec,))
    return recorder.apply(plan, args, kwargs, *recorder.take_apart(args, kwargs))


HANDLERS: Mapping[torch._ops.OpOverload, Handler] = {
    aten._to_copy.default: to_copy,
    aten.copy_.default: copy_,
    aten.lift_fresh.default: lift_fresh,
    aten.lift.default: lift_fresh,
    aten.lift_fresh_copy.default: lambda session, operator, args, kwargs: args[0].clone(
        memory_format=torch.contiguous_format),
    aten.is_pinned.default: is_pinned,
    aten._pin_memory.default: pin_memory,
    aten.is_same_size.default: is_same_size,
    aten._conj.default: conjugate,
    aten._neg_view.default: negate,
    aten.view_as_real.default: view_as_real,
    aten.repeat_interleave.Tensor: repeat_interleave,
    aten.histc.default: histograms.histc,
    aten._convert_indices_from_coo_to_csr.default: index_pointers.from_indices,
    aten._convert_indices_from_csr_to_coo.default: index_pointers.to_indices,
    aten._pack_padded_sequence.default: pack_padded,
    aten._has_compatible_shallow_copy_type.default: lambda session, operator, args, kwargs: become(*args),
    aten.native_batch_norm.default: batch_norm,
    aten.native_batch_norm_backward.default: batch_norm_backward,
    aten._fused_moving_avg_obs_fq_helper.default: quantization.observe,
    **dict.fromkeys(UNDECLARED_VIEWS, as_view),
    **{getattr(aten, name).default: keep_whole for name in WHOLE},
    aten.one_hot.default: one_hot,
    **{operator_named(f"aten::{name}"): keep_whole for name in destinations.NAMES},
    **divisions.HANDLERS,
    **jagged.HANDLERS,
    **zeros.HANDLERS,
    aten.set_.source_Storage: set_storage,
    aten.set_.source_Storage_storage_offset: set_storage,
    aten.set_.source_Tensor: set_source,
    aten.set_.source_Tensor_storage_offset: set_source,
}

"""Transfers: values in transit between sessions, with their strides preserved.

A client fetches values to look at them. A server sends values on for further computation, so they must arrive with the
same memory layout: strides affect which kernel runs and how it rounds. A dense tensor is sent as it is. For any other
tensor, either its whole memory is sent, if that is not much larger than its elements, or the elements alone, and the
receiver lays them out again. Expanded dimensions are sent once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from djinn.errors import ProtocolError
from djinn.wire import messages
from djinn.wire.messages import AliasedTensor, Failure, Layout, Plain, TensorHeader, ValueTransfer
from djinn.wire.tensors import DTYPE_NAMES, dtype_named, header_of, is_dense
from djinn_plugins.common.memory.tensor_bytes import MAX_DIMENSIONS, empty_from, size_bytes
from djinn_plugins.common.wire.assumptions import note_of
from djinn_plugins.common.wire.frames import MAX_BODY_BYTES

ALIGNMENT_BYTES = 64
MAX_WASTE = 2
"""The whole memory is sent if it is at most this many times as large as the elements."""


def pack(
    number: int, value: Any, get: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[ValueTransfer, list[torch.Tensor]]:
    """Pack a value into a transfer.

    Args:
        number: Number of the transfer.
        value: A tensor of any strides, or a plain result.
        get: Returns a dense CPU tensor with a value's content; see `djinn_plugins.common.kinds.executor.Executor.get`.

    Returns:
        The transfer, and the tensor sent with it, if there is one.

    Raises:
        UnsupportedTensorError: The dtype or layout cannot be sent.
    """
    if not isinstance(value, torch.Tensor):
        return ValueTransfer(number, Plain(messages.to_wire(value))), []
    header = header_of(value)
    size, stride = header.size, header.stride
    if is_dense(size, stride):
        return ValueTransfer(number, header), [get(value)]
    once, span = _once(size, stride), _span(size, stride)
    is_packed = span > MAX_WASTE * math.prod(once)
    with torch.inference_mode(value.is_inference()), torch.no_grad():
        travels = value.as_strided(once if is_packed else (span,), stride if is_packed else (1,))
    made = get(travels)
    return ValueTransfer(number, header_of(made), Layout(size, stride, is_packed)), [made]


def pack_family(
    number: int, values: Sequence[torch.Tensor | Failure], get: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[ValueTransfer, list[torch.Tensor]]:
    """Pack values that share memory, and that memory, into a transfer.

    If some of the values share no memory, their memory blocks are concatenated.

    Args:
        number: Number of the transfer.
        values: Tensors, or the failures that replace them.
        get: As for `pack`.

    Raises:
        UnsupportedTensorError: A dtype or layout cannot be sent.
    """
    starts: dict[int, int] = {}
    memory: list[torch.Tensor] = []
    members: list[AliasedTensor] = []
    length = 0
    for value in values:
        if isinstance(value, Failure):
            members.append(AliasedTensor(failure=value))
            continue
        header, storage = header_of(value), value.untyped_storage()
        if storage._cdata not in starts:
            gap = -length % ALIGNMENT_BYTES if memory else 0
            starts[storage._cdata] = length + gap
            memory += [torch.zeros(gap, dtype=torch.uint8)] if gap else []
            memory.append(get(_bytes_of(value)))
            length += gap + storage.nbytes()
        offset = starts[storage._cdata] // value.itemsize + int(value.storage_offset())
        members.append(AliasedTensor(header.dtype, header.size, header.stride, offset, value.is_conj(), value.is_neg()))
    flat = memory[0] if len(memory) == 1 else torch.cat([torch.empty(0, dtype=torch.uint8), *memory])
    return ValueTransfer(number, header_of(flat), members=tuple(members)), [flat]


def unpack_family(
    transfer: ValueTransfer, tensor: torch.Tensor, put: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor | Failure]:
    """Create the values of a checked transfer, in order; see `unpack`."""
    storage = put(tensor).untyped_storage()
    made: list[torch.Tensor | Failure] = []
    for member in transfer.members:
        if member.failure is not None:
            made.append(member.failure)
            continue
        with torch.inference_mode(False), torch.no_grad():
            value = torch.empty(0, dtype=dtype_named(member.dtype), device=storage.device)
            value = value.set_(storage, member.storage_offset, member.size, member.stride)
            torch._C._set_conj(value, member.is_conjugated)
            torch._C._set_neg(value, member.is_negated)
        made.append(value)
    return made


def _bytes_of(value: torch.Tensor) -> torch.Tensor:
    """View the memory of a value's storage as bytes."""
    storage = value.untyped_storage()
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _check_members(transfer: ValueTransfer) -> None:
    item = transfer.item
    if (not isinstance(item, TensorHeader) or item.dtype != "uint8" or len(item.size) != 1
            or transfer.layout is not None):
        raise ProtocolError("The memory that values share does not travel as bytes.")
    for member in transfer.members:
        if member.failure is not None:
            continue
        size, stride = member.size, member.stride
        if len(size) != len(stride) or len(size) > MAX_DIMENSIONS:
            raise ProtocolError("A member of a transfer describes no tensor.")
        # An empty view may begin behind the end.
        offset, itemsize = member.storage_offset, dtype_named(member.dtype).itemsize
        reach = 0 if 0 in size else offset + _span(size, stride)
        if reach * itemsize > item.size[0] or any(step >= 2**63 for step in (*size, *stride, offset * itemsize)):
            raise ProtocolError("A member of a transfer reaches beyond its memory.")


def check(transfer: ValueTransfer) -> None:
    """Check that a transfer's description of its tensor is consistent, before anything is allocated or used.

    Raises:
        ProtocolError: The description is inconsistent.
    """
    note = note_of(transfer)
    if note is not None and (transfer.members or transfer.failure
                             or (note.stage != "value") != (transfer.item is None)):
        raise ProtocolError("Only a value can be sent ahead.")
    if note is None and (transfer.item is None) == (transfer.failure is None):
        raise ProtocolError("A transfer holds either a value or a failure.")
    if transfer.members:
        _check_members(transfer)
        return
    layout = transfer.layout
    if layout is None:
        return
    size, stride = layout.size, layout.stride
    if (not isinstance(transfer.item, TensorHeader) or len(size) != len(stride) or len(size) > MAX_DIMENSIONS
            or 0 in size):
        raise ProtocolError("The layout of a transfer describes no tensor that it could hold.")
    span = _span(size, stride)
    if math.prod(size) >= 2**63 or any(step >= 2**63 for step in stride):
        raise ProtocolError("The layout of a transfer overflows.")
    if transfer.item.size != (_once(size, stride) if layout.is_packed else (span,)):
        raise ProtocolError("The layout of a transfer is not that of its tensor.")
    if size_bytes(TensorHeader(transfer.item.dtype, (span,), (1,))) > MAX_BODY_BYTES:
        raise ProtocolError(f"A transfer that takes more than {MAX_BODY_BYTES} bytes when it is laid out.")


def unpack(transfer: ValueTransfer, tensor: torch.Tensor, put: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Create the value in a checked transfer.

    Args:
        transfer: A transfer that holds a tensor.
        tensor: The tensor sent with it, dense and on the CPU; the caller gives it up.
        put: Puts a dense CPU tensor on the device; see `djinn_plugins.common.kinds.executor.Executor.put`.
    """
    layout = transfer.layout
    if layout is not None and layout.is_packed:
        tensor = _scattered(tensor, layout)
    value = put(tensor)
    size, stride = (tensor.size(), tensor.stride()) if layout is None else (layout.size, layout.stride)
    if value.size() == size and value.stride() == stride:
        return value
    # A copy keeps the strides only of dimensions where they matter for density.
    with torch.inference_mode(value.is_inference()), torch.no_grad():
        return value.as_strided(size, stride)


def _scattered(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Lay elements out in memory with their strides, and fill the gaps with zeros."""
    dtype = tensor.dtype
    flat = empty_from(TensorHeader(DTYPE_NAMES[dtype], (_span(layout.size, layout.stride),), (1,)))
    with torch.inference_mode(False), torch.no_grad():
        # View as integers of the same width, because not every dtype can be copied everywhere.
        plain = _INTEGERS.get(dtype.itemsize, dtype)
        flat.view(plain).zero_().as_strided(tuple(tensor.size()), layout.stride).copy_(tensor.view(plain))
    return flat


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _once(size: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Return the size with every expanded dimension reduced to 1."""
    return tuple(1 if step == 0 else extent for extent, step in zip(size, stride, strict=True))


def _span(size: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Number of elements from the first to the last in memory; the size must contain no zeros."""
    return 1 + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))

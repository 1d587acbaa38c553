"""Tensors as bytes: their sizes, headers that are checked, and memory viewed as buffers."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch

from djinn.errors import ProtocolError
from djinn.wire.messages import Description, Plain, TensorHeader, to_wire
from djinn.wire.tensors import dtype_named, header_of, is_dense

MAX_DIMENSIONS = 64
_torch: Any = torch._C  # its declarations lack this
_address = _torch._data_address


def size_bytes(header: TensorHeader) -> int:
    """Bytes of the tensor's elements."""
    return math.prod(header.size) * dtype_named(header.dtype).itemsize


def check_header(header: TensorHeader) -> None:
    """Check that a header describes a valid tensor.

    Raises:
        ProtocolError: Unknown dtype, too many dimensions, sizes that overflow, or strides that are not dense.
    """
    dtype_named(header.dtype)
    if len(header.size) > MAX_DIMENSIONS:
        raise ProtocolError(f"A tensor of {len(header.size)} dimensions; {MAX_DIMENSIONS} is the limit.")
    if not is_dense(header.size, header.stride):
        raise ProtocolError("The strides of a transferred tensor are not dense.")
    if size_bytes(header) >= 2**63 or any(extent >= 2**63 for extent in (*header.size, *header.stride)):
        raise ProtocolError("The size of a transferred tensor overflows.")


def check_layout(dtype: str, size: Sequence[int], stride: Sequence[int], storage_offset: int) -> None:
    """Check that metadata without data describe a strided tensor.

    Raises:
        ProtocolError: They describe none.
    """
    itemsize = dtype_named(dtype).itemsize
    # Without elements it has no extent, at any offset. PyTorch leaves a negative size behind where it refuses one.
    extent = 0 if min(size, default=1) < 1 else storage_offset + 1 + sum(
        (count - 1) * step for count, step in zip(size, stride, strict=False))
    if len(size) != len(stride) or len(size) > MAX_DIMENSIONS or min((*stride, storage_offset)) < 0 or max(
            (*size, *stride, storage_offset, extent * itemsize, math.prod(filter(None, size)))) >= 2**63:
        raise ProtocolError(f"No tensor has the sizes {list(size)[:8]} and the strides {list(stride)[:8]}.")


def describe(tensor: torch.Tensor) -> Description:
    """Describe any strided tensor, without data."""
    header = header_of(tensor)
    return Description(header.dtype, header.size, header.stride, int(tensor.storage_offset()))


def metadata_of(value: Any) -> Description | Plain:
    """Return what answers a question for a value's metadata: of a value that is no tensor, the value."""
    return describe(value) if isinstance(value, torch.Tensor) else Plain(to_wire(value))


def empty_from(header: TensorHeader) -> torch.Tensor:
    """Allocate the CPU tensor that a checked header describes. Its memory is only touched when it is filled."""
    dtype = dtype_named(header.dtype)
    # Allocating complex32 memory makes PyTorch warn; users should see that warning only where they compute with it.
    allocated = torch.int32 if dtype == torch.complex32 else dtype
    with torch.inference_mode(False):
        return torch.empty_strided(header.size, header.stride, dtype=allocated, device="cpu").view(dtype)


def tensor_in(storage: torch.UntypedStorage, header: TensorHeader) -> torch.Tensor:
    """Create the CPU tensor that a checked header describes, at the beginning of a storage."""
    dtype = dtype_named(header.dtype)
    # As above.
    allocated = torch.int32 if dtype == torch.complex32 else dtype
    with torch.inference_mode(False), torch.no_grad():
        # `data` resets the version counter.
        made = torch.empty(0, dtype=allocated).set_(storage, 0, header.size, header.stride).data
        return made if dtype == allocated else made.view(dtype)


def whole_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """View a storage as ``u8[N]``."""
    with torch.inference_mode(mode=False), torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """View a dense tensor's elements as ``u8[N]``, in memory order."""
    with torch.inference_mode(mode=False), torch.no_grad():
        return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def copy_of(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Copy a storage, on its device."""
    return whole_of(storage).clone().untyped_storage()


def placed_in(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """Create a tensor on ``storage`` with the metadata of ``like``; both storages have the same length."""
    made = torch.empty(0, dtype=like.dtype, device=storage.device)
    made = made.set_(storage, like.storage_offset(), like.size(), like.stride())
    made = made.conj() if like.is_conj() else made
    return made._neg_view() if like.is_neg() else made


def buffer_of(tensor: torch.Tensor) -> memoryview:
    """View a dense CPU tensor's memory as bytes.

    Ownership:
        The view does not keep the tensor alive.
    """
    length = tensor.numel() * tensor.element_size()
    if not length:
        return memoryview(b"")
    return memoryview((ctypes.c_char * length).from_address(address_of(tensor))).cast("B")


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's first element for reading, 0 if it has none.

    ``Tensor.data_ptr`` asks for memory to write, which copies memory that is shared.
    """
    return storage_address_of(tensor) + int(tensor.storage_offset()) * tensor.itemsize if tensor.numel() else 0


def storage_address_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage for reading."""
    address: int = _address(tensor)
    return address

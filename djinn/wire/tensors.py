"""Tensors on the wire: the closed table of dtypes, and what a dense CPU tensor is."""

from __future__ import annotations

import torch

from djinn.errors import ProtocolError, UnsupportedTensorError
from djinn.wire.messages import TensorHeader

_NAMES = (
    "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 complex32 complex64 "
    "complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 "
    "bits1x8 bits2x4 bits4x2 bits8 bits16 int1 int2 int3 int4 int5 int6 int7 uint1 uint2 uint3 uint4 uint5 uint6 uint7"
).split()
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES if hasattr(torch, name)}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def dtype_named(name: str) -> torch.dtype:
    """Look up a dtype in the closed table.

    Raises:
        ProtocolError: The dtype cannot be sent.
    """
    if name not in DTYPES:
        raise ProtocolError(f"Unknown dtype {name[:40]!r}.")
    return DTYPES[name]


def is_dense(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether sizes and strides (in elements) cover a block of memory without gaps and without overlap.

    Source:
        ``compute_non_overlapping_and_dense`` of c10/core/TensorImpl.
    """
    if len(size) != len(stride) or 0 in size:
        return len(size) == len(stride)
    expected = 1
    for step, extent in sorted((step, extent) for extent, step in zip(size, stride, strict=True) if extent != 1):
        if step != expected:
            return False
        expected *= extent
    return True


def header_of(tensor: torch.Tensor) -> TensorHeader:
    """Describe a dense CPU tensor for the wire.

    Raises:
        UnsupportedTensorError: The dtype or layout cannot be sent.
    """
    name = DTYPE_NAMES.get(tensor.dtype)
    if name is None or tensor.layout is not torch.strided:
        raise UnsupportedTensorError(f"Tensors of {tensor.dtype} with layout {tensor.layout} cannot be transferred.",
                                     hint="Convert it to a dense tensor of an ordinary dtype first.")
    return TensorHeader(name, tuple(tensor.size()), tuple(tensor.stride()))


def to_dense_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` as a dense CPU tensor with resolved conjugation, and preserve dense strides.

    Ownership:
        The result may be ``tensor`` itself.

    Raises:
        RuntimeError: It has no memory: its class contains other tensors.
    """
    tensor = tensor.detach().cpu()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    # Of a tensor without memory, `Tensor.data_ptr` gives its offset, which would be taken for an address. This raises.
    if not torch._C._is_cow_tensor(tensor):  # type: ignore[attr-defined]  # not declared; it would be copied
        tensor.untyped_storage().data_ptr()
    return tensor if is_dense(tuple(tensor.size()), tuple(tensor.stride())) else copied(tensor)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy; of dtypes without kernels, such as ``int4``, the bytes are copied."""
    return tensor.view(torch.uint8).clone().view(tensor.dtype) if tensor.itemsize == 1 else tensor.clone()

"""The header of a safetensors file, checked completely: its tensors lie within the file.

A file begins with the length of its header in eight bytes, little-endian. The header is a JSON object: for each tensor
its dtype, its sizes and where it lies behind the header. The tensors fill the rest of the file without gaps.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta

from djinn_lib_service.tensor_extents import TensorExtent

__all__ = ("read_header",)

MAX_HEADER_BYTES = 32 * 2**20
MAX_NAME = 1024
"""Longest name of a tensor; longer text does not travel in a program."""
_LENGTH = struct.Struct("<Q")
DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16",
    "I32": "int32", "U32": "uint32", "F32": "float32", "F64": "float64", "I64": "int64", "U64": "uint64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "C64": "complex64",
}
"""Names in ``torch`` of the dtypes that have whole bytes."""
_METADATA = "__metadata__"
_Extent = Annotated[int, Meta(ge=0)]


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[list[_Extent], Meta(max_length=64)]
    data_offsets: tuple[_Extent, _Extent]


def read_header(descriptor: int) -> Mapping[str, TensorExtent]:
    """Read and check the header of an open file.

    Raises:
        ValueError: Names the fault.
    """
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is no ordinary file")
    start = os.pread(descriptor, _LENGTH.size, 0)
    if len(start) < _LENGTH.size:
        raise ValueError(f"it has {len(start)} bytes, fewer than any safetensors file")
    length: int = _LENGTH.unpack(start)[0]
    data = _LENGTH.size + length
    if length > MAX_HEADER_BYTES or data > status.st_size:
        raise ValueError(f"its header would have {length} bytes, and the file has {status.st_size}")
    text = os.pread(descriptor, length, _LENGTH.size)
    if len(text) < length:
        raise ValueError("it became shorter while it was read")
    return _checked(_entries(text), data, status.st_size)


def _entries(text: bytes) -> dict[str, _Entry]:
    try:
        found = json.loads(text, object_pairs_hook=_unique)
        if isinstance(found, dict):
            msgspec.convert(found.pop(_METADATA, {}), dict[str, str])
        return msgspec.convert(found, dict[str, _Entry])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its header is malformed: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name occurs twice")
    return made


def _checked(entries: Mapping[str, _Entry], data: int, size_bytes: int) -> Mapping[str, TensorExtent]:
    expected = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        if len(name) > MAX_NAME:
            raise ValueError(f"the name of a tensor has {len(name)} characters; {MAX_NAME} is the limit")
        if entry.dtype not in DTYPES:
            raise ValueError(f"tensor {name!r} has the dtype {entry.dtype[:40]!r}, which is not supported")
        begin, end = entry.data_offsets
        if begin != expected:
            raise ValueError(f"tensor {name!r} begins at byte {begin} of the data; the one before ends at {expected}")
        size = math.prod(entry.shape) * getattr(torch, DTYPES[entry.dtype]).itemsize
        if end - begin != size:
            raise ValueError(f"tensor {name!r} takes {size} bytes, and lies in {end - begin}")
        expected = end
    if data + expected != size_bytes:
        raise ValueError(f"it should have {data + expected} bytes, and has {size_bytes}")
    return {name: TensorExtent(DTYPES[entry.dtype], tuple(entry.shape), data + entry.data_offsets[0],
                               data + entry.data_offsets[1]) for name, entry in entries.items()}


# `msgspec.convert` uses its form, which several threads must not work out at once.
msgspec.json.Decoder(_Entry)

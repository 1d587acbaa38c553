"""The header of a safetensors file, checked completely: its tensors lie within the file.

A file begins with the length of its header in eight bytes, little-endian. The header is a JSON object: for each tensor
its dtype, its sizes and where it lies behind the header. The tensors fill the rest of the file without gaps.
"""

from __future__ import annotations

import math
import os
import stat
import struct
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta

from djinn_plugins.common.files.tensor_extents import TensorExtent

__all__ = ("read_header",)

MAX_HEADER_BYTES = 8 * 2**20
MAX_METADATA_BYTES = 4 * 2**20
MAX_TENSORS = 2**16
"""Of a file; and pairs of its metadata."""
MAX_MARKS = 2**20
"""Brackets and commas of a header. Text in which they are nested differently is passed over without a break."""
MAX_NUMBER = 2**63 - 1
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
_Extent = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
_ENTRY_QUOTES = 8
"""Of an entry whose three fields occur once."""


class _Name(str):
    """A name in a header, for which the decoder calls its hook."""

    __slots__ = ()


def _take(kind: type, name: Any) -> Any:
    """Take each name once, and a limited number of them."""
    names = _NAMES.get()
    if name in names:
        raise ValueError("a name occurs twice")
    if len(names) == MAX_TENSORS + 1:
        raise ValueError(f"there are more than {MAX_TENSORS} names")
    names.add(name)
    return _Name(name)


_NAMES: ContextVar[set[str]] = ContextVar("_NAMES")
"""The names of the object that is being decoded."""
_PARTS = msgspec.json.Decoder(dict[_Name, msgspec.Raw], dec_hook=_take)
_WORDS = msgspec.json.Decoder(dict[_Name, str], dec_hook=_take)


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
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"its header would have {length} bytes, and {MAX_HEADER_BYTES} are the limit")
    if data > status.st_size:
        raise ValueError(f"its header would have {length} bytes, and the file has {status.st_size}")
    text = os.pread(descriptor, length, _LENGTH.size)
    if len(text) < length:
        raise ValueError("it became shorter while it was read")
    return _checked(_entries(text), data, status.st_size)


def _entries(text: bytes) -> dict[str, _Entry]:
    """Decode a header, of which nothing is built that is not of its form."""
    if sum(map(text.count, (b"[", b"{", b","))) > MAX_MARKS:
        raise ValueError(f"its header has more than {MAX_MARKS} brackets and commas")
    try:
        _NAMES.set(set())
        parts = _PARTS.decode(text)
        metadata = parts.pop(_Name(_METADATA), None)
        if metadata is not None:
            if memoryview(metadata).nbytes > MAX_METADATA_BYTES:
                raise ValueError(f"its metadata has more than {MAX_METADATA_BYTES} bytes")
            _NAMES.set(set())
            _WORDS.decode(metadata)
        return {str(name): _entry(part) for name, part in parts.items()}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its header is malformed: {error}") from None


def _entry(part: msgspec.Raw) -> _Entry:
    text = bytes(part)
    entry = _entry_decoder.decode(text)
    if text.count(b'"') != _ENTRY_QUOTES:
        raise ValueError("a field occurs twice")
    return entry


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
        itemsize = getattr(torch, DTYPES[entry.dtype]).itemsize
        if math.prod(filter(None, entry.shape)) * itemsize > MAX_NUMBER:
            raise ValueError(f"tensor {name!r} has the sizes {entry.shape[:8]}, which no tensor has")
        size = math.prod(entry.shape) * itemsize
        if end - begin != size:
            raise ValueError(f"tensor {name!r} takes {size} bytes, and lies in {end - begin}")
        expected = end
    if data + expected != size_bytes:
        raise ValueError(f"it should have {data + expected} bytes, and has {size_bytes}")
    return {name: TensorExtent(DTYPES[entry.dtype], tuple(entry.shape), data + entry.data_offsets[0],
                               data + entry.data_offsets[1]) for name, entry in entries.items()}


# Made here: several threads must not work out its form at once.
_entry_decoder = msgspec.json.Decoder(_Entry)

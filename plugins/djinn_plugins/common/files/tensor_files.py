"""Where the storages lie in a file of ``torch.save``: found by the directory of the archive, without its pickle.

Such a file is a zip archive that is not compressed. It has a pickle, which is never read here, and a member
``NAME/data/N`` for the bytes of each storage. A client that has the same file reads the pickle itself.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from collections.abc import Iterator, Mapping

from djinn_plugins.common.files.safetensors_header import MAX_TENSORS, read_header
from djinn_plugins.common.files.tensor_extents import TensorExtent

__all__ = ("describe", "read_storages")

MAX_DIRECTORY_BYTES = 8 * 2**20
ALIGNMENT = 64
"""Of storages; elements of any dtype lie as they have to."""
_START = b"PK\3\4"
_PICKLE = b"\x80\2\x8a\n"
"""How files of older releases begin. A safetensors file begins with a length, and neither text is one in the limit."""
_FAR = 0xFFFFFFFF
"""In place of a larger number, which is elsewhere."""
_FAR_FIELD = 1
_END = struct.Struct("<4s4H2IH")
_FAR_LOCATOR = struct.Struct("<4sIQI")
_FAR_END = struct.Struct("<4sQ2H2I4Q")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_MEMBER = struct.Struct("<4s5H3I2H")
_FIELD = struct.Struct("<2H")
_NUMBER = struct.Struct("<Q")
_STORAGE = re.compile(rb"[^/]+/(data/[0-9]{1,12})")


def describe(descriptor: int) -> Mapping[str, TensorExtent]:
    """Describe the tensors of a safetensors file, or the storages of a file of ``torch.save``.

    Raises:
        ValueError: Names the fault.
    """
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise ValueError("it is no ordinary file")
    start = os.pread(descriptor, len(_START), 0)
    if start == _PICKLE:
        raise ValueError("it is a pickle, which is not read; torch.save of PyTorch 1.6 and later writes archives")
    return read_storages(descriptor) if start == _START else read_header(descriptor)


def read_storages(descriptor: int) -> Mapping[str, TensorExtent]:
    """Read and check the directory of an archive; a storage is a tensor of bytes, with the name ``data/N``.

    Raises:
        ValueError: Names the fault.
    """
    begin, directory = _directory(descriptor)
    found: dict[str, TensorExtent] = {}
    try:
        for name, method, size_bytes, at in _entries(directory):
            match = _STORAGE.fullmatch(name)
            if match is None:
                continue
            storage = match[1].decode()
            member = _MEMBER.unpack(os.pread(descriptor, _MEMBER.size, at))
            data = at + _MEMBER.size + member[-2] + member[-1]
            if member[0] != _START or method or data % ALIGNMENT or data + size_bytes > begin or storage in found:
                raise ValueError(f"its member {storage} is not as torch.save writes it")
            if len(found) == MAX_TENSORS:
                raise ValueError(f"it has more than {MAX_TENSORS} storages")
            found[storage] = TensorExtent("uint8", (size_bytes,), data, data + size_bytes)
    except (struct.error, OSError, OverflowError):
        raise ValueError("its directory is damaged") from None
    return found


def _directory(descriptor: int) -> tuple[int, bytes]:
    """Return where the directory begins, and its content."""
    size_bytes = os.fstat(descriptor).st_size
    end_at = size_bytes - _END.size
    locator_at = end_at - _FAR_LOCATOR.size
    try:
        magic, *_, length, begin, comment = _END.unpack(os.pread(descriptor, _END.size, max(end_at, 0)))
        if magic != b"PK\5\6" or comment:
            raise ValueError("it does not end as an archive of torch.save does")
        if locator_at > 0:
            magic, _, far, _ = _FAR_LOCATOR.unpack(os.pread(descriptor, _FAR_LOCATOR.size, locator_at))
            if magic == b"PK\6\7":
                magic, *_, length, begin = _FAR_END.unpack(os.pread(descriptor, _FAR_END.size, far))
                if magic != b"PK\6\6":
                    raise ValueError("its directory is damaged")
    except (struct.error, OSError, OverflowError):
        raise ValueError("its directory is damaged") from None
    if length > MAX_DIRECTORY_BYTES or begin + length > end_at:
        raise ValueError(f"its directory would have {length} bytes at {begin}, and it has {size_bytes}")
    return begin, os.pread(descriptor, length, begin)


def _entries(directory: bytes) -> Iterator[tuple[bytes, int, int, int]]:
    """Iterate over the name, the method of compression, the size and the position of each member."""
    position = 0
    while position < len(directory):
        (magic, _, _, flags, method, _, _, _, packed, size_bytes, name_length, extra_length, comment_length, _, _, _,
         at) = _ENTRY.unpack_from(directory, position)
        name_at = position + _ENTRY.size
        extra_at = name_at + name_length
        position = extra_at + extra_length + comment_length
        if magic != b"PK\1\2" or position > len(directory):
            raise ValueError("its directory is damaged")
        far = _far_numbers(directory[extra_at:extra_at + extra_length])
        size_bytes, packed, at = (next(far) if number == _FAR else number for number in (size_bytes, packed, at))
        if packed != size_bytes:
            method = method or 1
        yield directory[name_at:extra_at], method or flags & 1, size_bytes, at


def _far_numbers(extra: bytes) -> Iterator[int]:
    position = 0
    while position < len(extra):
        kind, length = _FIELD.unpack_from(extra, position)
        position += _FIELD.size
        if kind == _FAR_FIELD:
            for at in range(position, position + length, _NUMBER.size):
                yield _NUMBER.unpack_from(extra, at)[0]
        position += length
    # A number that should be there and is not.
    raise ValueError("its directory is damaged")

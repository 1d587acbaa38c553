"""Finds tensors in files that the program has read: by size, then by a sample of their elements, then by all bytes.

A program may have changed a tensor after it was read, so only the comparison of all bytes says that a file has it. The
other two keep that comparison rare: a tensor that is in no file costs a look into a table.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import torch

from djinn.wire.tensors import DTYPE_NAMES, dtype_named
from djinn_plugins.common.files.identity import FileIdentity, identity_of
from djinn_plugins.common.files.tensor_extents import TensorExtent
from djinn_plugins.common.files.tensor_files import describe
from djinn_plugins.common.memory.tensor_bytes import buffer_of
from djinn_plugins.models import noted_files
from djinn_plugins.models.file_digests import Digested, part_digest

__all__ = ("FileTensor", "described", "file_tensors", "is_equal")

SAMPLED = 16
"""Elements of a sample at each of three places: the begin, the middle and the end."""
MAX_COMPARED = 4
"""Tensors of files with the same sample that are compared with one tensor."""
CHUNK_ELEMENTS = 2**17
CONVERTED = ("float32", "float16", "bfloat16")
"""Dtypes that are converted into one another in the same way here and on a server."""


@attrs.frozen
class FileTensor:
    """A tensor of a file.

    Attributes:
        path: The file.
        name: The tensor's name in it.
        extent: Where it is; a storage of an archive is a tensor of bytes.
    """

    path: str
    name: str
    extent: TensorExtent


@attrs.define(eq=False)
class _Alike:
    """Tensors of files with the same dtype and sizes.

    Attributes:
        tensors: The tensors, in the order in which their files were read.
        sampled: By dtype, how many of them have been sampled, and those by their sample in that dtype.
    """

    tensors: list[FileTensor] = attrs.field(factory=list)
    sampled: dict[torch.dtype, tuple[int, dict[bytes, list[FileTensor]]]] = attrs.field(factory=dict)


_Key = tuple[str, tuple[int, ...]]
_lock = threading.Lock()
_described: dict[str, tuple[FileIdentity, Mapping[str, TensorExtent]]] = {}
_alike: dict[_Key, _Alike] = {}


def file_tensors(tensor: torch.Tensor) -> Sequence[FileTensor]:
    """List tensors of files that may be equal to a contiguous one, possibly after a conversion; the latest first.

    Args:
        tensor: A tensor of at least `SAMPLED` elements.
    """
    found: list[FileTensor] = []
    with _lock:
        _describe_new()
        for key in _keys(tensor):
            alike = _alike.get(key)
            if alike is not None:
                sample = _sample(tensor, key[0])
                found += reversed(_samples(alike, tensor.dtype).get(sample, ()))
    return [each for each in found if Path(each.path).exists()][:MAX_COMPARED]


def is_equal(file_tensor: FileTensor, state: Digested, tensor: torch.Tensor) -> bool:
    """Whether all bytes of a tensor are those of a file, in the tensor's dtype, and as they were when it was digested.

    The file is read in pieces, because a mapping of a file that becomes shorter ends the process.
    """
    extent, position, wanted, digest = file_tensor.extent, 0, buffer_of(tensor), part_digest()
    source = dtype_named(extent.dtype)
    target = source if source is torch.uint8 else tensor.dtype
    try:
        with Path(file_tensor.path).open("rb", buffering=0) as file:
            for begin in range(extent.begin, extent.end, CHUNK_ELEMENTS * source.itemsize):
                piece = bytearray(min(CHUNK_ELEMENTS * source.itemsize, extent.end - begin))
                if os.preadv(file.fileno(), [piece], begin) != len(piece):
                    return False
                if state.parts is not None:
                    digest.update(piece)
                piece = _converted(piece, source, target)
                # Of two buffers, only a bytearray compares memory at once.
                if piece != wanted[position:position + len(piece)]:
                    return False
                position += len(piece)
            return identity_of(file.fileno()) == state.identity and (
                state.parts is None or state.parts.get(file_tensor.name) == digest.digest())
    except OSError:
        return False


def _converted(data: bytearray, source: torch.dtype, target: torch.dtype) -> bytearray:
    if source is target:
        return data
    elements = torch.frombuffer(data, dtype=source)
    made = bytearray(elements.numel() * target.itemsize)
    torch.frombuffer(made, dtype=target).copy_(elements)
    return made


def _keys(tensor: torch.Tensor) -> Iterator[_Key]:
    name, size = DTYPE_NAMES.get(tensor.dtype, ""), tuple(tensor.size())
    yield name, size
    if name in CONVERTED:
        yield from ((other, size) for other in CONVERTED if other != name)
    if name != "uint8" or len(size) != 1:
        yield "uint8", (tensor.nbytes,)


def _describe_new() -> None:
    """Read the headers of files that were noted since the last call."""
    new = noted_files.take_new()
    if not new:
        return
    changed = False
    for path in new:
        found, known = described(path), _described.pop(path, None)
        changed |= known is not None and known != found
        if found is not None:
            _described[path] = found
            if known is None:
                _add(path, found[1])
    if changed or len(_described) > noted_files.MAX_FILES:
        for path in set(_described).difference(noted_files.noted()):
            del _described[path]
        _alike.clear()
        for path, (_, extents) in _described.items():
            _add(path, extents)


def described(path: str) -> tuple[FileIdentity, Mapping[str, TensorExtent]] | None:
    """Describe the tensors of a file; ``None`` if it cannot be read, or is no such file."""
    try:
        with Path(path).open("rb", buffering=0) as file:
            return identity_of(file.fileno()), describe(file.fileno())
    except (OSError, ValueError):
        return None


def _add(path: str, extents: Mapping[str, TensorExtent]) -> None:
    for name, extent in extents.items():
        _alike.setdefault((extent.dtype, extent.size), _Alike()).tensors.append(FileTensor(path, name, extent))


def _samples(alike: _Alike, dtype: torch.dtype) -> dict[bytes, list[FileTensor]]:
    count, samples = alike.sampled.get(dtype, (0, {}))
    for each in alike.tensors[count:]:
        source = dtype_named(each.extent.dtype)
        try:
            with Path(each.path).open("rb", buffering=0) as file:
                data = bytearray().join(os.pread(file.fileno(), SAMPLED * source.itemsize, each.extent.begin + at)
                                        for at in _places(each.extent.end - each.extent.begin, source.itemsize))
        except OSError:
            data = bytearray()
        if len(data) == 3 * SAMPLED * source.itemsize:
            sample = bytes(_converted(data, source, source if source is torch.uint8 else dtype))
            samples.setdefault(sample, []).append(each)
    alike.sampled[dtype] = len(alike.tensors), samples
    return samples


def _sample(tensor: torch.Tensor, source: str) -> bytes:
    data, itemsize = buffer_of(tensor), 1 if source == "uint8" else tensor.dtype.itemsize
    return b"".join(data[at:at + SAMPLED * itemsize] for at in _places(len(data), itemsize))


def _places(size_bytes: int, itemsize: int) -> Sequence[int]:
    count = size_bytes // itemsize
    return [itemsize * at for at in (0, (count - SAMPLED) // 2, count - SAMPLED)]

"""Storages of a file that ``torch.load`` reads, where the server has the same file: they are not sent.

PyTorch maps the file and passes each storage on where it lies in the mapping, so its place in the file is known, and
its bytes are not read.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import attrs
import torch

from djinn_plugins.models import noted_files

__all__ = ("find", "loading", "noting_address")

_ARCHIVE = b"PK\3\4"


@attrs.define(eq=False)
class _Loading:
    """A file that is being loaded.

    Attributes:
        tensors: The bytes of its storages, on the device, by position in the file.
        address: Where the file is mapped; 0 as long as it is not.
    """

    tensors: Mapping[int, torch.Tensor]
    address: int = 0


_current: ContextVar[_Loading | None] = ContextVar("djinn_loading", default=None)


def find(storage: torch.UntypedStorage) -> torch.Tensor | None:
    """Return the bytes of a storage of the file that is being loaded, if the server has them."""
    loading = _current.get()
    if loading is None or not loading.address or not storage.nbytes():
        return None
    found = loading.tensors.get(storage.data_ptr() - loading.address)
    return found if found is not None and found.nbytes == storage.nbytes() else None


def loading(load: Callable[..., Any], is_ours: Callable[[Any], bool]) -> Callable[..., Any]:
    """Return a ``torch.load`` that asks the server first."""

    @functools.wraps(load)
    def torch_load(f: Any, map_location: Any = None, *args: Any, **options: Any) -> Any:
        tensors = _stored(f, map_location) if isinstance(f, (str, os.PathLike)) and is_ours(map_location) else None
        if tensors is None:
            if isinstance(f, (str, os.PathLike)):
                noted_files.note(f)
            return load(f, map_location, *args, **options)
        with _noted(_Loading(tensors)):
            return load(f, map_location, *args, **{**options, "mmap": True})

    return torch_load


def noting_address(read: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``torch.serialization._load`` that notes where the file is mapped."""

    @functools.wraps(read)
    def read_mapped(*args: Any, **options: Any) -> Any:
        loading, mapped = _current.get(), options.get("overall_storage")
        if loading is not None and mapped is not None:
            loading.address = mapped.data_ptr()
        return read(*args, **options)

    return read_mapped


@contextmanager
def _noted(loading: _Loading) -> Iterator[None]:
    token = _current.set(loading)
    try:
        yield
    finally:
        _current.reset(token)


def _stored(file: str | os.PathLike[str], device: Any) -> dict[int, torch.Tensor] | None:
    """Return the bytes of the storages by their positions in the file; ``None`` if the server lacks the file."""
    path = Path(file)
    try:
        with path.open("rb") as opened:
            is_archive = opened.read(len(_ARCHIVE)) == _ARCHIVE
    except OSError:
        # PyTorch says what is wrong.
        return None
    if not is_archive:
        return None
    from djinn_plugins.models import models

    found = models.stored_files([path], device=device)
    if found is None:
        return None
    reader: Any = torch._C.PyTorchFileReader(str(path))
    if not reader.has_record("byteorder") or reader.get_record("byteorder").decode() != sys.byteorder:
        return None
    return {reader.get_record_offset(name): tensor for name, tensor in found.items()}

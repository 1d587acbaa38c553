"""Tensors that a program has read from a file and moves to a server that has the same file: they are not sent.

The server is asked as by `djinn_plugins.models.models.load_file`: once for its models, and once for each file, by
digest. If the session places tensors itself, all of its servers are asked, and must have the file.
The file must be the same while it is digested and while the tensor is compared with it; if a change might not show, the
tensor must have the digest that it had when the file was digested. A file that the server lacks
and would keep is sent as a whole if a module with most of it moves.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import attrs
import torch

from djinn_plugins.common.files.identity import identity_in
from djinn_plugins.common.memory.recently_used import RecentlyUsed
from djinn_plugins.models import models
from djinn_plugins.models.file_digests import Digested, digested
from djinn_plugins.models.file_tensors import FileTensor, described, file_tensors, is_equal
from djinn_plugins.models.noted_files import MAX_FILES

if TYPE_CHECKING:
    from djinn.session.session import Session
    from djinn_plugins.common.files.tensor_extents import TensorExtent
    from djinn_plugins.common.operators.stored_models import StoredTensor

__all__ = ("stored",)

MOST = 0.4
"""Of a file, what moves with a module for the file to be kept; a module that was converted to halves has half of it."""
_APPLY = torch.nn.Module._apply.__code__
_log = logging.getLogger("djinn.models")


@attrs.define(eq=False)
class _Store:
    """The known part of the store of a session's device.

    Attributes:
        sizes: Sizes of the files of its models, in bytes.
        keeps_bytes: Size of the largest file that it may have kept.
        files: Of each file that it was asked for, by digest: its tensors by name, or none.
        decided: Digests of the files that were sent whole, or not.
    """

    sizes: frozenset[int]
    keeps_bytes: int
    files: dict[str, dict[str, StoredTensor]] = attrs.field(factory=dict)
    decided: set[str] = attrs.field(factory=set)


_stores: WeakKeyDictionary[Session, dict[tuple[torch.device, tuple[str, ...]], _Store]] = WeakKeyDictionary()
"""By device, and by the addresses of the servers that there are."""
_digested: RecentlyUsed[str, tuple[Digested, Mapping[str, TensorExtent]]] = RecentlyUsed(MAX_FILES)
_digesting = threading.Lock()


def stored(session: Session, tensor: torch.Tensor, device: torch.device) -> torch.Tensor | None:
    """Return a tensor of the server's store that is equal to one of this process, bit for bit.

    Args:
        session: The session.
        tensor: A contiguous tensor in memory.
        device: A device of the session.

    Returns:
        ``None`` if the tensor was not read from a file, has changed since, or if the server does not have the file.
    """
    candidates = file_tensors(tensor)
    # No file is sent if the server has another one with the tensor.
    for may_send in (False, True):
        for found in candidates:
            known = _known(session, found, device, may_send=may_send)
            if known is not None and is_equal(found, known[0], tensor):
                made = models.made(torch.empty(0, device=device), known[1])
                if made.dtype is torch.uint8:
                    return made.view(tensor.dtype).view(tensor.size())
                return made.to(tensor.dtype)
    return None


def _known(
    session: Session, found: FileTensor, device: torch.device, *, may_send: bool
) -> tuple[Digested, StoredTensor] | None:
    """Return what the server says of a file's tensor, and which state of the file that is about.

    Args:
        session: The session.
        found: The tensor.
        device: A device of the session.
        may_send: Whether the file may be sent as a whole.
    """
    store = _store(session, device)
    try:
        file = Path(found.path).resolve(strict=True)
        size_bytes = file.stat().st_size
        if size_bytes not in store.sizes and size_bytes > store.keeps_bytes:
            return None
        with _digesting:
            known = _digest(file)
    except OSError:
        return None
    if known is None or known[1].get(found.name) != found.extent:
        return None
    state, digest = known[0], known[0].digest
    tensors = store.files.get(digest)
    if tensors is None:
        tensors = store.files[digest] = _tensors_there(digest, device)
        _log.info("%s: the server %s this file", file.name, "has" if tensors else "lacks")
    if may_send and not tensors and digest not in store.decided:
        store.decided.add(digest)
        if size_bytes <= store.keeps_bytes and MOST * size_bytes <= _moving_bytes() and (
                models.sent_whole(file, digest, device)):
            tensors = store.files[digest] = _tensors_there(digest, device)
    tensor = tensors.get(found.name)
    return None if tensor is None else (state, tensor)


def _tensors_there(digest: str, device: torch.device) -> dict[str, StoredTensor]:
    return {tensor.name: tensor for tensor in models.answer_of_file(digest, device).tensors}


def _moving_bytes() -> int:
    """Return the size of the module that the caller is moving; 0 if it moves a tensor alone."""
    frame: FrameType | None = sys._getframe()
    module: torch.nn.Module | None = None
    while frame is not None:
        if frame.f_code is _APPLY:
            # Modules move their parts: the last one that is found is the whole.
            module = frame.f_locals["self"]
        frame = frame.f_back
    return 0 if module is None else sum(part.nbytes for part in (*module.parameters(), *module.buffers()))


def _store(session: Session, device: torch.device) -> _Store:
    stores = _stores.setdefault(session, {})
    key = device, tuple(executor.address for executor in session.backend.executors)
    if key not in stores:
        answer = models.answer_of_store(device)
        sizes = frozenset(file.size_bytes for model in answer.models for file in model.files)
        stores[key] = _Store(sizes, answer.keeps_bytes)
    return stores[key]


def _digest(file: Path) -> tuple[Digested, Mapping[str, TensorExtent]] | None:
    """Digest a file, and say where its tensors are; ``None`` if it has changed meanwhile.

    Raises:
        OSError: The file cannot be read.
    """
    known = _digested.get(str(file))
    if known is not None and known[0].identity == identity_in(file.stat()):
        return known
    content = described(str(file))
    if content is None:
        return None
    found = digested(file, content[1])
    if found.identity != content[0]:
        return None
    _digested.pop(str(file), None)
    return _digested.use(str(file), lambda: (found, content[1]))

"""The model store of a server: the gateway opens files, and workers, which cannot, map them."""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from time import thread_time

import anyio
import anyio.to_thread
import attrs
import torch

from djinn_plugins.common.files.identity import FileIdentity, identity_of, sha256_of
from djinn_plugins.common.memory.kept_memory import map_private
from djinn_plugins.common.memory.tensor_bytes import buffer_of
from djinn_plugins.common.operators.stored_models import KeepReply, StoreAnswer, StoredFile, StoredModel, StoredTensor
from djinn_plugins.server.control import FromStore, StoreReply
from djinn_plugins.server.control_channel import AwaitedControl
from djinn_plugins.server.event_loop import Tasks
from djinn_plugins.server.kinds.store import ModelStore, SupportsKeeping, TensorExtent
from djinn_plugins.server.pending_replies import PendingReplies
from djinn_plugins.server.tenants import Tenant

__all__ = ("GatewayModels", "WorkerModels", "mapped")

MIN_MAPPED_BYTES = 2**16
"""Smaller tensors are copied: a mapping takes whole pages."""
ANSWER_TIMEOUT_S = 600.0
"""How long a worker waits for the gateway, which digests new files first."""
MAX_READERS = 4
MAX_PIECE_BYTES = 2**19
"""Of a file that a client sends; a message to the gateway has a limit."""
_log = logging.getLogger("djinn.server")


class GatewayModels:
    """The gateway's end: lists the models, and opens their files.

    Args:
        store: Has the models.
        tasks: Where requests wait.
        gated: Names or patterns of models that only tenants can use whose tokens name them.

    Concurrency:
        Tasks of one event loop; the store is asked in threads.
    """

    def __init__(self, store: ModelStore, tasks: Tasks, gated: Sequence[str] = ()) -> None:
        self._store = store
        self._gated = gated
        self._tasks = tasks
        self._threads = anyio.CapacityLimiter(MAX_READERS)

    def answer(self, request: FromStore, control: AwaitedControl, tenant: Tenant) -> None:
        """Answer the worker of a tenant; returns at once. Lists can be long: one is made when the last one was read."""
        control.question(self._tasks, partial(self._answer, request, control, tenant), in_turn=True)

    async def _answer(self, request: FromStore, control: AwaitedControl, tenant: Tenant
                      ) -> tuple[StoreReply, int | None]:
        reply, descriptor, spent_s = await anyio.to_thread.run_sync(
            self._found_timed, request, tenant, limiter=self._threads)
        if not request.digest:
            # Other requests are as much work as their client has sent, or digest a file once.
            control.charge(spent_s)
        return reply, descriptor

    def _found_timed(self, request: FromStore, tenant: Tenant) -> tuple[StoreReply, int | None, float]:
        begun_s = thread_time()
        return *self._found(request, tenant), thread_time() - begun_s

    def _found(self, request: FromStore, tenant: Tenant) -> tuple[StoreReply, int | None]:
        store = self._store
        keeper = store if isinstance(store, SupportsKeeping) and store.keep_bytes else None
        try:
            if not request.digest:
                return StoreReply(request.number, tuple(self._permitted(tenant)),
                                  keeps_bytes=0 if keeper is None else keeper.keep_bytes), None
            if request.piece is not None:
                return StoreReply(request.number, kept=_kept(request, keeper, _key(tenant))), None
            try:
                return StoreReply(request.number), self._opened(request.digest, tenant)
            except LookupError:
                if keeper is None:
                    raise
            return StoreReply(request.number), keeper.open_kept(_key(tenant), request.digest)
        except LookupError as error:
            return StoreReply(request.number, problem=str(error)), None
        except Exception:  # noqa: BLE001  # logged in full; a store that fails must not end the gateway
            _log.exception("the model store failed")
            return StoreReply(request.number, problem="The model store failed; the server's log says why."), None

    def _permitted(self, tenant: Tenant) -> list[StoredModel]:
        """List the models that a tenant may use; others are not there for it."""
        return [model for model in self._store.models()
                if not _matches(model.name, self._gated) or _matches(model.name, tenant.models)]

    def _opened(self, digest: str, tenant: Tenant) -> int:
        if self._gated and not any(file.digest == digest for model in self._permitted(tenant) for file in model.files):
            raise LookupError(f"No file with the digest {digest[:64]} is stored.")
        return self._store.open(digest)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _key(tenant: Tenant) -> str:
    """Tell a tenant's kept files from those of other tenants."""
    return f"{tenant.name}\0{tenant.key}"


def _kept(request: FromStore, keeper: SupportsKeeping | None, tenant: str) -> KeepReply:
    if keeper is None:
        return KeepReply(problem="This server keeps no files.")
    return keeper.receive(tenant, request.digest, request.writer, request.begin, request.size_bytes,
                          request.piece or b"")


@attrs.define
class _Opened:
    """A file that the gateway has opened.

    Attributes:
        descriptor: Its descriptor.
        identity: What the system said of it when its content was that of its digest.
        tensors: Where its tensors are.
    """

    descriptor: int
    identity: FileIdentity
    tensors: Mapping[str, TensorExtent]


class WorkerModels:
    """The worker's end; see `djinn_plugins.common.operators.stored_models.StoredModels`.

    Args:
        send: Sends the gateway a message.
        describe: Describes the tensors of an open file.

    Concurrency:
        Any thread.
    """

    def __init__(self, send: Callable[[FromStore], None],
                 describe: Callable[[int], Mapping[str, TensorExtent]]) -> None:
        self._describe = describe
        self._replies = PendingReplies[FromStore, StoreReply](send, ANSWER_TIMEOUT_S)
        self.answered = self._replies.answered
        self._opening = threading.Lock()
        self._files: dict[str, _Opened] = {}

    def answer(self, request: str) -> StoreAnswer:
        """Answer a client's question."""
        reply, _ = self._ask("")
        if reply.problem or not request:
            return StoreAnswer(reply.models, problem=reply.problem, keeps_bytes=reply.keeps_bytes)
        name, _, version = request.partition("\n")
        if not name:
            return self._answer_of_file(version, reply)
        found = _chosen([model for model in reply.models if model.name == name], version)
        if len(found) != 1:
            return StoreAnswer(problem=_why_none(name, version, reply.models, found))
        if found[0].problem:
            return StoreAnswer(problem=f"The model {name} cannot be used: {found[0].problem}.")
        try:
            tensors = [StoredTensor(tensor, file.digest, extent.dtype, extent.size) for file in found[0].files
                       for tensor, extent in self._file(file.digest).tensors.items()]
        except RuntimeError as error:
            return StoreAnswer(problem=str(error))
        if len({tensor.name for tensor in tensors}) != len(tensors):
            return StoreAnswer(problem=f"The model {name} cannot be used: two of its files have a tensor of one name.")
        return StoreAnswer((found[0],), tuple(tensors))

    def _answer_of_file(self, digest: str, reply: StoreReply) -> StoreAnswer:
        model = next((model for model in reply.models if any(file.digest == digest for file in model.files)), None)
        if model is None and not reply.keeps_bytes:
            return StoreAnswer()
        try:
            opened = self._file(digest)
        except RuntimeError as error:
            return StoreAnswer(problem=str(error), keeps_bytes=reply.keeps_bytes)
        found = model or StoredModel(digest, files=(StoredFile(digest, opened.identity.size_bytes, digest),))
        return StoreAnswer((found,), tuple(StoredTensor(name, digest, extent.dtype, extent.size)
                                           for name, extent in opened.tensors.items()))

    def keep(self, file: str, writer: str, begin: int, size_bytes: int, piece: torch.Tensor) -> KeepReply:
        """Pass a piece of a file on to the gateway, in parts that fit its messages."""
        with torch.inference_mode(mode=False), torch.no_grad():
            data = bytes(buffer_of(piece.cpu().contiguous()))
        reply = KeepReply(begin)
        for offset in range(0, max(1, len(data)), MAX_PIECE_BYTES):
            part = data[offset:offset + MAX_PIECE_BYTES]
            answer, _ = self._asked(lambda number: FromStore(
                number, file[:64], part, writer[:64], begin + offset, size_bytes))  # noqa: B023  # called at once
            reply = answer.kept or KeepReply(problem=answer.problem or "The gateway keeps no file.")
            if reply.problem or reply.is_stored or reply.position != begin + offset + len(part):
                break
        return reply

    def tensor(self, file: str, name: str) -> torch.Tensor:
        """Map a tensor; writes stay in this process."""
        opened = self._file(file)
        if name not in opened.tensors:
            raise RuntimeError(f"No tensor {name!r} is in the file with the digest {file[:64]}.")
        return mapped(opened.descriptor, opened.tensors[name])

    def _file(self, digest: str) -> _Opened:
        with self._opening:
            opened = self._files.get(digest)
            if opened is None:
                opened = self._files[digest] = self._open(digest)
            identity = identity_of(opened.descriptor)
            if identity != opened.identity and sha256_of(opened.descriptor) == digest:
                # It has lost its name to another file, for example.
                opened.identity = identity
            if identity != opened.identity:
                # Its mappings stay valid: they do not need the descriptor.
                os.close(self._files.pop(digest).descriptor)
                raise RuntimeError(f"The file with the digest {digest[:64]} was changed.")
            return opened

    def _open(self, digest: str) -> _Opened:
        if not digest:
            raise RuntimeError("A file without a digest is not stored.")
        reply, descriptor = self._ask(digest)
        if descriptor is None:
            raise RuntimeError(reply.problem or "The gateway opens no file.")
        try:
            return _Opened(descriptor, identity_of(descriptor), self._describe(descriptor))
        except ValueError as error:
            os.close(descriptor)
            raise RuntimeError(f"The file with the digest {digest[:64]} is damaged: {error}.") from None

    def _ask(self, digest: str) -> tuple[StoreReply, int | None]:
        return self._asked(lambda number: FromStore(number, digest))

    def _asked(self, request: Callable[[int], FromStore]) -> tuple[StoreReply, int | None]:
        return self._replies.ask(request) or (StoreReply(0, problem="The gateway does not answer."), None)


def _chosen(models: list[StoredModel], version: str) -> list[StoredModel]:
    """Choose models of one name by revision, variant or digest: one without a variant, if several are possible."""
    found = [model for model in models if not version or version in (model.revision, model.variant, model.digest)]
    found = [model for model in found if not model.variant] or found
    # Revisions may have the same files.
    return found[:1] if len({model.digest for model in found}) == 1 else found


def _why_none(name: str, version: str, models: tuple[StoredModel, ...], found: list[StoredModel]) -> str:
    if found:
        versions = ", ".join(model.revision or model.digest for model in found)
        return f"The model {name} is stored in several revisions: {versions}."
    others = sorted({model.revision for model in models if model.name == name})
    if others:
        return f"The model {name} is not stored in the revision {version}, but in: {', '.join(others) or 'none'}."
    return f"No model {name} is stored. djinn.models.list() says which ones are."


def mapped(descriptor: int, extent: TensorExtent) -> torch.Tensor:
    """Return a tensor of a file whose header was checked; pages that are written to become this process's own."""
    dtype: torch.dtype = getattr(torch, extent.dtype)
    size_bytes = extent.end - extent.begin
    offset = extent.begin % mmap.ALLOCATIONGRANULARITY
    if size_bytes < MIN_MAPPED_BYTES or extent.begin % dtype.itemsize:
        data: object = _read(descriptor, extent)
        offset = 0
    else:
        data = _mapped(descriptor, extent.begin - offset, size_bytes + offset)
    if not size_bytes:
        return torch.empty(extent.size, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=size_bytes // dtype.itemsize, offset=offset).reshape(extent.size)


def _read(descriptor: int, extent: TensorExtent) -> bytearray:
    data = bytearray(extent.end - extent.begin)
    view, position = memoryview(data), 0
    while position < len(data):
        count = os.preadv(descriptor, [view[position:]], extent.begin + position)
        if not count:
            raise RuntimeError("A file of a model became shorter.")
        position += count
    return data


def _mapped(descriptor: int, begin: int, size_bytes: int) -> object:
    try:
        return map_private(descriptor, begin, size_bytes)
    except OSError as error:
        raise RuntimeError(f"A file of a model cannot be mapped: {error.strerror}.") from None

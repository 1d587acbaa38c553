"""Uploads that several workers hold once: in files in memory that the gateway makes, and seals.

A worker that has received an upload asks the gateway for uploads with the same mark. It maps one, compares all of its
bytes with those that it has received, and uses it only if they are equal. So a client gets no bytes that it has not
sent. A new upload is written to a new file, which the gateway then seals, so that no process can write to it; only
sealed files are found. A value is a private mapping, as in `djinn_plugins.common.memory.kept_memory`.

Tenants share if their tokens name the same group, and all tenants share what the operator has made public. The workers
of one tenant share with each other.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import queue
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import attrs
import torch

from djinn.wire.messages import TensorHeader
from djinn_plugins.common.memory.kept_memory import KeptBytes, copy_to
from djinn_plugins.common.memory.tensor_bytes import bytes_of, size_bytes
from djinn_plugins.common.net.stranger_log import StrangerLog
from djinn_plugins.server.control_channel import AwaitedControl
from djinn_plugins.server.event_loop import Tasks
from djinn_plugins.server.pending_replies import PendingReplies
from djinn_plugins.server.tenants import Tenant
from djinn_plugins.server.upload_messages import (
    DropUpload,
    FindUpload,
    MakeUpload,
    SealUpload,
    UploadReply,
    UploadRequest,
)

__all__ = ("MIN_SHARED_BYTES", "GatewayUploads", "WorkerUploads", "most_files")

MIN_SHARED_BYTES = 2**20
"""Smaller uploads are not shared by workers: each one that is needs a descriptor in every worker."""
MAX_CANDIDATES = 4
"""Uploads of the same mark that a worker compares."""
MAX_UNSEALED = 16
"""Files that a worker writes at a time."""
ANSWER_TIMEOUT_S = 10.0
"""How long a worker waits for the gateway."""
PAUSE_S = 5.0
"""How long a worker does not ask again if its tenant shares with no other, or if the gateway did not answer."""
_PUBLIC = ""
"""Group of public uploads; no token can name it."""
_log = logging.getLogger("djinn.server")
_strangers = StrangerLog(_log)


def most_files() -> int:
    """Return how many shared uploads a process may have open: a quarter of all files that it may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4


@attrs.define(eq=False)
class _Upload:
    """A file in memory.

    Attributes:
        number: Its number.
        key: Group, mark and size.
        descriptor: The file.
        maker: The worker that writes it.
        uses: How often each worker uses it.
    """

    number: int
    key: tuple[str, bytes, int]
    descriptor: int
    maker: AwaitedControl
    is_sealed: bool = False
    uses: Counter[AwaitedControl] = attrs.field(factory=Counter)

    @property
    def size_bytes(self) -> int:
        return self.key[2]


class GatewayUploads:
    """The gateway's end: makes files in memory, seals them, and hands them out.

    Args:
        limit_bytes: Most bytes of the uploads that one worker makes.
        tasks: Where replies wait.
        limit_files: Most files, of all workers together; one makes half of them at most.
        among_owners: Whether the workers of one tenant share, too.

    Concurrency:
        Tasks of one event loop; any thread calls `charged_to_others`.
    """

    def __init__(self, limit_bytes: int, tasks: Tasks, limit_files: int | None = None, *,
                 among_owners: bool = False) -> None:
        self._among_owners = among_owners
        self._limit_bytes = limit_bytes
        self._limit_files = most_files() if limit_files is None else limit_files
        self._tasks = tasks
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._uploads: dict[int, _Upload] = {}
        self._sealed: dict[tuple[str, bytes, int], list[_Upload]] = {}

    def answer(self, request: UploadRequest, control: AwaitedControl, tenant: Tenant) -> None:
        """Answer the worker of a tenant; returns at once."""
        with self._lock:
            if isinstance(request, DropUpload):
                self._drop(request.upload, control)
                return
            try:
                reply, descriptor = self._reply(request, control, tenant)
            except OSError as error:
                _strangers.write(logging.WARNING, "uploads that cannot be shared", "an upload cannot be shared: %s",
                                 error)
                reply, descriptor = UploadReply(request.number), None

        async def answer() -> tuple[UploadReply, int | None]:
            return reply, descriptor

        control.question(self._tasks, answer)

    def leave(self, control: AwaitedControl) -> None:
        """Drop all that a worker uses, which has ended."""
        with self._lock:
            for upload in list(self._uploads.values()):
                if upload.uses.pop(control, 0) and not upload.uses:
                    self._close(upload)

    def charged_to_others(self, control: AwaitedControl) -> int:
        """Return how many bytes of the uploads of a worker are charged to others: each pays an equal part."""
        with self._lock:
            return sum(upload.size_bytes - upload.size_bytes // len(upload.uses)
                       for upload in self._uploads.values() if control in upload.uses)

    def _find(self, key: tuple[str, bytes, int], after: int) -> _Upload | None:
        alike = self._sealed.get(key, [])
        if after:
            # In the order in which they were sealed; if that upload is gone, there are no further ones.
            alike = alike[next((place for place, upload in enumerate(alike, 1) if upload.number == after), len(alike)):]
        return next(iter(alike), None)

    def _make(self, key: tuple[str, bytes, int], control: AwaitedControl) -> _Upload | None:
        size_bytes = key[2]
        made = [upload for upload in self._uploads.values() if upload.maker is control]
        made_bytes = sum(upload.size_bytes for upload in made)
        if size_bytes < MIN_SHARED_BYTES or made_bytes + size_bytes > self._limit_bytes or (
                len(self._uploads) >= self._limit_files or len(made) > self._limit_files // 2
                or sum(not upload.is_sealed for upload in made) >= MAX_UNSEALED):
            return None
        descriptor = os.memfd_create("djinn-shared", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        upload = _Upload(next(self._numbers), key, descriptor, control)
        self._uploads[upload.number] = upload
        try:
            os.ftruncate(descriptor, size_bytes)
            # A reader of a file that shrinks would die.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except OSError:
            self._close(upload)
            raise
        return upload

    def _seal(self, number: int, control: AwaitedControl) -> _Upload | None:
        upload = self._uploads.get(number)
        if upload is None or upload.maker is not control or upload.is_sealed:
            return None
        # Refused while anybody can write to it.
        fcntl.fcntl(upload.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
        upload.is_sealed = True
        self._sealed.setdefault(upload.key, []).append(upload)
        return upload

    def _drop(self, number: int, control: AwaitedControl) -> None:
        upload = self._uploads.get(number)
        if upload is None or not upload.uses[control]:
            return
        upload.uses[control] -= 1
        if not upload.uses[control]:
            del upload.uses[control]
            if not upload.uses:
                self._close(upload)

    def _close(self, upload: _Upload) -> None:
        del self._uploads[upload.number]
        if upload.is_sealed:
            alike = self._sealed[upload.key]
            alike.remove(upload)
            if not alike:
                del self._sealed[upload.key]
        os.close(upload.descriptor)

    def _reply(self, request: FindUpload | MakeUpload | SealUpload, control: AwaitedControl, tenant: Tenant
               ) -> tuple[UploadReply, int | None]:
        if isinstance(request, SealUpload):
            sealed = self._seal(request.upload, control)
            return UploadReply(request.number, 0 if sealed is None else sealed.number), None
        # No token can name the group of one tenant's workers.
        group = _PUBLIC if request.is_public else tenant.share or (
            f"\0{tenant.name}\0{tenant.key}" if self._among_owners else "")
        if not group and not request.is_public:
            return UploadReply(request.number, is_member=False), None
        key = group, request.mark, request.size_bytes
        found = self._find(key, request.after) if isinstance(request, FindUpload) else self._make(key, control)
        if found is None:
            return UploadReply(request.number), None
        try:
            # Until it is sent, the upload may be closed, and its descriptor may become another file's.
            descriptor = os.dup(found.descriptor)
        except OSError:
            if not found.uses:
                self._close(found)
            raise
        found.uses[control] += 1
        return UploadReply(request.number, found.number), descriptor


class WorkerUploads:
    """The worker's end; see `djinn_plugins.executor.content_store.SharedUploads`.

    Args:
        send: Sends the gateway a message.
        limit_files: Most uploads that the worker has open.

    Concurrency:
        Any thread.
    """

    def __init__(self, send: Callable[[UploadRequest], None], limit_files: int | None = None) -> None:
        self._replies = PendingReplies[FindUpload | MakeUpload | SealUpload, UploadReply](send, ANSWER_TIMEOUT_S)
        self._send = send
        self._limit_files = most_files() if limit_files is None else limit_files
        self._count = 0
        self._lock = threading.Lock()
        self._pauses_until_s = {True: 0.0, False: 0.0}
        """By whether uploads are public."""
        self._unused: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._dropper: threading.Thread | None = None

    def answered(self, reply: UploadReply, descriptor: int | None) -> None:
        """Handle the gateway's answer."""
        if not self._replies.answered(reply, descriptor) and descriptor is not None:
            self._unused.put((reply.upload, -1))

    def store(self, header: TensorHeader, tensor: torch.Tensor, mark: bytes, *, is_public: bool,
              makes: bool = True) -> KeptBytes | None:
        """Return the bytes of a dense CPU tensor; see `djinn_plugins.executor.content_store.SharedUploads.store`."""
        size = size_bytes(header)
        if size < MIN_SHARED_BYTES or self._count >= self._limit_files or self._pauses(is_public):
            return None
        found = self._equal(header, tensor, mark, is_public)
        if found is not None or not makes or self._pauses(is_public):
            return found
        opened = self._open(lambda number: MakeUpload(number, mark, size, is_public))
        if opened is None:
            return None
        number, made = opened
        copy_to(made.descriptor, 0, size, bytes_of(tensor))
        sealed = self._replies.ask(lambda request: SealUpload(request, number))
        if sealed is None or not sealed[0].upload:
            return None
        # Another worker may have stored the same meanwhile.
        return self._equal(header, tensor, mark, is_public, number) or made

    def _equal(self, header: TensorHeader, tensor: torch.Tensor, mark: bytes, is_public: bool, own: int = 0
               ) -> KeptBytes | None:
        """Return the bytes of an upload that are equal to a tensor's: one that was sealed before this worker's own."""
        data, size, after = bytes_of(tensor), size_bytes(header), 0
        for _ in range(MAX_CANDIDATES):
            opened = self._open(lambda number: FindUpload(number, mark, size, is_public, after))  # noqa: B023  # called at once
            if opened is None:
                return None
            after, bytes_there = opened
            if after == own:
                return None
            there = bytes_there.mapped(header)
            if there is not None and torch.equal(bytes_of(there), data):
                return bytes_there
        return None

    def _open(self, request: Callable[[int], FindUpload | MakeUpload]) -> tuple[int, KeptBytes] | None:
        found = self._replies.ask(request)
        if found is None:
            self._pauses_until_s = dict.fromkeys((True, False), time.monotonic() + PAUSE_S)
            return None
        reply, descriptor = found
        if not reply.is_member:
            self._pauses_until_s[False] = time.monotonic() + PAUSE_S
        if descriptor is None:
            return None
        with self._lock:
            self._count += 1
            if self._dropper is None:
                self._dropper = threading.Thread(target=self._drop_unused, name="djinn-uploads", daemon=True)
                self._dropper.start()
        # Called when memory is collected, in any thread and at any time, so that it must not send a message itself.
        return reply.upload, KeptBytes(descriptor, 0, partial(self._unused.put, (reply.upload, descriptor)))

    def _pauses(self, is_public: bool) -> bool:
        return time.monotonic() < self._pauses_until_s[is_public]

    def _drop_unused(self) -> None:
        while True:
            number, descriptor = self._unused.get()
            if descriptor >= 0:
                os.close(descriptor)
                with self._lock:
                    self._count -= 1
            try:
                self._send(DropUpload(number))
            except OSError as error:
                _log.info("the gateway hears nothing: %s", error)

"""The client's side of contents: a connection that sends a digest instead of data that the server already has."""

from __future__ import annotations

import functools
import hashlib
import secrets
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import torch
from msgspec import Meta

from djinn.errors import TransportError
from djinn.kinds.connection_wrapper import ConnectionWrapper
from djinn.wire.messages import (
    DIGEST_BYTES,
    DIGESTS_HANDLE,
    GENERATOR_HANDLE,
    MARK_BYTES,
    MARKS_HANDLE,
    MAX_WARNINGS,
    Batch,
    Command,
    Plain,
    Result,
    Upload,
    UploadByDigest,
)
from djinn_plugins.common.memory.fingerprint import mark_of
from djinn_plugins.common.memory.tensor_bytes import size_bytes
from djinn_plugins.common.memory.upload_digests import digest_of, is_worth_keeping

if TYPE_CHECKING:
    from djinn.kinds.transport import Connection

AUTOMATIC = "auto"
"""The owner is this process, and nothing is kept if the server runs on the same machine."""
ASK_AGAIN_BYTES = 2**23
"""Bytes to upload before the client asks again what the server keeps; doubled when asking was in vain."""
MAX_MARKS = 2**16
"""Most marks of this connection's own uploads that are remembered."""
_process_owner = secrets.token_hex(32)
_Mark = Annotated[bytes, Meta(min_length=MARK_BYTES, max_length=MARK_BYTES)]
_Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


def after(earlier: Result, result: Result) -> Result:
    """Merge the reports of an earlier answer, which have not been processed yet, into an answer."""
    if not (earlier.failures or earlier.timings or earlier.run_ns or earlier.warnings):
        return result
    return Result(result.items, earlier.failures + result.failures, earlier.timings + result.timings, result.now_ns,
                  earlier.run_ns + result.run_ns, (earlier.warnings + result.warnings)[:MAX_WARNINGS])


def introduce(owner: str, token: str) -> tuple[str, str]:
    """Return ``Hello.owner`` and ``Hello.machine``.

    Args:
        owner: The setting: a secret chosen by the user, `AUTOMATIC`, or an empty string.
        token: The server's token, so that owners differ between servers.
    """
    if not owner:
        return "", ""
    secret = _process_owner if owner == AUTOMATIC else owner
    identity = hashlib.sha256(f"{token}\0{secret}".encode("utf-8", "surrogateescape")).hexdigest()
    return identity, this_machine() if owner == AUTOMATIC else ""


@functools.cache
def this_machine() -> str:
    """Identify the machine, within which processes share memory, until it reboots."""
    try:
        known = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        known = str(uuid.getnode())
    return hashlib.sha256(known.encode()).hexdigest()


def reusing(connection: Connection) -> Connection:
    """Wrap a connection so that it does not upload contents that the server keeps, if the server keeps any."""
    return connection if connection.welcome.kept < 0 else DedupConnection(connection)


class DedupConnection(ConnectionWrapper):
    """A connection that sends the same content only once; see `djinn.kinds.transport.Connection`.

    The client asks what the server keeps before its first large upload, unless the server keeps nothing. It asks again
    when an upload has the same mark as an earlier one of this session. Only uploads whose marks match are digested.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._bytes_not_sent = 0
        self._round_trips = 0
        self._marks: set[bytes] | None = None if connection.welcome.kept else set()
        self._digests: frozenset[bytes] | None = None
        self._own_marks: set[bytes] = set()
        self._uploaded_bytes = 0
        self._patience_bytes = ASK_AGAIN_BYTES
        self._settled = Result()

    @property
    def bytes_not_sent(self) -> int:
        """Bytes of tensors that the server already had."""
        return self._bytes_not_sent

    @property
    def round_trips(self) -> int:
        """As of the wrapped connection, with the questions about what the server keeps."""
        return super().round_trips + self._round_trips

    def submit(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> None:
        """Send a batch that requests no answer."""
        self.plain.submit(*self._reduced(batch, tensors))

    def request(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> tuple[Result, list[torch.Tensor]]:
        """Send a batch and wait for its answer."""
        result, data = self.plain.request(*self._reduced(batch, tensors))
        settled, self._settled = self._settled, Result()
        return after(settled, result), data

    def _reduced(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> tuple[Batch, Sequence[torch.Tensor]]:
        try:
            return self._without_known(batch, tensors)
        except BaseException as error:
            if not isinstance(error, Exception):
                # Later batches refer to the values that this batch creates: send it whole, without waiting for
                # anything.
                self.plain.submit(batch, tensors)
            raise

    def _without_known(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> tuple[Batch, Sequence[torch.Tensor]]:
        if not tensors:
            return batch, tensors
        commands: list[Command] = []
        left: list[torch.Tensor] = []
        given = iter(tensors)
        for command in batch.commands:
            if not isinstance(command, Upload):
                commands.append(command)
                continue
            tensor = next(given)
            digest = self._known_digest(command, tensor)
            if digest is None:
                left.append(tensor)
                commands.append(command)
            else:
                self._bytes_not_sent += size_bytes(command.tensor)
                commands.append(UploadByDigest(command.handle, digest))
        return msgspec.structs.replace(batch, commands=commands), left

    def _known_digest(self, upload: Upload, tensor: torch.Tensor) -> bytes | None:
        """Return the digest of a tensor if the server keeps it."""
        if upload.handle == GENERATOR_HANDLE or not is_worth_keeping(upload.tensor):
            return None
        mark = mark_of(upload.tensor, tensor)
        is_again = mark in self._own_marks and self._uploaded_bytes >= self._patience_bytes
        if self._marks is None or is_again:
            self._ask()
        if self._marks is not None and mark in self._marks:
            if self._digests is None:
                self._digests = frozenset(self._fetch(DIGESTS_HANDLE, list[_Digest]))
            digest = digest_of(upload.tensor, tensor)
            if digest in self._digests:
                self._patience_bytes = ASK_AGAIN_BYTES
                return digest
            # The mark matches but the content differs; upload further tensors with this mark without digesting them.
            self._marks.discard(mark)
        if is_again:
            self._patience_bytes *= 2
        if len(self._own_marks) >= MAX_MARKS:
            self._own_marks.clear()
        self._own_marks.add(mark)
        self._uploaded_bytes += size_bytes(upload.tensor)
        return None

    def _ask(self) -> None:
        self._marks = set(self._fetch(MARKS_HANDLE, list[_Mark]))
        self._digests = None
        self._own_marks.clear()
        self._uploaded_bytes = 0

    def _fetch(self, handle: int, kind: type[list[bytes]]) -> list[bytes]:
        self._round_trips += 1
        result, _ = self.plain.request(Batch(fetch=(handle,)), ())
        self._settled = after(self._settled, result)
        item = result.items[0] if result.items else None
        try:
            return msgspec.convert(item.value if isinstance(item, Plain) else None, kind)
        except msgspec.ValidationError as error:
            raise TransportError(f"{self.address} does not say what it keeps: {error}.",
                                 hint="Install the same djinn release on both.") from None

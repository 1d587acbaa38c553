"""Messages between the gateway and workers about uploads that workers share.

See `djinn_plugins.server.shared_uploads`.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from djinn.wire.messages import MARK_BYTES

__all__ = ("DropUpload", "FindUpload", "MakeUpload", "SealUpload", "UploadReply", "UploadRequest")

_Mark = Annotated[bytes, Meta(min_length=MARK_BYTES, max_length=MARK_BYTES)]
_Size = Annotated[int, Meta(ge=1, le=2**48)]


class FindUpload(msgspec.Struct, frozen=True, tag="find_upload"):
    """From a worker: a request for an upload of another worker that may have the same bytes.

    Attributes:
        number: Identifies the request in its answer.
        mark: The upload's mark; see `djinn_plugins.common.memory.fingerprint.mark_of`.
        size_bytes: Its size.
        is_public: Whether the operator has made it public.
        after: Number of the upload that was found last; 0 for the one that was sealed first.
    """

    number: int
    mark: _Mark
    size_bytes: _Size
    is_public: bool = False
    after: Annotated[int, Meta(ge=0)] = 0


class MakeUpload(msgspec.Struct, frozen=True, tag="make_upload"):
    """From a worker: a request for memory for an upload that other workers may share; see `FindUpload`."""

    number: int
    mark: _Mark
    size_bytes: _Size
    is_public: bool = False


class SealUpload(msgspec.Struct, frozen=True, tag="seal_upload"):
    """From a worker: it has written an upload, and sealed it against further writes.

    Attributes:
        number: Identifies the request in its answer.
        upload: Number of the upload.
    """

    number: int
    upload: int


class DropUpload(msgspec.Struct, frozen=True, tag="drop_upload"):
    """From a worker: it uses an upload no more. Each `UploadReply` with a descriptor is one use."""

    upload: int


class UploadReply(msgspec.Struct, frozen=True, tag="upload_reply"):
    """To a worker: the answer about an upload, with the descriptor of its memory for a `FindUpload` or `MakeUpload`.

    Attributes:
        number: Number of the request.
        upload: Number of the upload; 0 if there is none.
        is_member: Whether the worker's tenant shares uploads with others.
    """

    number: int
    upload: int = 0
    is_member: bool = True


UploadRequest: TypeAlias = FindUpload | MakeUpload | SealUpload | DropUpload

"""Models that a server has: their descriptions, and the operators that make values of their tensors.

``djinn::stored_tensor`` is recorded like any operation. So a model is loaded in program order and without a round trip,
is placed like other operations, and is loaded again by a replay. ``djinn::stored_models`` asks for the descriptions.
``djinn::keep_piece`` sends a piece of a file that the server may keep.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, NamedTuple, Protocol

import msgspec
import torch
from msgspec import Meta

from djinn_plugins.common.memory.kept_memory import is_mapped
from djinn_plugins.common.memory.shared_values import SharedValue
from djinn_plugins.common.once import once
from djinn_plugins.common.operators.own import define_operators
from djinn_plugins.common.operators.struct_tensors import encoded

__all__ = ("STORED_OPERATORS", "STORED_TENSOR", "KeepReply", "StoreAnswer", "StoredFile", "StoredModel", "StoredModels",
           "StoredOperators", "StoredTensor", "provide", "stored_operators")

STORED_TENSOR = "djinn::stored_tensor"
_SCHEMAS = {
    "stored_models": "(Tensor like, str request) -> Tensor",
    "stored_tensor": "(Tensor like, str file, str name, int[] size, *, ScalarType dtype) -> Tensor",
    "keep_piece": "(Tensor piece, str file, str writer, int begin, int size) -> Tensor",
}
STORED_OPERATORS = frozenset(f"djinn::{name}" for name in _SCHEMAS)
"""Their names. None writes to an argument, or returns a view of one."""
_Hex = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
_provided: list[StoredModels] = []
_shared: dict[tuple[str, str], SharedValue] = {}
"""What values on a device share, by the digest of a file and the name of a tensor."""


class StoredFile(msgspec.Struct, frozen=True):
    """A file of a model.

    Attributes:
        name: Its name in the model's folder.
        size_bytes: Its size.
        digest: SHA-256 of its content, in hexadecimal.
    """

    name: str
    size_bytes: Annotated[int, Meta(ge=0)]
    digest: _Hex


class StoredModel(msgspec.Struct, frozen=True):
    """A model.

    Attributes:
        name: Its name.
        revision: Its revision; empty if it has none.
        files: Its files, by name; empty if there is a problem.
        problem: Why it cannot be used, with the name of the file; empty if it can.
        variant: Its variant, such as ``fp16``; empty for the weights that are loaded by the name alone.
    """

    name: str
    revision: str = ""
    files: tuple[StoredFile, ...] = ()
    problem: str = ""
    variant: str = ""

    @property
    def digest(self) -> str:
        """The digest of its file; of several: SHA-256 of their lines in the form of ``sha256sum``."""
        if len(self.files) == 1:
            return self.files[0].digest
        lines = "".join(f"{file.digest}  {file.name}\n" for file in self.files)
        return hashlib.sha256(lines.encode()).hexdigest() if self.files else ""

    @property
    def size_bytes(self) -> int:
        """Size of all its files."""
        return sum(file.size_bytes for file in self.files)


class StoredTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of a model.

    Attributes:
        name: Its name.
        file: Digest of its file.
        dtype: Its dtype, by the name that it has in ``torch``.
        size: Its sizes.
    """

    name: str
    file: _Hex
    dtype: str
    size: tuple[Annotated[int, Meta(ge=0)], ...]


class StoreAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer of a store to a client.

    Attributes:
        models: Its models; for a question about one, that one.
        tensors: The tensors of that one.
        problem: Why there is no such answer.
        keeps_bytes: Size of the largest file that the server would keep for this client.
    """

    models: tuple[StoredModel, ...] = ()
    tensors: tuple[StoredTensor, ...] = ()
    problem: str = ""
    keeps_bytes: int = 0


class KeepReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a store says to a piece of a file.

    Attributes:
        position: Where the next piece begins.
        is_stored: Whether all of the file is there.
        wait_s: How long to wait before the next piece, because another client sends the file; 0 if none does.
        problem: Why the file is not kept.
    """

    position: Annotated[int, Meta(ge=0)] = 0
    is_stored: bool = False
    wait_s: Annotated[float, Meta(ge=0)] = 0.0
    problem: str = ""


class StoredModels(Protocol):
    """The models of the server that runs in this process.

    Concurrency:
        Any thread.
    """

    def answer(self, request: str) -> StoreAnswer:
        """Answer a question.

        It is empty for all models; or a name, and in a second line a revision, a variant, a digest, or nothing; or an
        empty line and the digest of a file, whose tensors the answer then describes, if there is such a file.

        Never raises: the answer contains the problem.
        """

    def keep(self, file: str, writer: str, begin: int, size_bytes: int, piece: torch.Tensor) -> KeepReply:
        """Receive a piece of a file; see `djinn_plugins.server.kinds.store.SupportsKeeping.receive`. Never raises."""

    def tensor(self, file: str, name: str) -> torch.Tensor:
        """Return a tensor of a file, in memory of the host that its caller may write to.

        Args:
            file: The file's digest.
            name: The tensor's name.

        Raises:
            RuntimeError: There is no such file or tensor, or the file has changed.
        """


class StoredOperators(NamedTuple):
    """The operators."""

    models: Any
    tensor: Any
    keep: Any


def provide(models: StoredModels | None) -> None:
    """Let the operators use these models; ``None`` for none."""
    _provided[:] = [] if models is None else [models]


@once
def stored_operators() -> StoredOperators:
    """Return the operators; the first call defines them."""
    kernels = {"stored_models": (_models, None), "stored_tensor": (_tensor, _tensor_meta), "keep_piece": (_keep, None)}
    tags = dict.fromkeys(("stored_models", "keep_piece"), torch.Tag.dynamic_output_shape)
    # A CUDA graph would copy the file again, and not share it.
    return StoredOperators(*define_operators(_SCHEMAS, kernels, {**tags, "stored_tensor": torch.Tag.cudagraph_unsafe}))


def _models(like: torch.Tensor, request: str) -> torch.Tensor:
    answer = _provided[0].answer(request) if _provided else StoreAnswer(
        problem="This server has no models. Its operator names a folder of them: djinn serve --models DIR.")
    return encoded(answer, like)


def _keep(piece: torch.Tensor, file: str, writer: str, begin: int, size: int) -> torch.Tensor:
    reply = _provided[0].keep(file, writer, begin, size, piece) if _provided else KeepReply(
        problem="This server has no models.")
    return encoded(reply, piece)


def _tensor(like: torch.Tensor, file: str, name: str, size: list[int], *, dtype: torch.dtype) -> torch.Tensor:
    if not _provided:
        raise RuntimeError("This server has no models.")
    with torch.inference_mode(mode=False), torch.no_grad():
        found = _provided[0].tensor(file, name)
        if list(found.shape) != list(size) or found.dtype is not dtype:
            raise RuntimeError(f"Tensor {name!r} is a {found.dtype} of size {list(found.shape)}, not a {dtype} of "
                               f"{list(size)}.")
        if like.device.type == "cpu" and is_mapped(found):
            return found
        shared = _shared.setdefault((file, name), SharedValue())
        value = shared.value(like.device)
        return shared.share(found.to(like.device)) if value is None else value


def _tensor_meta(like: torch.Tensor, file: str, name: str, size: list[int], *, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")

"""``djinn.models``: which models a server has, and their tensors."""

from __future__ import annotations

import logging
import os
import re
import secrets
import warnings
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any

import msgspec
import torch

import djinn
from djinn.errors import ConfigurationError, ProtocolError
from djinn.record.devices import logical_device
from djinn.session import runtime
from djinn.wire.tensors import dtype_named
from djinn_plugins.common.net.waits import now_waiting, waiting
from djinn_plugins.common.operators.stored_models import (
    KeepReply,
    StoreAnswer,
    StoredModel,
    StoredTensor,
    stored_operators,
)
from djinn_plugins.common.operators.struct_tensors import decoded
from djinn_plugins.models.file_digests import digest_of

if TYPE_CHECKING:
    import builtins

__all__ = ("all_made", "answer_of_file", "answer_of_store", "list", "load", "load_file", "made", "named",
           "sent_whole", "stored_files", "tensors_of")

_PIECE_BYTES = 2**24
"""Of a file that is sent."""
_log = logging.getLogger("djinn.models")
_DIGITS = re.compile(r"([0-9]{1,9})")


def list(device: Any = None) -> builtins.list[StoredModel]:  # noqa: A001  # always called as djinn.models.list
    """List the models of the server, those that it cannot use included.

    Args:
        device: A device of the server; the current one by default.

    Raises:
        ConfigurationError: The server has no store.
    """
    return [*_asked(device, "").models]


def load(name: str, *, revision: str = "", dtype: torch.dtype | None = None, device: Any = None
         ) -> dict[str, torch.Tensor]:
    """Return the tensors of a model, which stay on the server.

    Args:
        name: The model's name, as listed.
        revision: Its revision, variant or digest; needed if the server has several revisions.
        dtype: If given, tensors of real and complex floating point are converted to it.
        device: A device of the server; the current one by default.

    Raises:
        ConfigurationError: The server has no such model, or cannot use it.
    """
    return all_made(tensors_of(name, revision, device), device, dtype)


def load_file(path: str | os.PathLike[str], *, dtype: torch.dtype | None = None, device: Any = None
              ) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file of this machine, on the device.

    If the server has a file with the same content, no tensor is sent. If it keeps files, the file is sent once.
    Otherwise its tensors are, one after another. The file is only digested if the server has one of its size, or keeps
    files; see `djinn_plugins.models.file_digests`.

    Args:
        path: The file.
        dtype: If given, tensors of real and complex floating point are converted to it, on the server.
        device: A device of the server; the current one by default.

    Raises:
        OSError: The file cannot be read.
        ImportError: The file has to be sent, and the package safetensors is not installed.
    """
    found = stored_files([path], device=device)
    if found is None:
        like = _like(device)
        read = import_module("safetensors.torch").load_file(path)
        found = {name: read.pop(name).to(like.device) for name in [*read]}
    return {name: _converted(tensor, dtype) for name, tensor in found.items()}


def stored_files(paths: Iterable[str | os.PathLike[str]], *, device: Any = None) -> dict[str, torch.Tensor] | None:
    """As `load_file` for files together, but ``None`` if the server lacks one of them; it lists its models once.

    Raises:
        OSError: A file cannot be read.
    """
    files = [Path(path).resolve(strict=True) for path in paths]
    known = answer_of_store(device)
    sizes = {stored.size_bytes for model in known.models for stored in model.files}
    if any(file.stat().st_size not in sizes and not 0 < file.stat().st_size <= known.keeps_bytes for file in files):
        return None
    found: builtins.list[StoredTensor] = []
    for file in files:
        digest = digest_of(file)
        answer = answer_of_file(digest, device)
        if not answer.models and file.stat().st_size <= known.keeps_bytes and sent_whole(file, digest, device):
            answer = answer_of_file(digest, device)
        if answer.problem or not answer.models:
            return None
        found += answer.tensors
    return all_made(StoreAnswer(tensors=tuple(found)), device)


def sent_whole(file: Path, digest: str, device: Any = None) -> bool:
    """Send a file that the server keeps, unless another client does; return whether it is there."""
    like = _like(device)
    writer, size_bytes, position = secrets.token_hex(8), file.stat().st_size, 0
    piece = torch.empty(0, dtype=torch.uint8)
    with file.open("rb", buffering=0) as opened, warnings.catch_warnings(), waiting(f"sending {file.name}"):
        # It waits for each piece, which is no fault of the program.
        warnings.filterwarnings("ignore", "This line has waited")
        while True:
            answer = stored_operators().keep(piece.to(like.device), digest, writer, position, size_bytes).cpu()
            reply = decoded(answer, _keep_decoder)
            if reply.problem or reply.is_stored:
                _log.info("%s: %s", file.name, reply.problem or f"the server has all {size_bytes} bytes")
                return not reply.problem
            if reply.position > size_bytes:
                raise ProtocolError(f"It wants {file.name} from byte {reply.position}; the file has {size_bytes}.")
            position = reply.position
            if reply.wait_s:
                now_waiting(f"another client sends {file.name}: {position} of {size_bytes} bytes are there")
                sleep(min(reply.wait_s, 1.0))
            else:
                now_waiting(f"sending {file.name}", position, size_bytes)
            _log.info("%s: %d of %d bytes are sent", file.name, position, size_bytes)
            opened.seek(position)
            data = b"" if reply.wait_s else opened.read(_PIECE_BYTES)
            if not data and not reply.wait_s:
                return False
            piece = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else piece[:0]


def _converted(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor if dtype is None or not (tensor.is_floating_point() or tensor.is_complex()) else tensor.to(dtype)


def all_made(found: StoreAnswer, device: Any = None, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Record the operations that make stored tensors, layer 10 behind layer 9: servers are filled in this order."""
    like = _like(device)
    ordered = sorted(found.tensors, key=lambda tensor: [
        (0, int(part), "") if part.isdecimal() else (1, 0, part) for part in _DIGITS.split(tensor.name)])
    values = {tensor.name: _converted(made(like, tensor), dtype) for tensor in ordered}
    return {tensor.name: values[tensor.name] for tensor in found.tensors}


def named(names: Sequence[str], revision: str, device: Any = None, *, is_exact: bool = False, variant: str = ""
          ) -> StoreAnswer | None:
    """Describe the first of several names that the server has, and its tensors; ``None`` if it has none of them.

    Args:
        names: Names of models.
        revision: Preferred where the server has several.
        device: A device of the server; the current one by default.
        is_exact: Whether it must be that revision.
        variant: Its variant; if empty, a model's only one will do.

    Raises:
        ConfigurationError: The server cannot use that model.
    """
    stored = answer_of_store(device).models
    for name in names:
        found = [model for model in stored if model.name == name]
        found = [model for model in found if model.variant == variant] or ([] if variant else found)
        exact = [model for model in found if revision and model.revision == revision]
        if exact or (len(found) == 1 and not is_exact):
            _log.info("%s: the server has this model", name)
            chosen = (exact or found)[0]
            return tensors_of(name, (chosen.digest or variant) if variant else chosen.revision, device)
    return None


def tensors_of(name: str, revision: str = "", device: Any = None) -> StoreAnswer:
    """Return the description of a model and of its tensors.

    Raises:
        ConfigurationError: The server has no such model, or cannot use it.
    """
    return _asked(device, f"{name}\n{revision}")


def made(like: torch.Tensor, tensor: StoredTensor) -> torch.Tensor:
    """Record the operation that makes a value of a stored tensor, on the device of another one."""
    result: torch.Tensor = stored_operators().tensor(
        like, tensor.file, tensor.name, [*tensor.size], dtype=dtype_named(tensor.dtype))
    return result


def answer_of_store(device: Any = None) -> StoreAnswer:
    """Ask a server for its models; without a store, it has none."""
    return _answer(device, "")


def answer_of_file(digest: str, device: Any = None) -> StoreAnswer:
    """Ask a server for the tensors of a file, which it has none of without the file."""
    return _answer(device, f"\n{digest}")


def _like(device: Any) -> torch.Tensor:
    djinn.ensure_initialized()
    return torch.empty(0, device=logical_device() if device is None else device)


def _asked(device: Any, request: str) -> StoreAnswer:
    found = _answer(device, request)
    if found.problem:
        raise ConfigurationError(found.problem)
    return found


def _answer(device: Any, request: str) -> StoreAnswer:
    """Ask a server; if the session places tensors itself, all of its servers, for what each of them has."""
    djinn.ensure_initialized()
    session = runtime.current()
    executors = session.backend.executors
    if len(executors) == 1 or session.backend.device_count > 1:
        return _answer_of_one(device, request)
    # Few sessions have several servers.
    from djinn_plugins.schedule.placing import pinned

    answers = []
    for index, executor in enumerate(executors):
        with pinned(session, index):
            answers.append(_answer_of_one(device, request))
        if answers[-1].problem:
            return StoreAnswer(problem=f"{executor.address}: {answers[-1].problem}")
    return _had_by_all(answers, request)


def _answer_of_one(device: Any, request: str) -> StoreAnswer:
    return decoded(stored_operators().models(_like(device), request).cpu(), _store_decoder)


def _had_by_all(answers: Sequence[StoreAnswer], request: str) -> StoreAnswer:
    """Return what several servers have in common. None of them keeps a file, which would be at one of them only."""
    first, *others = answers
    if not request:
        return StoreAnswer(tuple(model for model in first.models if all(model in other.models for other in others)))
    if any(other.tensors != first.tensors for other in others):
        # Tensors have the digest of their file.
        name = request.partition("\n")[0]
        return StoreAnswer(problem=f"The servers have different models of the name {name}." if name else "")
    return StoreAnswer(first.models, first.tensors)


_keep_decoder = msgspec.msgpack.Decoder(KeepReply)
_store_decoder = msgspec.msgpack.Decoder(StoreAnswer)

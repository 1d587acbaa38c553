"""The store: looks at files when it is asked, and reads one to digest it only if it is new or has changed."""

from __future__ import annotations

import json
import logging
import os
import struct
import threading
from collections.abc import Mapping
from pathlib import Path
from time import monotonic_ns, sleep, time_ns

import attrs
import msgspec
import torch

from djinn.errors import ConfigurationError
from djinn_plugins.common.files.identity import TICK_NS, FileIdentity, identity_of, is_settled, sha256_of
from djinn_plugins.common.files.tensor_files import describe
from djinn_plugins.common.operators.stored_models import StoredFile, StoredModel
from djinn_plugins.server.kinds.store import StoreSample, TensorExtent
from djinn_plugins.server.options import ServeOptions
from djinn_plugins.server.safetensors_store.folder import Candidate, candidates, expected_digests, files_of
from djinn_plugins.server.safetensors_store.kept_files import KeptFiles

__all__ = ("SafetensorsStore", "SafetensorsStores")

_log = logging.getLogger("djinn.server")


@attrs.frozen
class _Known:
    """A file that was looked at: the digest of its content, or the fault in it.

    Attributes:
        identity: What the system said of it before.
        seen_ns: When it said so first, by the monotonic clock.
        digest: Its digest; empty if there is a fault.
        problem: The fault.
        is_settled: Whether a later change shows in the identity.
    """

    identity: FileIdentity
    seen_ns: int
    digest: str = ""
    problem: str = ""
    is_settled: bool = True


class SafetensorsStore:
    """The models of a folder; see `djinn_plugins.server.kinds.store.ModelStore`.

    Args:
        folder: The folder.
        keep_bytes: How much is kept of files that clients have sent.
    """

    def __init__(self, folder: Path, keep_bytes: int = 0) -> None:
        self._folder = folder.resolve()
        self.keep_bytes = keep_bytes
        kept = KeptFiles(self._folder, keep_bytes)
        self.open_kept, self.receive = kept.open, kept.receive
        self._known: dict[Path, _Known] = {}
        self._paths: dict[str, Path] = {}
        """Files of models that can be used, by digest."""
        self._said: set[str] = set()
        self._lock = threading.Lock()

    def models(self) -> list[StoredModel]:
        """List the current models; new files are digested."""
        with self._lock:
            found = [self._model(candidate) for candidate in candidates(self._folder)]
            # `Path.exists` raises where a folder may not be looked into.
            self._known = {path: known for path, known in self._known.items() if os.path.exists(path)}  # noqa: PTH110
        for model in found:
            said = f"{model.name}: {model.problem}"
            if model.problem and said not in self._said:
                self._said.add(said)
                _log.warning("the model %s is not served: %s", model.name, model.problem)
        return found

    def open(self, digest: str) -> int:
        """Open a file that has a listed digest."""
        with self._lock:
            path = self._paths.get(digest)
            known = None if path is None else self._known.get(path)
        if path is None or known is None:
            raise LookupError(f"No file with the digest {digest[:64]} is stored.")
        try:
            descriptor = _opened(path)
        except OSError as error:
            raise LookupError(f"{path.name} cannot be opened: {error.strerror}.") from None
        if identity_of(descriptor) != known.identity:
            os.close(descriptor)
            raise LookupError(f"{path.name} has changed since it was listed.")
        return descriptor

    def _model(self, candidate: Candidate) -> StoredModel:
        made: list[StoredFile] = []
        try:
            paths = files_of(candidate)
            expected = expected_digests(candidate, paths)
            for path in paths:
                real = self._inside(path)
                known = self._looked_at(real)
                if known.problem:
                    raise ValueError(f"{path.name}: {known.problem}")
                if expected.get(path.name, known.digest) != known.digest:
                    raise ValueError(f"{path.name} has another content than its digest says: it was changed")
                made.append(StoredFile(path.name, known.identity.size_bytes, known.digest))
                self._paths[known.digest] = real
        except OSError as error:
            name = Path(error.filename).name if error.filename else candidate.path.name
            return _described(candidate, problem=f"{name}: {error.strerror}")
        except ValueError as error:
            return _described(candidate, problem=str(error))
        except Exception as error:  # noqa: BLE001  # logged with its name; one model must not hide the others
            return _described(candidate, problem=f"it cannot be looked at: {type(error).__name__}: {error}")
        return _described(candidate, files=tuple(made))

    def _inside(self, path: Path) -> Path:
        # `Path.resolve` has raised a RuntimeError for a link that leads to itself before Python 3.13.
        real = Path(os.path.realpath(path, strict=True))
        if not real.is_relative_to(self._folder):
            raise ValueError(f"{path.name} is a link that leaves the folder of models")
        return real

    def _looked_at(self, path: Path) -> _Known:
        descriptor = _opened(path)
        try:
            identity = identity_of(descriptor)
            known = self._known.get(path)
            if known is None or known.identity != identity:
                known = self._known[path] = _look(descriptor, identity, monotonic_ns())
            elif not known.is_settled:
                known = self._known[path] = _look(descriptor, identity, known.seen_ns)
            return known
        finally:
            os.close(descriptor)


def _described(candidate: Candidate, files: tuple[StoredFile, ...] = (), problem: str = "") -> StoredModel:
    model = StoredModel(candidate.name, candidate.revision, files, problem, candidate.variant)
    try:
        msgspec.msgpack.encode(model)
    except UnicodeEncodeError:
        # Names of files are bytes, and need be no text.
        name, revision = (text.encode("utf-8", "backslashreplace").decode()
                          for text in (candidate.name, candidate.revision))
        return StoredModel(name, revision, problem="its name, or that of one of its files, is no text in UTF-8")
    return model


def _opened(path: Path) -> int:
    # Without waiting: a pipe in the folder must not stop the gateway.
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)


def _look(descriptor: int, identity: FileIdentity, seen_ns: int) -> _Known:
    if not is_settled(identity, time_ns(), monotonic_ns() - seen_ns):
        sleep(TICK_NS / 10**9)
    settles = is_settled(identity, time_ns(), monotonic_ns() - seen_ns)
    try:
        describe(descriptor)
    except ValueError as error:
        return _Known(identity, seen_ns, problem=str(error))
    digest = sha256_of(descriptor)
    if identity_of(descriptor) != identity:
        return _Known(identity, seen_ns, problem="it changed while it was read")
    return _Known(identity, seen_ns, digest, is_settled=settles)


class SafetensorsStores:
    """Opens the store ``safetensors``."""

    name = "safetensors"
    capabilities = ("keeping",)

    def open(self, options: ServeOptions) -> SafetensorsStore | None:
        """Open the folder of ``--models``, and begin to digest its files."""
        if not options.models:
            return None
        folder = Path(options.models)
        if not folder.is_dir():
            raise ConfigurationError(f"--models: {folder} is no folder.")
        if options.keep_model_bytes and not os.access(folder, os.W_OK):
            raise ConfigurationError(f"--keep-models-mib: the server may not write to {folder}.")
        store = SafetensorsStore(folder, options.keep_model_bytes)
        threading.Thread(target=_begin, args=(store,), name="djinn-models", daemon=True).start()
        return store

    def tensors(self, descriptor: int) -> Mapping[str, TensorExtent]:
        """Read and check the header of a file, or the directory of an archive."""
        return describe(descriptor)

    def sample(self, folder: Path) -> StoreSample:
        """Write a model that is one file, one of two files, and a file of ``torch.save``."""
        small = folder / "small.safetensors"
        first, second = (folder / "large" / f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
        content = {small: {"weight": bytes(range(16)), "bias": bytes(8)}, first: {"a": bytes(range(64))},
                   second: {"b": bytes(range(100, 132)), "none": b""}}
        for path, tensors in content.items():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(_file(tensors))
        archive = folder / "archive.pt"
        torch.save(torch.arange(40, dtype=torch.uint8), archive)
        index = {"weight_map": {name: path.name for path in (first, second) for name in content[path]}}
        (folder / "large" / "model.safetensors.index.json").write_text(json.dumps(index))
        return StoreSample(ServeOptions(models=str(folder)),
                           {"small": content[small], "large": content[first] | content[second],
                            archive.name: {"data/0": bytes(range(40))}},
                           {"small": (small,), "large": (first, second), archive.name: (archive,)})


def _file(tensors: Mapping[str, bytes]) -> bytes:
    entries, position = {}, 0
    for name, data in tensors.items():
        entries[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [position, position + len(data)]}
        position += len(data)
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + b"".join(tensors.values())


def _begin(store: SafetensorsStore) -> None:
    try:
        found = store.models()
    except OSError as error:
        _log.warning("the folder of models cannot be read: %s", error)
    else:
        _log.info("%d models are stored", sum(not model.problem for model in found))

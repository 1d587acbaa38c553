"""A model store that keeps every law, and others that do not."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from djinn.hookspecs import hookimpl
from djinn_plugins.common.operators.stored_models import KeepReply, StoredFile, StoredModel
from djinn_plugins.server.kinds.store import StoreSample, TensorExtent
from djinn_plugins.server.options import ServeOptions

BROKEN: dict[str, tuple[str, set[str]]] = {
    "lists-one": ("store.lists_models", {"store.digests_content", "store.damage_named"}),
    "digests-once": ("store.digests_content", {"store.opens_listed_only"}),
    "hides-damage": ("store.damage_named", set()),
    "opens-names": ("store.opens_listed_only", set()),
    "begins-early": ("store.tensors_exact", set()),
    "believes-the-header": ("store.damage_refused", {"store.damage_named"}),
    "keeps-the-last": ("store.keeps_parts", set()),
}
"""Name of each broken store, the law that it breaks, and others that it may break as a consequence."""
HEAD_BYTES = 8
SAMPLES = {"one": bytes(range(40)), "two": bytes(100)}


def _described(descriptor: int, flaw: str) -> Mapping[str, TensorExtent]:
    head = os.pread(descriptor, HEAD_BYTES, 0)
    length = int.from_bytes(head, "little")
    is_whole = len(head) == HEAD_BYTES and HEAD_BYTES + length == os.fstat(descriptor).st_size
    if not is_whole and flaw != "believes-the-header":
        raise ValueError("it is damaged")
    begin = HEAD_BYTES - (flaw == "begins-early" and length > 0)
    return {"data": TensorExtent("uint8", (length,), begin, begin + length)}


class _Store:
    def __init__(self, flaw: str, folder: Path) -> None:
        self._flaw = flaw
        self._folder = folder
        self._digests: dict[Path, str] = {}
        self._kept: dict[tuple[str, str], bytes] = {}
        """As much of the files of clients as has arrived; none is ever dropped."""

    def models(self) -> list[StoredModel]:
        paths = sorted(self._folder.glob("*.bin"))
        return list(map(self._model, paths[:1] if self._flaw == "lists-one" else paths))

    def _model(self, path: Path) -> StoredModel:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            _described(descriptor, self._flaw)
        except ValueError as error:
            return StoredModel(path.stem, problem="" if self._flaw == "hides-damage" else f"{path.name}: {error}")
        finally:
            os.close(descriptor)
        data = path.read_bytes()
        if self._flaw != "digests-once" or path not in self._digests:
            self._digests[path] = hashlib.sha256(data).hexdigest()
        return StoredModel(path.stem, files=(StoredFile(path.name, len(data), self._digests[path]),))

    def open(self, digest: str) -> int:
        for path in self._folder.glob("*.bin"):
            if hashlib.sha256(path.read_bytes()).hexdigest() == digest or (
                    self._flaw == "opens-names" and path.name == digest):
                return os.open(path, os.O_RDONLY)
        raise LookupError(f"No file {digest}.")

    def open_kept(self, tenant: str, digest: str) -> int:
        if (tenant, digest) not in self._kept:
            raise LookupError(f"No file {digest}.")
        read, write = os.pipe()
        with os.fdopen(write, "wb") as pipe:
            pipe.write(self._kept[tenant, digest])
        return read

    def receive(self, tenant: str, digest: str, writer: str, begin: int, size_bytes: int, data: bytes) -> KeepReply:
        if self._flaw == "keeps-the-last" and begin == 0:
            self._kept.clear()
        self._kept[tenant, digest] = self._kept.get((tenant, digest), b"")[:begin] + data
        return KeepReply(begin + len(data), is_stored=begin + len(data) == size_bytes)


class _Factory:
    capabilities = ("keeping",)

    def __init__(self, flaw: str) -> None:
        self.name = self._flaw = flaw

    def open(self, options: ServeOptions) -> _Store | None:
        return _Store(self._flaw, Path(options.models)) if options.models else None

    def tensors(self, descriptor: int) -> Mapping[str, TensorExtent]:
        return _described(descriptor, self._flaw)

    def sample(self, folder: Path) -> StoreSample:
        for name, data in SAMPLES.items():
            (folder / f"{name}.bin").write_bytes(len(data).to_bytes(HEAD_BYTES, "little") + data)
        return StoreSample(ServeOptions(models=str(folder)), {name: {"data": data} for name, data in SAMPLES.items()},
                           {name: (folder / f"{name}.bin",) for name in SAMPLES})


@hookimpl
def djinn_register_stores(register: Any) -> None:
    for name in ("healthy", *BROKEN):
        register(_Factory(name))

"""Model stores: which models a server has, and their files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import attrs

from djinn_plugins.common.files.tensor_extents import TensorExtent
from djinn_plugins.server.options import ServeOptions

if TYPE_CHECKING:
    from djinn_plugins.common.operators.stored_models import KeepReply, StoredModel

__all__ = ("ModelStore", "ModelStoreFactory", "SamplingModelStoreFactory", "StoreSample", "SupportsKeeping",
           "TensorExtent")


class ModelStore(Protocol):
    """The models of a server. It runs in the gateway, which may open files, and which reads no tensor.

    Concurrency:
        Any thread.

    Laws:
        store.lists_models, store.digests_content, store.damage_named, store.opens_listed_only
    """

    def models(self) -> list[StoredModel]:
        """List the current models. Those that cannot be used have the reason as their problem.

        Names are unique together with revisions and variants. Files that have not changed since the last call are not
        read.
        """

    def open(self, digest: str) -> int:
        """Open a file of a model for reading.

        Args:
            digest: The file's digest, as listed.

        Returns:
            A descriptor, which the caller closes. The file has that content.

        Raises:
            LookupError: There is no such file, or no longer; the text may be shown to clients.
        """


@runtime_checkable
class SupportsKeeping(Protocol):
    """Optional members of a `ModelStore` that keeps files of clients. A tenant finds its own, by their digests alone.

    Tenants that have files have equal parts of the limit. A tenant that is within its part takes room from the others,
    and loses no files to them.

    Concurrency:
        Any thread.

    Laws:
        store.keeps_parts
    """

    keep_bytes: int
    """Size of the largest file that is kept."""

    def open_kept(self, tenant: str, digest: str) -> int:
        """Open a kept file of a tenant; else as `ModelStore.open`."""

    def receive(self, tenant: str, digest: str, writer: str, begin: int, size_bytes: int, data: bytes) -> KeepReply:
        """Receive a piece of a file.

        Args:
            tenant: Whose file it is.
            digest: SHA-256 of the whole file, in hexadecimal. A file with another content is dropped.
            writer: Names the client that sends it. Of several clients, one sends the file, and the others wait.
            begin: Where the piece begins; it is ignored unless that is where the next one should begin.
            size_bytes: Size of the whole file.
            data: The piece; it may be empty, to ask where to begin.
        """


class ModelStoreFactory(Protocol):
    """Opens a model store, and describes files; what plugins register.

    Laws:
        store.tensors_exact, store.damage_refused
    """

    name: str
    """Name in the configuration."""

    def open(self, options: ServeOptions) -> ModelStore | None:
        """Open the store, in the gateway. It must be quick: files can be looked at in a thread.

        Returns:
            ``None`` if the options ask for none.

        Raises:
            ConfigurationError: It cannot be opened.
        """

    def tensors(self, descriptor: int) -> Mapping[str, TensorExtent]:
        """Describe the tensors of an open file, in a worker. No tensor is read.

        Raises:
            ValueError: The file is damaged, or no such file.
        """


@attrs.frozen
class StoreSample:
    """Models for tests of the laws.

    Attributes:
        options: Options that ask for the store.
        models: Content of each tensor, in memory order, by the name of the model and of the tensor.
        files: The files with the tensors, by the name of the model.
    """

    options: ServeOptions
    models: Mapping[str, Mapping[str, bytes]]
    files: Mapping[str, tuple[Path, ...]]


@runtime_checkable
class SamplingModelStoreFactory(Protocol):
    """A `ModelStoreFactory` whose laws can be tested."""

    def sample(self, folder: Path) -> StoreSample:
        """Write at least two models.

        Args:
            folder: An empty folder for them.
        """

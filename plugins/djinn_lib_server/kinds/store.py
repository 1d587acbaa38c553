"""Model stores: which models a server has, and their files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

import attrs
from djinn_lib_service.stored_models import StoredModel

from djinn_lib_server.options import ServeOptions

__all__ = ("ModelStore", "ModelStoreFactory", "SamplingModelStoreFactory", "StoreSample", "TensorExtent")


@attrs.frozen
class TensorExtent:
    """Where a tensor lies in a file.

    Attributes:
        dtype: Its dtype, by the name that it has in ``torch``.
        size: Its sizes; it is contiguous.
        begin: Where it begins, in bytes from the begin of the file.
        end: Where it ends.
    """

    dtype: str
    size: tuple[int, ...]
    begin: int
    end: int


class ModelStore(Protocol):
    """The models of a server. It runs in the gateway, which may open files, and which reads no tensor.

    Concurrency:
        Any thread.

    Laws:
        store.lists_models, store.digests_content, store.damage_named, store.opens_listed_only
    """

    def models(self) -> list[StoredModel]:
        """List the current models. Those that cannot be used have the reason as their problem.

        Names are unique together with revisions. Files that have not changed since the last call are not read.
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

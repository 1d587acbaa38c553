"""The values of one session, and how much memory they use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from djinn_plugins.common.memory.kept_memory import is_mapped
from djinn_plugins.common.memory.shared_values import is_shared
from djinn_plugins.common.memory.usage import MemoryUsage

__all__ = ("HandleTable", "ValueTable")


class ValueTable(ABC):
    """Values by handle, in `_values`; how their memory is counted is up to the derived class.

    Attributes:
        usage: Bytes of the values' storages, now and so far.
        shared_bytes: Bytes of values in memory that others may read, too: of kept uploads, and of stored models.

    Concurrency:
        One thread at a time; any thread may read `held_bytes` and `shared_bytes`.
    """

    shared_bytes = 0

    def __init__(self) -> None:
        self._values: dict[int, Any] = {}
        self.usage = MemoryUsage()

    @property
    def held_bytes(self) -> int:
        """Bytes of the values' storages, each storage counted once."""
        return self.usage.current

    @held_bytes.setter
    def held_bytes(self, held_bytes: int) -> None:
        self.usage.change(held_bytes)

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __getitem__(self, handle: int) -> Any:
        return self._values[handle]

    def get(self, handle: int) -> Any:
        """Return a value, or ``None`` if the handle has none."""
        return self._values.get(handle)

    @property
    def own_bytes(self) -> int:
        """`held_bytes` without shared memory."""
        return self.held_bytes - self.shared_bytes

    @abstractmethod
    def put(self, handle: int, value: Any) -> None:
        """Store a value under a handle, replacing the previous one."""

    @abstractmethod
    def drop(self, handles: Iterable[int]) -> None:
        """Drop values."""

    @abstractmethod
    def clear(self) -> None:
        """Drop all values."""

    @abstractmethod
    def sharing(self, tensor: torch.Tensor) -> Sequence[int]:
        """List the handles of the values that share a tensor's storage."""

    @abstractmethod
    def storage_bytes(self, handles: Iterable[int]) -> int:
        """Return the bytes of the storages that values lie in, each storage counted once."""

    @abstractmethod
    def added_bytes(self, values: Iterable[Any]) -> int:
        """Return by how much `held_bytes` would grow if these values were put, too."""

    def written(self, handle: int) -> None:  # noqa: B027  # a table may have other ways to know it
        """Record that a value is written, and no longer shares its memory."""


class HandleTable(ValueTable):
    """Values by handle, each storage counted; see `ValueTable`.

    The accounting is updated when a value is added or dropped. If a value grows in place, its old size still counts.

    Concurrency:
        One thread at a time; any thread may read `held_bytes`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storage_of: dict[int, int] = {}
        self._storages: dict[int, list[int]] = {}
        self._shared: dict[int, int] = {}

    def put(self, handle: int, value: Any) -> None:
        """Store a value under a handle, replacing the previous one."""
        before = self._storage_of.pop(handle, None)
        self._values[handle] = value
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            storage = value.untyped_storage()
            self._storage_of[handle] = key = storage._cdata
            known = self._storages.get(key)
            if known is None:
                size_bytes = storage.nbytes()
                self._storages[key] = [1, size_bytes]
                self.held_bytes += size_bytes
                if is_mapped(value) or is_shared(value):
                    self._shared[key] = size_bytes
                    self.shared_bytes += size_bytes
            else:
                known[0] += 1
        if before is not None:
            self._forget(before)

    def drop(self, handles: Iterable[int]) -> None:
        """Drop values."""
        for handle in handles:
            self._values.pop(handle, None)
            storage = self._storage_of.pop(handle, None)
            if storage is not None:
                self._forget(storage)

    def sharing(self, tensor: torch.Tensor) -> Sequence[int]:
        """List the handles of the values that share a tensor's storage."""
        storage = tensor.untyped_storage()._cdata
        return [handle for handle, value in self._values.items()
                if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata == storage]

    def written(self, handle: int) -> None:
        """Record that a value is written, and no longer shares its memory."""
        self.shared_bytes -= self._shared.pop(self._storage_of.get(handle, 0), 0)

    def storage_bytes(self, handles: Iterable[int]) -> int:
        """Return the bytes of the storages that values lie in, each storage counted once."""
        storages = {storage for handle in handles if (storage := self._storage_of.get(handle)) is not None}
        return sum(self._storages[storage][1] for storage in storages)

    def added_bytes(self, values: Iterable[Any]) -> int:
        """Return by how much `held_bytes` would grow if these values were put, too."""
        storages = [value.untyped_storage() for value in values
                    if isinstance(value, torch.Tensor) and value.layout is torch.strided]
        return sum({storage._cdata: storage.nbytes() for storage in storages
                    if storage._cdata not in self._storages}.values())

    def clear(self) -> None:
        """Drop all values."""
        self._values.clear()
        self._storage_of.clear()
        self._storages.clear()
        self._shared.clear()
        self.shared_bytes = 0
        self.held_bytes = 0

    def _forget(self, storage: int) -> None:
        known = self._storages[storage]
        known[0] -= 1
        if not known[0]:
            self.held_bytes -= known[1]
            self.shared_bytes -= self._shared.pop(storage, 0)
            del self._storages[storage]

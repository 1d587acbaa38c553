"""The values of one session, and how much memory they use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch


class HandleTable:
    """Values by handle.

    The accounting is updated when a value is added or dropped. If a value grows in place, its old size still counts.

    Attributes:
        held_bytes: Bytes of the values' storages, each storage counted once.

    Concurrency:
        One thread at a time; any thread may read `held_bytes`.
    """

    def __init__(self) -> None:
        self._values: dict[int, Any] = {}
        self._storage_of: dict[int, int] = {}
        self._storages: dict[int, list[int]] = {}
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, handle: int) -> Any:
        return self._values[handle]

    def get(self, handle: int) -> Any:
        """Return a value, or ``None`` if the handle has none."""
        return self._values.get(handle)

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
            else:
                known[0] += 1
        if before is not None:
            self._let_go(before)

    def drop(self, handles: Iterable[int]) -> None:
        """Drop values."""
        for handle in handles:
            self._values.pop(handle, None)
            storage = self._storage_of.pop(handle, None)
            if storage is not None:
                self._let_go(storage)

    def sharing(self, tensor: torch.Tensor) -> Iterator[int]:
        """List the handles of the values that share a tensor's storage."""
        storage = tensor.untyped_storage()._cdata
        return iter([handle for handle, value in self._values.items()
                     if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata == storage])

    def clear(self) -> None:
        """Drop all values."""
        self._values.clear()
        self._storage_of.clear()
        self._storages.clear()
        self.held_bytes = 0

    def _let_go(self, storage: int) -> None:
        known = self._storages[storage]
        known[0] -= 1
        if not known[0]:
            self.held_bytes -= known[1]
            del self._storages[storage]

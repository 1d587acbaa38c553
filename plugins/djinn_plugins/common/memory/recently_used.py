"""A bounded cache that drops the entry that was not used for the longest time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

__all__ = ("RecentlyUsed",)

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class RecentlyUsed(OrderedDict[_Key, _Value]):
    """The values that were used last, computed by the caller from more than their keys; see `functools.lru_cache`.

    Args:
        limit: How many values there are at most.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def use(self, key: _Key, make: Callable[[], _Value]) -> _Value:
        """Return the value of a key; make it if there is none, in place of the least recently used one."""
        if key not in self:
            self[key] = make()
            if len(self) > self._limit:
                self.popitem(last=False)
        self.move_to_end(key)
        return self[key]

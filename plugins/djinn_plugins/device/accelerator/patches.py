"""Attributes of modules and classes that are replaced for a while."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch.utils import _device

__all__ = ("Patches",)

_MISSING = object()


class Patches:
    """Replaces attributes, and restores them in reverse order when it is closed."""

    def __init__(self) -> None:
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of a module or class; one that is only inherited is deleted again."""
        before = vars(owner).get(name, _MISSING)
        if before is _MISSING:
            self._undo.callback(delattr, owner, name)
        else:
            self._undo.callback(setattr, owner, name, before)
        setattr(owner, name, value)

    def set_function(self, name: str, value: Any) -> None:
        """Replace a function of ``torch``; TorchScript takes the new one for the same function."""
        _device._device_constructors()  # a cache, which must contain the original functions
        original, table = getattr(torch, name), torch.jit._builtins._get_builtin_table()
        self.set(torch, name, value)
        if id(original) in table:
            self.add(table, id(value), table[id(original)])

    def add(self, table: dict[Any, Any], key: Any, value: Any) -> None:
        """Add an entry to a dictionary unless it has one of that key."""
        if key not in table:
            table[key] = value
            self._undo.callback(table.pop, key, None)

    def on_close(self, undo: Any, *args: Any) -> None:
        """Call ``undo(*args)`` on closing."""
        self._undo.callback(undo, *args)

    def set_variable(self, name: str, value: str) -> None:
        """Set an environment variable unless it is set."""
        if name not in os.environ:
            os.environ[name] = value
            self._undo.callback(os.environ.pop, name, None)

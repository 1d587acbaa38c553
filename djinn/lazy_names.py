"""Names that libraries provide and that are imported when a program first asks for them.

Few programs capture, plan or look at graphs, and every program imports djinn. Which library provides a name is written
in `djinn_plugins.sessions.names.table`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.machinery import ModuleSpec
from typing import Any

__all__ = ("find_spec", "load")


def load(name: str) -> Any:
    """Import the module of a name, and return the object of that name.

    Raises:
        AttributeError: No library provides that name.
    """
    return import_module("djinn_plugins.sessions.names.table").load(name)


def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
    """Find a module that earlier documents import from djinn. Python asks, as any finder, if it finds none itself."""
    return import_module("djinn_plugins.sessions.names.finder").find_spec(name) if name.startswith("djinn.") else None

"""Packages that are imported when they are first used: importing djinn imports PyTorch, which takes seconds."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

__all__ = ("postpone",)


def postpone(name: str) -> None:
    """Import a package only when an attribute of it is first used; its modules can be imported before.

    Args:
        name: A package. Nothing happens if it has been imported already.
    """
    spec = None if name in sys.modules else find_spec(name)
    if spec is not None:
        sys.modules[name] = _postponed(spec)


def _postponed(spec: ModuleSpec) -> ModuleType:
    module = module_from_spec(spec)

    def load(attribute: str) -> Any:
        if module.__dict__.pop("__getattr__", None) is not None and spec.loader is not None:
            spec.loader.exec_module(module)
            return getattr(module, attribute)
        raise AttributeError(f"module {spec.name!r} has no attribute {attribute!r}")

    module.__dict__["__getattr__"] = load
    return module

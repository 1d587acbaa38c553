"""Changes of the process that are taken back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

__all__ = ("attributes", "variables")

_ABSENT = object()


@contextlib.contextmanager
def variables(environ: MutableMapping[str, str], values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within the context."""
    before = {name: environ.get(name) for name in values}
    environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                environ.pop(name, None)
            else:
                environ[name] = value


@contextlib.contextmanager
def attributes(owner: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Replace attributes of a module, class or object within the context."""
    before = {name: vars(owner).get(name, _ABSENT) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)

"""Replaces functions of libraries that a program imports, wherever a library has taken them from its own modules."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, TypeAlias

import attrs

from djinn_plugins.common.imports import when_imported
from djinn_plugins.run.report import RunReport

__all__ = ("Change", "Replacement", "replaced")

Change: TypeAlias = Callable[[ModuleType], Callable[[], None]]
"""Changes a module that was just imported, and returns a function that takes the change back."""


@attrs.frozen
class Replacement:
    """A function of a library that a mode replaces.

    Attributes:
        module: The module that defines it.
        name: Its name there; ``Class.method`` for a method.
        make: Makes the new function from the old one.
    """

    module: str
    name: str
    make: Callable[[Any], Any]


@contextlib.contextmanager
def replaced(replacements: Sequence[Replacement], report: RunReport,
             also: Sequence[tuple[str, Change]] = ()) -> Iterator[None]:
    """Replace functions within the context, in modules that are imported now or later.

    What a library no longer has is left alone, and reported.

    Args:
        replacements: What to replace.
        report: Told of what cannot be replaced.
        also: Further changes, by the name of the module.
    """
    undo: list[Callable[[], None]] = []
    changes: dict[str, list[Change]] = {}
    for one in replacements:
        changes.setdefault(one.module, []).append(functools.partial(_replace, replacement=one))
    for name, change in also:
        changes.setdefault(name, []).append(change)

    def act(module: ModuleType) -> None:
        for change in changes[module.__name__]:
            try:
                take_back = change(module)
            except Exception as error:  # noqa: BLE001  # reported; the other changes do not need it
                report.problem(f"{module.__name__.partition('.')[0]} is of a release that djinn does not know ("
                               f"{module.__name__}: {type(error).__name__}: {error}); it may not choose the device by "
                               "itself.")
            else:
                undo.append(take_back)

    with when_imported(changes, act):
        try:
            yield
        finally:
            for take_back in reversed(undo):
                take_back()


def _replace(module: ModuleType, replacement: Replacement) -> Callable[[], None]:
    """Replace one function; return a function that takes it back."""
    owner: Any = module
    *path, name = replacement.name.split(".")
    for part in path:
        owner = getattr(owner, part)
    original = vars(owner)[name]
    new = replacement.make(original)
    if path:
        setattr(owner, name, new)
        return lambda: setattr(owner, name, original)
    _exchange(module, original, new)
    return lambda: _exchange(module, new, original)


def _exchange(module: ModuleType, old: Any, new: Any) -> None:
    """Exchange an object in all modules of a library: many take functions from each other by name."""
    top = module.__name__.partition(".")[0]
    for name, other in list(sys.modules.items()):
        if name.partition(".")[0] == top and isinstance(other, ModuleType):
            for attribute, value in list(vars(other).items()):
                if value is old:
                    setattr(other, attribute, new)

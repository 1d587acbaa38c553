"""Plugins that exist in this process only: for a notebook, a script or a test."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from djinn.errors import PluginValidationError
from djinn.hookspecs import hookimpl
from djinn.plugins.checks import hook_of, kinds_of
from djinn.plugins.manager import IN_PROCESS, InProcess

__all__ = ("register",)


def register(value: Any, kind: str = "") -> Callable[[], None]:
    """Make an object a plugin of this process, for all sessions that begin later.

    An object that is registered again under the same kind and name replaces the one before, as when a cell of a
    notebook runs again.

    Args:
        value: An object of some kind, such as a scheduler or a pattern; or a module or object with hooks.
        kind: The kind, if the object's methods do not tell.

    Returns:
        A function that takes it back.

    Raises:
        PluginValidationError: It is of no kind, or of several.

    Concurrency:
        Any thread, while no session begins.
    """
    plugin, name = value, f"in-process-{getattr(value, '__name__', type(value).__name__)}"
    if not any(attribute.startswith("djinn_") for attribute in dir(value)):
        found = [kind] if kind else kinds_of(value)
        if len(found) != 1:
            raise PluginValidationError(
                f"The object {value!r} is of {'no kind' if not found else ' and '.join(found)}.",
                hint='See docs/plugins for the members of each kind, or give the kind: register(object, "scheduler").')
        name = f"in-process-{found[0]}-{value.name}"

        def announce(register: Callable[[Any], None]) -> None:
            register(value)

        plugin = ModuleType(name)
        setattr(plugin, hook_of(found[0]), hookimpl(announce))
    made = IN_PROCESS[name] = InProcess(name, plugin)

    def take_back() -> None:
        if IN_PROCESS.get(name) is made:
            del IN_PROCESS[name]

    return take_back

"""Checks of a plugin before it is used."""

from __future__ import annotations

import difflib
import inspect
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from djinn import hookspecs
from djinn.errors import PluginValidationError
from djinn.settings.selection import KINDS

if TYPE_CHECKING:
    import pluggy

_PREFIX = "djinn_"
_KNOWN_HOOKS = frozenset(name for name in vars(hookspecs) if name.startswith(_PREFIX))


def remedy(plugin: str) -> str:
    """Suggest a remedy for a plugin that does not work."""
    return (f"Correct, update or uninstall it, or switch it off with DJINN_PLUGINS=-{plugin} or "
            f"djinn.init(plugins=['-{plugin}']).")


def check_hooks(manager: pluggy.PluginManager, plugin: Any, owner: str, name: str) -> None:
    """Check that every function named like a hook is a valid hook.

    Args:
        manager: Knows how hooks are marked.
        plugin: The imported module or object.
        owner: Description of the plugin, for the message.
        name: Name of the entry point.

    Raises:
        PluginValidationError: A hook is unknown, or a function with a hook's name is not marked as a hook.
    """
    for attribute in dir(plugin):
        marked = manager.parse_hookimpl_opts(plugin, attribute)
        if marked is not None:
            hook = marked.get("specname") or attribute
            if hook not in _KNOWN_HOOKS and not marked.get("optionalhook"):
                raise _unknown_hook(hook, owner, name)
        elif attribute.startswith(_PREFIX) and _is_own_function(plugin, attribute):
            if attribute not in _KNOWN_HOOKS:
                raise _unknown_hook(attribute, owner, name)
            raise PluginValidationError(f"{owner} has a function {attribute}, which is not marked as a hook.",
                                        hint=f"Put @djinn.hookspecs.hookimpl above it. {remedy(name)}")


def _is_own_function(plugin: Any, attribute: str) -> bool:
    value = inspect.getattr_static(plugin, attribute)
    home = plugin.__name__ if inspect.ismodule(plugin) else getattr(value, "__module__", None)
    return inspect.isfunction(value) and value.__module__ == home


def _unknown_hook(hook: str, owner: str, name: str) -> PluginValidationError:
    close = difflib.get_close_matches(hook, sorted(_KNOWN_HOOKS), 1)
    meant = f"Did you mean {close[0]}? " if close else f"Known are: {', '.join(sorted(_KNOWN_HOOKS))}. "
    return PluginValidationError(f"{owner} implements the unknown hook {hook}.", hint=meant + remedy(name))


def hook_of(kind: str) -> str:
    """Return the hook that registers objects of a kind."""
    return f"djinn_register_{kind if kind.endswith(('s', 'y')) else f'{kind}s'}"


def kinds_of(value: Any) -> list[str]:
    """Return the kinds whose members an object has. One whose members are among those of another does not count."""
    found = {kind: {member for member, _ in _members(_protocol(kind))} for kind in KINDS}
    fitting = {kind: members for kind, members in found.items() if all(hasattr(value, member) for member in members)}
    return [kind for kind, members in fitting.items() if not any(members < other for other in fitting.values())]


def check_object(kind: str, value: Any, owner: str, name: str) -> None:
    """Check that an object has all members of its kind's Protocol.

    Args:
        kind: The kind under which it was registered.
        value: The object.
        owner: Description of the plugin, for the message.
        name: Name of the plugin's entry point.

    Raises:
        PluginValidationError: Something is missing or cannot be called, or the object has no usable name.
    """
    protocol = _protocol(kind)
    if isinstance(value, type):
        raise PluginValidationError(f"{owner} registers the class {value.__qualname__} itself as {kind}.",
                                    hint=f"Register an object: register({value.__qualname__}()). {remedy(name)}")
    missing = [member for member, is_method in _members(protocol)
               if not hasattr(value, member) or (is_method and not callable(getattr(value, member)))]
    if missing:
        raise PluginValidationError(
            f"{owner} registers a {type(value).__qualname__} as {kind}, which lacks {', '.join(missing)}.",
            hint=f"See {protocol.__module__}.{protocol.__name__} for what belongs to it. {remedy(name)}")
    if not isinstance(value.name, str) or not value.name or any(character in value.name for character in ",= \t\n"):
        raise PluginValidationError(
            f"{owner} registers a {type(value).__qualname__} as {kind} with the name {value.name!r}.",
            hint=f"A name is text without blanks, commas and equals signs. {remedy(name)}")


def _protocol(kind: str) -> type:
    module, _, name = KINDS[kind].protocol.partition(":")
    found: type = getattr(import_module(module), name)
    return found


@cache
def _members(protocol: type) -> tuple[tuple[str, bool], ...]:
    """List the members of a Protocol, each with whether it is a method."""
    methods = [name for name, value in vars(protocol).items() if inspect.isfunction(value) and not name.startswith("_")]
    attributes = [name for name in inspect.get_annotations(protocol) if not name.startswith("_")]
    return tuple((name, False) for name in attributes) + tuple((name, True) for name in methods)

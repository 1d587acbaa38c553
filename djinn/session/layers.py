"""The order of a session's layers. A layer of a plugin that is not listed here says where it stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from djinn.errors import PluginError
from djinn.kinds.layer import Layer

__all__ = ("ORDER", "in_order")

ORDER: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "djinn_wrap_backend": (
        "djinn-known-values",    # what the client knows asks no other layer
        "djinn-prefetch",        # what an answer has brought before is no wait
        "djinn-notices",         # counts the waits that are left
        "djinn-later",           # numbers of values must be those of the program
        "djinn-backend-replay",  # opens the backend again, and repeats requests
    ),
    "djinn_wrap_connection": (
        "djinn-progress",        # what the other layers do counts as waiting
        "djinn-observer-core",   # sees whole runs
        "djinn-wire-delta",
        "djinn-later",
    ),
})
"""The plugins whose layers a hook returns, the outermost first."""


def in_order(hook: str, found: Mapping[str, Any]) -> list[Callable[[Any], Any]]:
    """Put layers in order, whatever the names of the others' plugins are.

    Args:
        hook: One of those in `ORDER`.
        found: What the plugins' implementations returned, by plugin: a `Layer`, unless the plugin is in `ORDER`.

    Returns:
        The layers, the outermost first.

    Raises:
        PluginError: A layer names no place, or one that there is not, or two layers have the same place.
    """
    known = ORDER[hook]
    order, places = list(known), {name: layer for name, layer in found.items() if name not in known}
    for name, layer in places.items():
        if not isinstance(layer, Layer) or bool(layer.before) == bool(layer.after):
            raise PluginError(f"The plugin {name!r} does not say where its layer stands.",
                              hint=f"Its hook returns Layer(wrap, before=NAME) or Layer(wrap, after=NAME); "
                                   f"NAME is a plugin, one of {', '.join(known)}.")
    while places:
        gaps: dict[int, str] = {}
        for name, layer in places.items():
            if (anchor := layer.before or layer.after) in order:
                gap = order.index(anchor) + bool(layer.after)
                if gap in gaps:
                    raise PluginError(f"The layers of the plugins {gaps[gap]!r} and {name!r} have the same place.",
                                      hint="One of them has to say before= or after= the other, or be switched off.")
                gaps[gap] = name
        if not gaps:
            name, layer = next(iter(places.items()))
            raise PluginError(f"The layer of the plugin {name!r} stands beside that of "
                              f"{layer.before or layer.after!r}, which there is not.",
                              hint=f"There are {', '.join(order)}.")
        for gap in sorted(gaps, reverse=True):
            order.insert(gap, gaps[gap])
            del places[gaps[gap]]
    return [found[name].wrap if isinstance(found[name], Layer) else found[name] for name in order if name in found]

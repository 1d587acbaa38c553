"""Lists the layers of a session: what stands between a program and its executors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import attrs

from djinn.hookspecs import GROUP

if TYPE_CHECKING:
    from djinn.session.session import Session

__all__ = ("LayerRow", "layers_of")


@attrs.frozen
class LayerRow:
    """One layer."""

    around: str
    """What it stands around: ``backend`` or ``connection``; the last row of each is that itself."""
    plugin: str
    """The plugin that brings it; ``djinn`` for the kernel's own, empty for one of this process."""
    type: str
    """Its class."""


def layers_of(session: Session) -> list[LayerRow]:
    """List the layers of a running session, as they are, from the program's side to the executor's."""
    plugins = {entry.value: entry.name for entry in entry_points(group=GROUP)} | {"djinn": "djinn"}
    return [LayerRow(around, _plugin_of(type(layer).__module__, plugins), type(layer).__name__)
            for around, outermost in (("backend", session.backend),
                                      ("connection", session.backend.executors[0].connection))
            for layer in _inwards(outermost)]


def _plugin_of(module: str, plugins: Mapping[str, str]) -> str:
    """Name the plugin whose package a module belongs to; a plugin may stand in the package of another one."""
    while module and module not in plugins:
        module = module.rpartition(".")[0]
    return plugins.get(module, "")


def _inwards(layer: Any) -> Iterator[Any]:
    while layer is not None:
        yield layer
        layer = getattr(layer, "plain", None)

"""Lists the layers of a session: what stands between a program and its executors."""

from __future__ import annotations

from collections.abc import Iterator
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
    plugins = {entry.value.partition(".")[0]: entry.name for entry in entry_points(group=GROUP)} | {"djinn": "djinn"}
    return [LayerRow(around, plugins.get(type(layer).__module__.partition(".")[0], ""), type(layer).__name__)
            for around, outermost in (("backend", session.backend),
                                      ("connection", session.backend.executors[0].connection))
            for layer in _inwards(outermost)]


def _inwards(layer: Any) -> Iterator[Any]:
    while layer is not None:
        yield layer
        layer = getattr(layer, "plain", None)

"""Answers from what the client knows: small integers made of uploads and constants, and earlier answers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl
from djinn.settings import Declarations
from djinn_plugins.client.known_values.settings import KnownValueSettings
from djinn_plugins.common.settings.placement import PlacementSettings

if TYPE_CHECKING:
    from djinn.kinds import BackendContext, OpenBackend

__all__ = ("djinn_add_settings", "djinn_wrap_backend")


@hookimpl
def djinn_add_settings(settings: Declarations) -> None:
    """Declare how large a value may be that the client computes itself."""
    settings.add(KnownValueSettings)


@hookimpl
def djinn_wrap_backend(context: BackendContext) -> Callable[[OpenBackend], OpenBackend] | None:
    """Wrap the backend unless the settings say otherwise."""
    limit_bytes = context.settings(KnownValueSettings).known_value_bytes
    if not limit_bytes:
        return None
    from djinn_plugins.client.known_values.backend import open_knowing

    takes_reals = context.settings(PlacementSettings).placement == "cost"
    return lambda opens: partial(open_knowing, opens, context, limit_bytes, takes_reals)

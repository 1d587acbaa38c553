"""Fetches together the tensors that a program asks for one by one, as when it saves a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl
from djinn.settings import Declarations
from djinn_plugins.client.prefetch.settings import PrefetchSettings

if TYPE_CHECKING:
    from djinn.kinds import BackendContext, OpenBackend

__all__ = ("djinn_add_settings", "djinn_wrap_backend")


@hookimpl
def djinn_add_settings(settings: Declarations) -> None:
    """Declare how much may be fetched in advance."""
    settings.add(PrefetchSettings)


@hookimpl
def djinn_wrap_backend(context: BackendContext) -> Callable[[OpenBackend], OpenBackend] | None:
    """Wrap the backend unless the settings say otherwise."""
    limit_bytes = context.settings(PrefetchSettings).prefetch_bytes
    if not limit_bytes:
        return None
    from djinn_plugins.client.prefetch.backend import open_prefetching

    return lambda opens: partial(open_prefetching, opens, context, limit_bytes)

"""Keeps results on the executor: the same segment on the same values is computed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl
from djinn.settings import Declarations
from djinn.settings.core import CacheSettings

if TYPE_CHECKING:
    from djinn.kinds import CacheFactory


@hookimpl
def djinn_add_settings(settings: Declarations) -> None:
    """Declare the size of the cache."""
    settings.add(CacheSettings)


@hookimpl
def djinn_register_caches(register: Callable[[CacheFactory], None]) -> None:
    """Register the plugin's one cache."""
    from djinn_plugins.client.result_cache.cache import ResultCacheFactory

    register(ResultCacheFactory())

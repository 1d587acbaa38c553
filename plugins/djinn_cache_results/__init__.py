"""Keeps results on the executor: the same segment on the same values is computed once."""

from __future__ import annotations

from collections.abc import Callable

from djinn.hookspecs import hookimpl
from djinn.kinds.cache import CacheFactory, CacheSettings
from djinn.settings import Declarations


@hookimpl
def djinn_add_settings(settings: Declarations) -> None:
    """Declare the size of the cache."""
    settings.add(CacheSettings)


@hookimpl
def djinn_register_caches(register: Callable[[CacheFactory], None]) -> None:
    """Register the plugin's one cache."""
    from djinn_cache_results.cache import ResultCacheFactory

    register(ResultCacheFactory())

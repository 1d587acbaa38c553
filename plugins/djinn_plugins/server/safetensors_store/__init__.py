"""The model store ``safetensors``: folders of safetensors files, mapped into memory and never unpickled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable

    from djinn_plugins.server.kinds.store import ModelStoreFactory

__all__ = ("djinn_register_stores",)


@hookimpl
def djinn_register_stores(register: Callable[[ModelStoreFactory], None]) -> None:
    """Register the store."""
    from djinn_plugins.server.safetensors_store.store import SafetensorsStores

    register(SafetensorsStores())

"""Layers: what plugins put around a session's backend, or around its connections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import attrs

__all__ = ("Layer", "SharedState")

_T = TypeVar("_T")


@attrs.frozen
class Layer:
    """A layer of a plugin that is not djinn's, and its place.

    Attributes:
        wrap: What a hook of djinn's own plugins returns; see `djinn.hookspecs.djinn_wrap_backend` and
            `djinn.hookspecs.djinn_wrap_connection`.
        before: Name of the plugin whose layer it is to stand around, directly.
        after: Name of the plugin whose layer is to stand around it, directly.
    """

    wrap: Callable[[Any], Any]
    before: str = ""
    after: str = ""


class SharedState:
    """What the layers of one session share: one object of each type, made when it is first asked for."""

    def __init__(self) -> None:
        self._made: dict[type, Any] = {}

    def __call__(self, kind: type[_T]) -> _T:
        """Return the session's object of a type."""
        if kind not in self._made:
            self._made.setdefault(kind, kind())
        return self._made[kind]  # type: ignore[no-any-return]

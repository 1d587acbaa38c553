"""Optional abilities of connections and listeners."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeGuard, TypeVar

__all__ = ("supports",)

Ability = TypeVar("Ability")
_known: dict[tuple[type, Callable[..., object]], bool] = {}


def supports(value: object, ability: Callable[..., Ability]) -> TypeGuard[Ability]:
    """As `isinstance` with a protocol, whose members are looked up only once for each class.

    Args:
        value: The object.
        ability: The protocol. As a type it would have to be concrete.
    """
    key = type(value), ability
    found = _known.get(key)
    if found is None:
        found = _known[key] = isinstance(value, ability)  # type: ignore[arg-type]
    return found

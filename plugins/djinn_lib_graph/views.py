"""Operations whose results are views."""

from __future__ import annotations

from functools import lru_cache

from djinn.ir.schema import facts_of, operator_named
from djinn.ir.tape import Signature

__all__ = ("is_view", "is_view_anywhere")


def is_view(signature: Signature) -> bool:
    """Whether all results of an operation are views of its operands."""
    return (bool(signature.aliases) and min(signature.aliases) >= 0 and not signature.writes
            and not signature.is_random)


@lru_cache(maxsize=4096)
def is_view_anywhere(operator: str) -> bool:
    """Whether the base alone makes the view, not places in a storage, which a copy of the base does not have."""
    return "storage_offset" not in facts_of(operator_named(operator)).argument_names

"""Operations whose results are views, and those that change the metadata of what they write."""

from __future__ import annotations

from functools import lru_cache

from djinn.ir.schema import facts_of
from djinn.ir.tape import Signature
from djinn_plugins.common.operators.operators import operator_named

__all__ = ("changes_metadata", "is_view", "is_view_anywhere", "takes_storage")


def is_view(signature: Signature) -> bool:
    """Whether all results of an operation are views of its operands."""
    return (bool(signature.aliases) and min(signature.aliases) >= 0 and not signature.writes
            and not signature.is_random)


@lru_cache(maxsize=4096)
def changes_metadata(operator: str) -> bool:
    """Whether an operator may change the size, strides or storage of a value that it writes."""
    return facts_of(operator_named(operator)).changes_metadata


@lru_cache(maxsize=4096)
def is_view_anywhere(operator: str) -> bool:
    """Whether the base alone makes the view, not places in a storage, which a copy of the base does not have."""
    return "storage_offset" not in facts_of(operator_named(operator)).argument_names


def takes_storage(operator: str) -> bool:
    """Whether an operator gives its first operand the storage of its second one."""
    return operator.startswith("aten::set_.source_Tensor")

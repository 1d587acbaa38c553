"""Names of operations, with and without their overloads."""

from __future__ import annotations

from functools import cache

__all__ = ("OperationName", "operation_name")


_is_equal = str.__eq__


class OperationName(str):
    """The name of an operation: ``aten::add.Tensor``, which also equals ``aten::add``, as earlier documents write it.

    As a key of a mapping or a member of a set, it is the name with its overload; ``base`` is the other one.
    """

    __slots__ = ()
    __hash__ = str.__hash__

    @property
    def base(self) -> str:
        """The name without the overload: ``aten::add``."""
        return self.partition(".")[0]

    @property
    def overload(self) -> str:
        """The overload: ``Tensor``; empty for the default one."""
        return self.partition(".")[2]

    def __eq__(self, other: object) -> bool:
        # Called for each look-up in a table of operations.
        return _is_equal(self, other) is True or (
            type(other) is str and len(self) > len(other) and self[len(other)] == "." and self.startswith(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __reduce__(self) -> tuple[object, ...]:
        return OperationName, (str(self),)


def operation_name(text: str) -> OperationName:
    """Return the name of an operation, the same object each time."""
    return _made(text)


_made = cache(OperationName)

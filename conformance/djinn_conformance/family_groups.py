"""The operators that keep a law, in groups small enough for one example each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest

from djinn_conformance.assertions import Tolerance
from djinn_conformance.families import Expected, OperatorSpec, expected_differences, families
from djinn_conformance.laws import is_cursory, is_thorough

__all__ = ("Group", "groups")

_LARGEST = 12
"""Most operators in a group; one example draws a call of each."""


@attrs.frozen
class Group:
    """Some operators of one family."""

    name: str
    operators: tuple[OperatorSpec, ...]

    @property
    def tolerance(self) -> Tolerance:
        """The tolerance for a program of these operators."""
        return {dtype: granted for spec in self.operators for dtype, granted in spec.tolerance.items()}

    def __str__(self) -> str:
        return self.name


def groups(law: str, choose: Callable[[OperatorSpec], Sequence[OperatorSpec]] = lambda spec: [spec]) -> list[Any]:
    """List the operators that keep a law, as parameters of its test.

    An operator that is expected to break the law has a group for itself, and is called many times so that the
    difference occurs. A cursory run uses one group per family, with operators at equal distances; laws start at
    different ones.

    Args:
        law: The law.
        choose: Returns the operators that an operator of a family stands for.
    """
    expected = {entry.operator: entry for entry in expected_differences() if entry.law == law}
    made: list[Any] = []
    for family in families():
        chosen = [other for spec in family.operators if law in spec.laws for other in choose(spec)]
        plain = [spec for spec in chosen if repr(spec) not in expected]
        if is_cursory():
            step = -(-len(plain) // _LARGEST) or 1
            plain, chosen = plain[len(law) % step::step], []
        for start in range(0, len(plain), _LARGEST):
            members = tuple(plain[start:start + _LARGEST])
            made.append(pytest.param(Group(f"{family.name}-{start // _LARGEST}", members)))
        made += [pytest.param(Group(repr(spec), (spec,) * _LARGEST), marks=_expected(expected[repr(spec)]))
                 for spec in chosen if repr(spec) in expected]
    return made


def _expected(entry: Expected) -> pytest.MarkDecorator:
    """Expect a failure; in a thorough run, the test fails if it does not occur."""
    return pytest.mark.xfail(strict=is_thorough(), reason=f"{entry.status}: {entry.reason} ({entry.link})")

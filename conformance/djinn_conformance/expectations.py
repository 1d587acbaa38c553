"""Expected differences from eager, with their reasons: read from ``specs/ops/expectations.toml``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

import attrs

from djinn_conformance import specs
from djinn_conformance.database import DTYPES, STATUSES, Difference, Direction, Unit

__all__ = ("Expectation", "expectations", "expected", "parse_expectations")

_UNCERTAIN = frozenset({"unstable", "uninitialised"})
"""Differences that may or may not occur."""
_OF_ELEMENTS = frozenset({"values", "rounding", "unstable"})


def _status(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    if value not in STATUSES:
        raise ValueError(f"{attribute.name} {value!r} is none of {', '.join(STATUSES)}")


def _dtypes(_: object, attribute: attrs.Attribute[tuple[str, ...]], value: tuple[str, ...]) -> None:
    if not set(value) <= set(DTYPES):
        raise ValueError(f"{attribute.name} {value} are not among {', '.join(DTYPES)}")


def _link(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    if not re.match(r"https://|[\w/.]+\.(cpp|h|py|yaml|md)\b", value):
        raise ValueError(f"{attribute.name} {value!r} is neither an address nor a file of PyTorch")


@attrs.frozen
class Expectation:
    """Samples of an operator whose outcome differs from eager's."""

    operator: str
    """Entry of the database."""
    direction: Direction
    status: str = attrs.field(validator=_status)
    """How the outcome differs, one of `djinn_conformance.database.STATUSES`."""
    reason: str = attrs.field(validator=attrs.validators.min_len(20))
    """The reason."""
    link: str = attrs.field(validator=_link)
    """Source of the reason: an address, or a file of PyTorch's sources and a name in it."""
    dtypes: tuple[str, ...] = attrs.field(default=DTYPES, validator=_dtypes)
    """The dtypes it applies to."""
    torch: str = ""
    """Releases of PyTorch, as a version specifier; empty for all."""
    device: str = "cpu"
    """Type of the executor's device."""

    def covers(self, unit: Unit, device: str) -> bool:
        """Whether it applies to a unit, on an executor's device, in the running release of PyTorch."""
        return (
            (self.operator, self.direction) == (unit.operator, unit.direction)
            and unit.dtype in self.dtypes
            and device.partition(":")[0] == self.device
            and specs.is_running(self.torch)
        )

    def explains(self, difference: Difference) -> bool:
        """Whether it predicts a difference."""
        if self.status == "uninitialised":
            return difference.status in _OF_ELEMENTS
        return difference.status == self.status or (
            self.status in ("unstable", "values") and difference.status == "rounding")

    @property
    def is_certain(self) -> bool:
        """Whether the difference occurs every time."""
        return self.status not in _UNCERTAIN


@attrs.frozen
class _File:
    expected: tuple[Expectation, ...] = ()


def parse_expectations(text: str, origin: str) -> tuple[Expectation, ...]:
    """Parse a file of expectations.

    Raises:
        specs.SpecError: The error names the origin and every fault.
    """
    return specs.parse(text, origin, _File).expected


@lru_cache(maxsize=1)
def expectations() -> tuple[Expectation, ...]:
    """Load all expectations."""
    path = specs.folder() / "ops" / "expectations.toml"
    return parse_expectations(path.read_text(encoding="utf-8"), "expectations.toml")


def expected(unit: Unit, device: str) -> Sequence[Expectation]:
    """List the expectations for a unit on an executor's device."""
    return [expectation for expectation in expectations() if expectation.covers(unit, device)]

"""Operators that eager runs and a guarded server refuses, with the reasons: read from ``specs/ops/refusals.toml``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

import attrs
import torch

from djinn_conformance import specs
from djinn_conformance.families import OperatorSpec
from djinn_conformance.subjects import Subject

__all__ = ("Refusal", "is_listed", "parse_refusals", "refusals", "runnable")


def _pattern(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"{attribute.name} {value!r} is no regular expression: {error}") from None


@attrs.frozen
class Refusal:
    """Some operators that a server does not run."""

    operators: str = attrs.field(validator=[specs.not_blank, _pattern])
    """A regular expression for whole names of overloads."""
    reason: str = attrs.field(validator=attrs.validators.min_len(20))
    """Why."""
    link: str = attrs.field(validator=attrs.validators.min_len(5))
    """Where that can be read."""
    tag: str = ""
    """A tag of PyTorch's that they also have; empty for any."""

    def covers(self, operator: torch._ops.OpOverload) -> bool:
        """Whether it speaks of an overload."""
        return re.fullmatch(self.operators, operator.name()) is not None and (
            not self.tag or any(tag.name == self.tag for tag in operator.tags))


@attrs.frozen
class _File:
    refused: tuple[Refusal, ...] = ()


def parse_refusals(text: str, origin: str) -> tuple[Refusal, ...]:
    """Parse a file of refusals.

    Raises:
        specs.SpecError: Names the origin and every fault.
    """
    return specs.parse(text, origin, _File).refused


@lru_cache(maxsize=1)
def refusals() -> tuple[Refusal, ...]:
    """Read ``specs/ops/refusals.toml``."""
    path = specs.folder() / "ops" / "refusals.toml"
    return parse_refusals(path.read_text(encoding="utf-8"), "ops/refusals.toml")


def is_listed(operator: torch._ops.OpOverload) -> bool:
    """Whether a server may refuse an overload."""
    return any(refusal.covers(operator) for refusal in refusals())


def runnable(subject: Subject, operators: Iterable[OperatorSpec]) -> tuple[OperatorSpec, ...]:
    """List the operators that a session has to run: on a server, all that are not listed as refused."""
    served = subject.registered.value.served
    return tuple(spec for spec in operators if not (served and is_listed(spec.operator)))

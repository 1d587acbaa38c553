"""Calls that eager accepts and a guarded server refuses, with the reasons: read from ``specs/ops/refusals.toml``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import attrs
import torch

from djinn.ir.schema import facts_of
from djinn_conformance import specs
from djinn_conformance.capabilities import listens
from djinn_conformance.families import OperatorSpec
from djinn_conformance.oracle import copied, perform
from djinn_conformance.programs import RecordedCall, Recording, refs_in
from djinn_conformance.subjects import Subject

__all__ = ("IsRefused", "RefusedOperators", "is_listed", "is_listed_call", "is_overlap_error", "is_refused_call",
           "leaves_out_overlaps", "overlaps_itself", "parse_refusals", "refusals", "refused_calls", "runnable")

IsRefused: TypeAlias = Callable[[RecordedCall, Mapping[int, Any]], bool]
"""Decides from a call and its values whether a session may refuse it."""
_OVERLAP = ("refers to a single memory location", "has a stride of 0")
"""PyTorch's messages on writing a tensor that overlaps itself, or would after resizing."""


def _pattern(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"{attribute.name} {value!r} is no regular expression: {error}") from None


@attrs.frozen
class RefusedOperators:
    """Operators that a server does not run."""

    operators: str = attrs.field(validator=[specs.not_blank, _pattern])
    """A regular expression for whole names of overloads."""
    reason: str = attrs.field(validator=attrs.validators.min_len(20))
    """The reason."""
    link: str = attrs.field(validator=attrs.validators.min_len(5))
    """Source of the reason."""
    tag: str = ""
    """A PyTorch tag that they must also have; empty for any."""
    writes: Literal["", "overlapping", "read"] = ""
    """``overlapping`` if only calls that write a tensor which may overlap itself are refused; ``read`` if only calls
    differ that write a tensor which is also another argument.
    """

    def covers(self, operator: torch._ops.OpOverload) -> bool:
        """Whether it applies to an overload, or to some of its calls."""
        return re.fullmatch(self.operators, operator.name()) is not None and (
            not self.tag or any(tag.name == self.tag for tag in operator.tags))


@attrs.frozen
class _File:
    refused: tuple[RefusedOperators, ...] = ()


def parse_refusals(text: str, origin: str) -> tuple[RefusedOperators, ...]:
    """Parse a file of refusals.

    Raises:
        specs.SpecError: The error names the origin and every fault.
    """
    return specs.parse(text, origin, _File).refused


@lru_cache(maxsize=1)
def refusals() -> tuple[RefusedOperators, ...]:
    """Read ``specs/ops/refusals.toml``."""
    path = specs.folder() / "ops" / "refusals.toml"
    return parse_refusals(path.read_text(encoding="utf-8"), "ops/refusals.toml")


def is_listed(operator: torch._ops.OpOverload) -> bool:
    """Whether a server may refuse any call of an overload."""
    return any(refusal.covers(operator) for refusal in refusals() if not refusal.writes)


def runnable(subject: Subject, operators: Iterable[OperatorSpec]) -> tuple[OperatorSpec, ...]:
    """List the operators that a session must run: on a server, all that are not listed as refused."""
    served = subject.registered.value.served
    return tuple(spec for spec in operators if not (served and is_listed(spec.operator)))


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may share a memory location, judged by strides; unclear cases count as such."""
    reach = 0
    for step, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent > 1 and tensor.numel():
            if step <= reach:
                return True
            reach += (extent - 1) * step
    return False


def is_listed_call(made: RecordedCall, values: Mapping[int, Any]) -> bool:
    """Whether a server may refuse a call, or execute it differently, because of a tensor that it writes."""
    ways = {refusal.writes for refusal in refusals() if refusal.covers(made.operator)}
    written = _written(made, values)
    used = [ref.index for ref in refs_in([made.args, made.kwargs])]
    return ("overlapping" in ways and any(overlaps_itself(value) or 0 in value.stride() for value in written)) or (
        "read" in ways and len(set(used)) < len(used))


def _written(made: RecordedCall, values: Mapping[int, Any]) -> list[torch.Tensor]:
    """List the tensors that a call may write; schemas do not mention that batch norms write their statistics."""
    facts = facts_of(made.operator)
    named = [*zip(facts.argument_names, made.args, strict=False), *made.kwargs.items()]
    found = [values[ref.index] for name, item in named if name in facts.written or name.startswith("running_")
             for ref in refs_in(item)]
    return [value for value in found if isinstance(value, torch.Tensor)]


def refused_calls(subject: Subject) -> IsRefused:
    """Return the function that decides which calls programs leave out: none for a session in this process."""
    return is_listed_call if subject.registered.value.served else lambda made, values: False


def leaves_out_overlaps(subject: Subject) -> bool:
    """Whether a session's random programs avoid writing tensors that overlap themselves, which a guard would refuse."""
    composition = subject.registered.value
    is_of_transport = composition.part is not None and composition.part.kind == "transport"
    is_guarded = composition.served or (is_of_transport and listens(composition.part))
    return is_guarded and any(refusal.writes for refusal in refusals())


def is_refused_call(subject: Subject, recording: Recording) -> bool:
    """Whether a session may refuse the last call of a recording; the calls before it prepare it."""
    if not subject.registered.value.served:
        return False
    device = torch.device("cpu")
    values: dict[int, Any] = {-1 - index: copied(tensor, device) for index, tensor in enumerate(recording.inputs)}
    for index, made in enumerate(recording.calls[:-1]):
        [values[index]] = perform(made, values, device)
    return is_listed_call(recording.calls[-1], values)


def is_overlap_error(error: Exception | None) -> bool:
    """Whether an error says that a tensor which overlaps itself would be written."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OVERLAP)

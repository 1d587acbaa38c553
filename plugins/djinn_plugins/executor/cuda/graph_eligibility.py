"""Decides which runs of a program repeat each other, so that recording and replaying them pays off.

This module accesses no device: it decides based on the inputs of the runs.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, TypeAlias

import attrs
import msgspec
import torch

from djinn.ir.program import Program
from djinn.ir.schema import ReturnKind, SchemaFacts, facts_of
from djinn.ir.spec import tensors_in
from djinn_plugins.common.calls.binding import BoundCall, written_names
from djinn_plugins.common.memory.tensor_bytes import address_of
from djinn_plugins.common.operators.operators import is_as_declared, operator_named

__all__ = ("MIN_SAVED", "CaptureCandidate", "Form", "GraphStage", "alignment_of", "can_be_recorded", "changes_metadata",
           "digest_of_numbers", "form_of", "forms_of", "storage_of", "suits", "watched")

MIN_SAVED = 8
"""Minimum number of launches that a recording must save."""
LAUNCHES_A_RESULT = 2
"""Launches that are needed to create a result from a recording's memory."""
RUNS_BEFORE_RECORDING = 3
"""Number of runs before a recording; the last of them determines what the program writes."""
WORTH_REPLAYS = 8
"""A recording that was played less often than this before its inputs changed was not worth its cost."""
MAX_STRIKES = 3
"""Number of such recordings after which no more are made."""

Form: TypeAlias = tuple[torch.dtype, torch.Size, tuple[int, ...], int]
"""The properties of a tensor that kernels depend on besides its values: dtype, size, stride and address alignment."""

_numbers = msgspec.msgpack.Encoder(enc_hook=repr)
_UNSUITED = tuple(
    tag for name in ("data_dependent_output", "dynamic_output_shape", "cudagraph_unsafe")
    if (tag := getattr(torch.Tag, name, None)) is not None
)
"""PyTorch's tags of operators that depend on values, or cannot be recorded for another reason."""


def can_be_recorded(program: Program, *, min_saved: int = MIN_SAVED) -> bool:
    """Whether a program is suitable for recording, as far as its steps show.

    Short programs, and those that keep most of their results, run as fast as a replay. A step that returns a plain
    value waits for the device. A step that changes metadata would change it during the recording, which must have no
    effect.
    """
    if len(program.steps) - LAUNCHES_A_RESULT * len(program.keep) < min_saved:
        return False
    return all(suits(operator_named(template.operator)) for template in program.templates)


def changes_metadata(program: Program) -> bool:
    """Whether a program may change sizes or strides of its inputs."""
    operators = [operator_named(template.operator) for template in program.templates]
    return any(facts_of(operator).changes_metadata or not is_as_declared(operator) for operator in operators)


def suits(operator: torch._ops.OpOverload) -> bool:
    """Whether a step with this operator may be part of a recording."""
    facts = facts_of(operator)
    waits = ReturnKind.PLAIN in facts.returns or any(tag in operator.tags for tag in _UNSUITED)
    return is_as_declared(operator) and not facts.changes_metadata and not waits


def alignment_of(device: torch.device) -> int:
    """Alignment in bytes of PyTorch's allocations on a device; kernels are chosen by an address's offset from it."""
    return 64 if device.type == "cpu" else 512


def form_of(value: Any, device: torch.device) -> Form | None:
    """Return the form of a value; ``None`` if it is no ordinary tensor on the device."""
    if type(value) is not torch.Tensor or value.device != device or value.layout is not torch.strided or (
        value.is_conj() or value.is_neg()
    ):
        return None
    return value.dtype, value.shape, value.stride(), address_of(value) % alignment_of(device)


def forms_of(inputs: Sequence[Any], device: torch.device) -> tuple[Form, ...] | None:
    """Return the forms of inputs; ``None`` if one is no ordinary tensor on the device."""
    forms = []
    for value in inputs:
        form = form_of(value, device)
        if form is None:
            return None
        forms.append(form)
    return tuple(forms)


def digest_of_numbers(numbers: Sequence[Any]) -> bytes:
    """Encode numbers so that only those with the same meaning for an operator are equal."""
    try:
        return _numbers.encode(numbers)
    except OverflowError:
        return repr(numbers).encode()


def storage_of(tensor: torch.Tensor) -> int:
    """Return an identifier of a tensor's storage that is valid during its lifetime."""
    name: int = tensor.untyped_storage()._cdata
    return name


def watched(program: Program, calls: Sequence[BoundCall], written: set[int]) -> list[BoundCall]:
    """Return calls that record which storages they write."""
    made = []
    for template, call in zip(program.templates, calls, strict=True):
        facts = facts_of(operator_named(template.operator))
        names = written_names(facts)
        made.append(attrs.evolve(call, function=_noting(call.function, facts, names, written)) if names else call)
    return made


def _noting(
    function: Callable[..., Any], facts: SchemaFacts, names: frozenset[str], written: set[int]
) -> Callable[..., Any]:
    positions = [index for index, name in enumerate(facts.argument_names) if name in names]

    def call(*arguments: Any, **keywords: Any) -> Any:
        targets = [arguments[index] for index in positions if index < len(arguments)]
        targets += [value for name, value in keywords.items() if name in names]
        written.update(map(storage_of, tensors_in(targets)))
        return function(*arguments, **keywords)

    return call


class GraphStage(enum.Enum):
    """How to execute a run."""

    RUN = enum.auto()
    """Run normally."""
    REHEARSE = enum.auto()
    """Run, and determine what it writes and what its results are views of."""
    RECORD = enum.auto()
    """Record the program, and play the recording."""


@attrs.define(eq=False)
class CaptureCandidate:
    """The runs of one program with one signature.

    Attributes:
        runs: Number of runs since the start, or since the last restart.
        changed: Inputs that were another tensor than in the previous run: their values are copied into the recording's
            own memory. Any other input is read and written in place.
        tied: Inputs that must be the same tensor in every run, because the program writes them or returns views of
            them; ``None`` before the rehearsal.
        strikes: Number of recordings that were not worth their cost.
    """

    runs: int = 0
    changed: set[int] = attrs.field(factory=set)
    tied: frozenset[int] | None = None
    strikes: int = 0
    _seen: list[weakref.ref[torch.Tensor]] = attrs.field(factory=list)

    @property
    def is_hopeless(self) -> bool:
        """Whether no more recordings should be made."""
        return self.strikes >= MAX_STRIKES

    def refuse(self) -> None:
        """Never record."""
        self.strikes = MAX_STRIKES
        self._seen.clear()

    def observe(self, inputs: Sequence[torch.Tensor], flowing: AbstractSet[int] = frozenset()) -> GraphStage:
        """Count a run, and decide how to execute it.

        Args:
            inputs: The inputs of the run.
            flowing: Inputs that will be the same tensors once what produces them is recorded.
        """
        if self.is_hopeless:
            return GraphStage.RUN
        changed = self._changed_since(inputs) - flowing
        self._seen = [weakref.ref(value) for value in inputs]
        self.changed |= changed
        if self.tied is not None and not self.tied.isdisjoint(changed):
            self._strike()
            return GraphStage.RUN
        self.runs += 1
        if self.runs < RUNS_BEFORE_RECORDING:
            return GraphStage.RUN
        return GraphStage.REHEARSE if self.tied is None else GraphStage.RECORD

    def rehearsed(self, tied: Iterable[int]) -> None:
        """Record which inputs are tied."""
        self.tied = frozenset(tied)
        if not self.tied.isdisjoint(self.changed):
            self._strike()

    def copies(self, inputs: Iterable[int]) -> bool:
        """Copy the values of more inputs; return whether that is possible."""
        self.changed.update(inputs)
        if self.tied is not None and not self.tied.isdisjoint(self.changed):
            self._strike()
            return False
        return True

    def outgrown(self, inputs: Sequence[torch.Tensor], replays: int) -> None:
        """Restart after a recording that no longer fits the inputs."""
        self.changed |= self._changed_since(inputs)
        if replays < WORTH_REPLAYS:
            self.strikes += 1
        self._restart()

    def _changed_since(self, inputs: Sequence[torch.Tensor]) -> set[int]:
        return {index for index, (seen, value) in enumerate(zip(self._seen, inputs, strict=False))
                if seen() is not value}

    def _strike(self) -> None:
        self.strikes += 1
        self._restart()

    def _restart(self) -> None:
        # A tied input may stay the same from here on: a cache, for example, changes with each text.
        self.changed -= self.tied or frozenset()
        self.tied = None
        self.runs = 0
        self._seen = []

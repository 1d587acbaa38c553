"""Which runs of a program repeat each other, so that it pays to record what they do and play it back.

Nothing here touches a device: these are the decisions, made from what the runs are given.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import attrs
import msgspec
import torch

from djinn.ir.program import Program
from djinn.ir.schema import ReturnKind, SchemaFacts, facts_of, operator_named
from djinn.ir.spec import tensors_in
from djinn_executor_torch.calls import Call, written_names

__all__ = ("MIN_SAVED", "Candidate", "Form", "Stage", "alignment_of", "can_be_recorded", "changes_metadata",
           "digest_of_numbers", "form_of", "forms_of", "storage_of", "watched")

MIN_SAVED = 8
"""Launches that a recording must save."""
LAUNCHES_A_RESULT = 2
"""What it takes to make a result out of a recording's memory."""
RUNS_BEFORE_RECORDING = 3
"""Runs that a recording follows; the last of them looks at what the program writes."""
WORTH_REPLAYS = 8
"""A recording that was played less often than this before its inputs changed was not worth it."""
MAX_STRIKES = 3
"""Recordings that were not worth it before no more are made."""

Form: TypeAlias = tuple[torch.dtype, torch.Size, tuple[int, ...], int]
"""What kernels see of a tensor beside its values: dtype, size, stride and alignment of its address."""

_numbers = msgspec.msgpack.Encoder(enc_hook=repr)
_UNSUITED = tuple(
    tag for name in ("data_dependent_output", "dynamic_output_shape", "cudagraph_unsafe")
    if (tag := getattr(torch.Tag, name, None)) is not None
)
"""What PyTorch says of operators that look at values, or that cannot be recorded for another reason."""


def can_be_recorded(program: Program, *, min_saved: int = MIN_SAVED) -> bool:
    """Whether nothing that is known of a program speaks against recording it.

    Short programs, and those that keep most of what they compute, are run as fast as played. A step that gives a plain
    value waits for the device. One that changes metadata would do so while being recorded, when nothing is to happen
    yet.
    """
    if len(program.steps) - LAUNCHES_A_RESULT * len(program.keep) < min_saved:
        return False
    operators = [operator_named(template.operator) for template in program.templates]
    return not any(_speaks_against(facts_of(operator), operator.tags) for operator in operators)


def changes_metadata(program: Program) -> bool:
    """Whether a program may change sizes or strides of tensors that it is given."""
    facts = [facts_of(operator_named(template.operator)) for template in program.templates]
    return any(fact.changes_metadata or not fact.name.startswith("aten::") for fact in facts)


def _speaks_against(facts: SchemaFacts, tags: Sequence[torch.Tag]) -> bool:
    # What others than PyTorch define may write without saying so.
    is_foreign = not facts.name.startswith("aten::")
    return is_foreign or facts.changes_metadata or ReturnKind.PLAIN in facts.returns or any(
        tag in tags for tag in _UNSUITED)


def alignment_of(device: torch.device) -> int:
    """Alignment in bytes of what PyTorch allocates on a device; kernels are chosen by what an address has of it."""
    return 64 if device.type == "cpu" else 512


def form_of(value: Any, device: torch.device) -> Form | None:
    """Describe a value; ``None`` if it is no ordinary tensor on the device."""
    if type(value) is not torch.Tensor or value.device != device or value.layout is not torch.strided or (
        value.is_conj() or value.is_neg()
    ):
        return None
    return value.dtype, value.shape, value.stride(), value.data_ptr() % alignment_of(device)


def forms_of(inputs: Sequence[Any], device: torch.device) -> tuple[Form, ...] | None:
    """Describe inputs; ``None`` if one is no ordinary tensor on the device."""
    forms = []
    for value in inputs:
        form = form_of(value, device)
        if form is None:
            return None
        forms.append(form)
    return tuple(forms)


def digest_of_numbers(numbers: Sequence[Any]) -> bytes:
    """Write numbers down so that only those compare equal that mean the same to an operator."""
    try:
        return _numbers.encode(numbers)
    except OverflowError:
        return repr(numbers).encode()


def storage_of(tensor: torch.Tensor) -> int:
    """Name a tensor's storage, for as long as it lives."""
    name: int = tensor.untyped_storage()._cdata
    return name


def watched(program: Program, calls: Sequence[Call], written: set[int]) -> list[Call]:
    """Make calls that note the storages that they write."""
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


class Stage(enum.Enum):
    """What to do with a run."""

    RUN = enum.auto()
    """Just run it."""
    REHEARSE = enum.auto()
    """Run it, and look at what it writes and what its results are views of."""
    RECORD = enum.auto()
    """Record the program, and play it."""


@attrs.define(eq=False)
class Candidate:
    """Runs of one program with one signature.

    Attributes:
        runs: How many were counted since the start, or since it began anew.
        changed: Inputs that were another tensor than in the run before: their values are copied into the recording's
            own memory. Any other input is read, and written, where it is.
        tied: Inputs that must be the same tensor in every run, because the program writes them or gives views of them;
            ``None`` until the rehearsal.
        strikes: How often recording turned out to be in vain.
    """

    runs: int = 0
    changed: set[int] = attrs.field(factory=set)
    tied: frozenset[int] | None = None
    strikes: int = 0
    _seen: list[weakref.ref[torch.Tensor]] = attrs.field(factory=list)

    @property
    def is_hopeless(self) -> bool:
        """Whether no recording is to be made any more."""
        return self.strikes >= MAX_STRIKES

    def refuse(self) -> None:
        """Never record."""
        self.strikes = MAX_STRIKES
        self._seen.clear()

    def observe(self, inputs: Sequence[torch.Tensor]) -> Stage:
        """Count a run and say what to do with it."""
        if self.is_hopeless:
            return Stage.RUN
        changed = self._changed_since(inputs)
        self._seen = [weakref.ref(value) for value in inputs]
        self.changed |= changed
        if self.tied is not None and not self.tied.isdisjoint(changed):
            self._strike()
            return Stage.RUN
        self.runs += 1
        if self.runs < RUNS_BEFORE_RECORDING:
            return Stage.RUN
        return Stage.REHEARSE if self.tied is None else Stage.RECORD

    def rehearsed(self, tied: Iterable[int]) -> None:
        """Learn which inputs are tied."""
        self.tied = frozenset(tied)
        if not self.tied.isdisjoint(self.changed):
            self._strike()

    def outgrown(self, inputs: Sequence[torch.Tensor], replays: int) -> None:
        """Begin anew after a recording that does not fit the inputs any more."""
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
        # What is tied may be the same from now on: a cache is another one for another text.
        self.changed -= self.tied or frozenset()
        self.tied = None
        self.runs = 0
        self._seen = []

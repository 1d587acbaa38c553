"""Makes calls by the way that a worker's calls go: guard, executor, kernel."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from support.operators.corpus import Corpus, Example, duplicate, mapped
from support.operators.memory import BEYOND_STORAGE, NOT_STRIDED, SHARES, GuardedMemory
from support.operators.mutations import Plan, carried_out, changed, extents_of
from support.operators.sequences import Calls, sequence_of
from support.operators.synthesis import base_of, example_of, slots

from djinn.errors import DjinnError
from djinn.ir.schema import ReturnKind, facts_of
from djinn.ir.spec import tensors_in
from djinn.wire.messages import Poisoned
from djinn_conformance.programs import RecordedCall, Recording, Ref, assemble
from djinn_plugins.common.failures import is_out_of_memory
from djinn_plugins.common.kinds.guard import Bounds, ProgramChecker
from djinn_plugins.common.operators.operators import operator_named
from djinn_plugins.device.shapes.shapes import MetaShapes
from djinn_plugins.executor.cpu.executor import CpuExecutor
from djinn_plugins.guard.guard import CoreGuard
from djinn_plugins.guard.layouts import proven_groups

BOUNDS = (Bounds(program_bytes=2**26), Bounds())
"""Servers with and without a limit for the memory of a run. The one without lets more through, and costs less."""
BOUNDED_SHARE = 6
"""One call of so many is made on a server with a limit."""
MOST_CPU_S = 3.0
"""What one call may take of a processor."""
RAN, REFUSED, RAISED, CRASHED, HUNG, TOO_LARGE = range(6)
OUTCOMES = ("ran", "refused", "raised", "crashed", "hung", "too large")


class Maker:
    """Makes calls by the way that a worker's calls go: guard, executor, kernel."""

    def __init__(self, memory: GuardedMemory, corpus: Corpus) -> None:
        self._memory = memory
        self._corpus = corpus
        self._executor = CpuExecutor()
        self._random = self._executor.random_state(0)
        self._guard = CoreGuard()
        self._guard.prepare()
        self._watches = self._watching()
        self._seen = 0

    def _watching(self) -> list[ProgramChecker]:
        return [self._guard.watch(bounds, MetaShapes()) for bounds in BOUNDS]

    def make(self, plan: Plan) -> tuple[int, Sequence[str]]:
        """Make a planned call; say what came of it, and what was changed."""
        self._memory.begin()
        self._memory.arm(1, plan.place, plan.filling)
        try:
            values = carried_out(plan, self._corpus)
        except Exception:  # a change that cannot be made, for example of a dtype
            return RAISED, ()
        kinds = changed(plan, values)
        outcome, _ = self._make(calls_of(plan, values, self._corpus), 3 if plan.guards_all else 1, plan.place,
                                plan.filling, plan.number)
        return outcome, kinds

    def try_out(self, name: str, example: Example) -> tuple[int, str]:
        """Make a call as it is, and write to copies only."""
        self._memory.begin()
        self._memory.arm(1, 0, 0)
        values = {slot.name: value for slot, value in zip(slots(name), example.args, strict=False)} | example.kwargs
        return self._make([(name, {key: mapped(item, duplicate) for key, item in values.items()})], 1, 0, 0, 0)

    def _make(self, calls: Calls, guarded: int, place: int, filling: int, seed: int) -> tuple[int, str]:
        self._seen += 1
        if self._seen % 500 == 0:
            # A session of many templates; a worker would have ended it by now.
            self._watches = self._watching()
        watch = self._watches[bool(seed % BOUNDED_SHARE)]
        recording = _recorded(calls)
        self._memory.arm(0, place, filling)
        failures: list[BaseException] = []
        asked: list[BaseException] = []
        try:
            piece = assemble(recording, 0, len(calls), range(recording.results))
            checked = watch.check(piece.program)
            program = self._executor.compile_checked(piece.program, {
                index: _noting(check, asked) for index, check in checked.calls.items()})
            given = [recording.inputs[-1 - index] for index in piece.inputs]
            refused = checked.refused(given, list(piece.numbers))
        except (DjinnError, TypeError, OverflowError, RuntimeError, ValueError) as error:
            return REFUSED, f"{type(error).__name__}: {error}"
        if refused:
            return TOO_LARGE, str(next(iter(refused.values())))

        def report(position: int, error: BaseException) -> Poisoned:
            failures.append(error)
            return Poisoned(0)

        self._random.seed(seed)
        self._memory.limit(MOST_CPU_S)
        self._memory.arm(guarded, place, filling)
        kept = program.run_without(given, list(piece.numbers), self._random, report, refused)
        self._memory.arm(0, place, filling)
        self._memory.limit(0.0)
        self._look_at(given, kept)
        if len(calls) == 1:
            self._look_for_sharing(recording.calls[0].operator, given, kept)
        if self._memory.broken():
            os._exit(86)
        if asked:
            return REFUSED, f"{type(asked[0]).__name__}: {asked[0]}"
        if not failures or "results, " in str(failures[0]):
            return RAN, ""
        if isinstance(failures[0], RuntimeError) and is_out_of_memory(failures[0]):
            return TOO_LARGE, str(failures[0])
        return RAISED, f"{type(failures[0]).__name__}: {failures[0]}"

    def _look_at(self, given: Sequence[Any], kept: Sequence[Any]) -> None:
        """End the process if a tensor is not strided, or reaches beyond its storage: whoever reads it next would."""
        for tensor in tensors_in([*given, *kept]):
            if tensor.layout is not torch.strided:
                self._memory.note(NOT_STRIDED, 0)
                os._exit(86)
            if not tensor.numel():
                continue
            last = sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True))
            beyond = (tensor.storage_offset() + last + 1) * tensor.element_size()
            storage = tensor.untyped_storage()
            if tensor.storage_offset() < 0 or beyond > storage.nbytes():
                self._memory.note(BEYOND_STORAGE, storage.data_ptr())
                os._exit(86)


    def _look_for_sharing(self, operator: torch._ops.OpOverload, given: Sequence[Any], kept: Sequence[Any]) -> None:
        """End the process if a result shares memory with an operand, and the schema does not say that it may."""
        facts = facts_of(operator)
        base = base_of(operator.name())
        # A composite may return its operand, what is called unsafe is a view that autograd does not know, and the
        # guard knows of others.
        if (facts.is_composite or any(facts.aliases) or base.lstrip("_").startswith("unsafe_")
                or base in proven_groups()["aliases"]):
            return
        held = {storage.data_ptr() for tensor in given if (storage := tensor.untyped_storage()).nbytes()}
        for tensor in tensors_in(kept):
            if tensor.untyped_storage().nbytes() and tensor.untyped_storage().data_ptr() in held:
                self._memory.note(SHARES, tensor.data_ptr())
                os._exit(86)


def calls_of(plan: Plan, values: dict[str, Any], corpus: Corpus) -> Calls:
    """List the calls of a plan: the changed one, and those behind it."""
    if plan.sequence is None:
        return [(plan.name, values)]
    results = _results(operator_named(plan.name), values)
    return sequence_of(plan.name, values, results, corpus, random.Random(plan.sequence), extents_of(values))


def _recorded(calls: Calls) -> Recording:
    """Write calls down as a recording; a tensor that several of them take is one input."""
    inputs: list[torch.Tensor] = []
    positions: dict[int, Ref] = {}

    def take(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            if id(item) not in positions:
                inputs.append(item)
                positions[id(item)] = Ref(-len(inputs))
            return positions[id(item)]
        return [take(member) for member in item] if isinstance(item, (list, tuple)) else item

    made = []
    for name, values in calls:
        operator, example = operator_named(name), example_of(name, values)
        made.append(RecordedCall(operator, tuple(map(take, example.args)),
                                 {key: take(item) for key, item in example.kwargs.items()}, _results(operator, values)))
    return Recording(tuple(inputs), tuple(made))


def _noting(check: Callable[..., Any], asked: list[BaseException]) -> Callable[..., Any]:
    """Tell the guard's refusals from the kernel's."""

    def ask(*args: Any, **kwargs: Any) -> Any:
        try:
            return check(*args, **kwargs)
        except BaseException as error:
            asked.append(error)
            raise

    return ask


def _results(operator: torch._ops.OpOverload, values: Mapping[str, Any]) -> int:
    """Say how many results a call is announced to have; where that depends on it, as many as it has lists' members."""
    kinds = facts_of(operator).returns
    fixed = sum(kind in (ReturnKind.TENSOR, ReturnKind.PLAIN) for kind in kinds)
    if ReturnKind.LIST not in kinds:
        return fixed
    return fixed + max((len(value) for value in values.values() if isinstance(value, list) and any(
        isinstance(item, torch.Tensor) for item in value)), default=1)

"""Runs recorded programs on an executor, and compares the results with the oracle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch

from djinn.wire.messages import Poisoned
from djinn_conformance.assertions import (
    Tolerance,
    expect,
    expect_equal,
    expect_same_metadata,
    expect_same_tensor,
    expect_same_value,
    violated,
)
from djinn_conformance.oracle import Outcome, Poison
from djinn_conformance.programs import Recording, RunnableProgram
from djinn_plugins.common.kinds.executor import CompiledProgram, Executor, RandomState

__all__ = ("RunResults", "compare", "execute", "known_values", "prepare")

FIRST_FAILURE = 1000
"""Failures reported during a run are numbered from here; smaller numbers are those of inputs poisoned before."""


@attrs.define
class RunResults:
    """The results of an executor.

    Attributes:
        values: By the recording's index, inputs included.
        reports: Position and exception of each reported step, in the order of reporting.
    """

    values: dict[int, Any]
    reports: list[tuple[int, BaseException]] = attrs.field(factory=list)


def prepare(executor: Executor, parts: Iterable[RunnableProgram]) -> list[tuple[RunnableProgram, CompiledProgram]]:
    """Compile the programs of a recording."""
    return [(part, executor.compile(part.program)) for part in parts]


def execute(
    executor: Executor,
    parts: Sequence[tuple[RunnableProgram, CompiledProgram]],
    inputs: Sequence[torch.Tensor],
    random: RandomState,
    poisoned: Mapping[int, int] | None = None,
) -> RunResults:
    """Run compiled programs one after the other, passing values on.

    Args:
        executor: The executor.
        parts: The programs.
        inputs: CPU tensors for the recording's inputs.
        random: The session's random numbers.
        poisoned: Inputs replaced by poison, by index, with their failure.
    """
    run = RunResults({-1 - index: executor.put(tensor) for index, tensor in enumerate(inputs)})
    run.values |= {index: Poisoned(failure) for index, failure in (poisoned or {}).items()}
    for part, compiled in parts:
        def report(step: int, error: BaseException, part: RunnableProgram = part) -> Poisoned:
            run.reports.append((part.first_step + step, error))
            return Poisoned(FIRST_FAILURE + part.first_step + step)

        before = [run.values[index] for index in part.inputs]
        given = list(before)
        outputs = compiled.run(given, list(part.numbers), random, report)
        expect_equal(len(outputs), len(part.outputs), "number of kept results", str(part.program))
        run.values.update(zip(part.outputs, outputs, strict=True))
        for value, left in zip(before, given, strict=True):
            if isinstance(left, Poisoned) and isinstance(value, torch.Tensor):
                _poison_sharing(run.values, value, left)
    return run


def _poison_sharing(values: dict[int, Any], unwritten: torch.Tensor, poison: Poisoned) -> None:
    """Poison values that share storage with a skipped write, as the owner of the values does."""
    storage = unwritten.untyped_storage()._cdata
    for index, value in values.items():
        if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata == storage:
            values[index] = poison


def known_values(parts: Iterable[RunnableProgram], recording: Recording) -> list[int]:
    """List the values observable after a run: all inputs, and the kept results."""
    inputs = [-1 - index for index in range(len(recording.inputs))]
    return inputs + [index for part in parts for index in part.outputs]


def compare(
    executor: Executor,
    run: RunResults,
    wanted: Outcome,
    indices: Iterable[int],
    where: str,
    tolerance: Tolerance | None = None,
) -> None:
    """Compare an executor's results with the oracle's.

    Args:
        executor: Fetches values.
        run: Its results.
        wanted: The oracle's results.
        indices: The values to compare.
        where: Names the plugin and the program, for messages.
        tolerance: See `djinn_conformance.capabilities.tolerance_of`.
    """
    __tracebackhide__ = True
    for index in indices:
        name = f"result r{index}" if index >= 0 else f"input i{-1 - index} after the run"
        got, should = run.values[index], wanted.values[index]
        if isinstance(should, Poison):
            allowed = {failure if failure >= 0 else FIRST_FAILURE - 1 - failure for failure in should.failures}
            expect(isinstance(got, Poisoned) and got.failure in allowed, name, got=got,
                   wanted=f"poison of failure {sorted(allowed)}", where=where)
        elif isinstance(got, Poisoned):
            violated(name, got=f"poison of failure {got.failure}", wanted="a value", where=where)
        elif isinstance(should, torch.Tensor):
            expect(isinstance(got, torch.Tensor), f"type of {name}", got=got, wanted="a tensor", where=where)
            expect_same_metadata(got, should, name, where)
            expect_same_tensor(executor.get(got), should.cpu().resolve_conj().resolve_neg(), name, where, tolerance)
        else:
            expect_same_value(got, should, name, where)

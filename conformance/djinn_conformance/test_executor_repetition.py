"""The law of executors that treat a program in another way once it has run often, as one that records it does."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from djinn.wire.messages import Poisoned
from djinn_conformance.assertions import expect_equal, expect_same_metadata, expect_same_tensor
from djinn_conformance.capabilities import tolerance_of
from djinn_conformance.laws import law
from djinn_conformance.operations import PLAIN, grouped
from djinn_conformance.oracle import run_eager
from djinn_conformance.programs import Recording, Ref, call, pieces, written_refs
from djinn_conformance.specs import law_named
from djinn_conformance.strategies import filled, recordings
from djinn_conformance.subjects import Subject, torch_device
from djinn_plugins.common.kinds.executor import Executor

_RUNS = 9
"""Executors that record programs have recorded after fewer."""
_MANY_RUNS = 40
"""After fewer, executors have translated programs that run often."""
_GROWS = Recording(tuple(filled((rows, 4), torch.float32, rows) for rows in (4, 4, 2)), (
    call("aten::mm", Ref(-1), Ref(-2)), call("aten::relu", Ref(0)), call("aten::cat", [Ref(-3), Ref(1)], 0),
    call("aten::sum.dim_IntList", Ref(2), [0], True), call("aten::add.Tensor", Ref(0), Ref(3)),
    call("aten::equal", Ref(4), Ref(0)), call("aten::neg", Ref(4)), call("aten::t", Ref(6))))
"""A cache that grows, something that reads it, and a value that is read."""
_FORMS = Recording(tuple(filled((4, 4), torch.float32, seed) for seed in (1, 2)), (
    call("aten::mm", Ref(-1), Ref(-2)), call("aten::add.Tensor", Ref(0), 1), call("aten::mul.Tensor", Ref(1), 0.5),
    call("aten::split.Tensor", Ref(2), 2, dim=1, results=2), call("aten::cat", [Ref(4), Ref(3)], 1),
    call("aten::sum.dim_IntList", Ref(5), [0], True, dtype=torch.float64), call("aten::select.int", Ref(5), 0, 2),
    call("aten::select.int", Ref(5), 1, 3), call("aten::add.Tensor", Ref(7), Ref(8), alpha=2)))
"""Arguments of all forms: numbers, also where an operator wants a tensor, lists, keywords and dtypes."""


def _raise(step: int, error: BaseException) -> Poisoned:
    raise error


@law("executor.repetition_invisible", effort=0.3)
@given(recording=recordings(grouped() + PLAIN), replaced=st.sets(st.integers(0, 3)), fed=st.just(None),
       runs=st.just(_RUNS))
@example(recording=_GROWS, replaced={0}, fed=(2, 2), runs=_RUNS)
@example(recording=_GROWS, replaced=set(), fed=None, runs=_RUNS)
@example(recording=_FORMS, replaced={1}, fed=None, runs=_MANY_RUNS)
def test_repetition_invisible(
    subject: Subject, executor: Executor, recording: Recording, replaced: set[int], fed: tuple[int, int] | None,
    runs: int,
) -> None:
    """Run a program again and again, with some other inputs each time, and compare all its results after each run."""
    part, = pieces(recording, [], range(recording.results))
    program, random, device = executor.compile(part.program), executor.random_state(0), torch_device(subject)
    tolerance = tolerance_of(law_named("executor.equals_eager"), subject)
    theirs = list(recording.inputs)
    mine: dict[int, Any] = {-1 - index: executor.put(tensor) for index, tensor in enumerate(theirs)}
    if any(written_refs(made) for made in recording.calls):
        replaced = set(range(len(theirs)))
    found: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for number in range(runs):
        for index in replaced.intersection(range(len(theirs))):
            theirs[index] = recording.inputs[index].roll(number % 2)
            mine[-1 - index] = executor.put(theirs[index])
        wanted = run_eager(Recording(tuple(theirs), recording.calls), device).values
        got = program.run([mine[index] for index in part.inputs], list(part.numbers), random, _raise)
        found.append((dict(zip(part.outputs, got, strict=True)), wanted))
        if fed is not None:
            theirs[fed[0]], mine[-1 - fed[0]] = wanted[fed[1]].cpu(), found[-1][0][fed[1]]
        for run, (results, values) in enumerate(found):
            where = f"{subject}: results of run {run} after run {number} of {recording}"
            for index, value in results.items():
                if isinstance(values[index], torch.Tensor):
                    expect_same_metadata(value, values[index], f"r{index}", where)
                    expect_same_tensor(executor.get(value), values[index].cpu(), f"r{index}", where, tolerance)
                else:
                    expect_equal(repr(value), repr(values[index]), f"r{index}", where)

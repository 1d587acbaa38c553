"""Laws of shape inference."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from djinn.kinds import Inference, OutputSpec, ShapeInference
from djinn_conformance.assertions import expect, expect_equal, expect_same_spec, violated
from djinn_conformance.inference import InferredCall, asked_calls
from djinn_conformance.laws import law
from djinn_conformance.operations import IN_PLACE, PLAIN, RANDOM, grouped
from djinn_conformance.programs import RecordedCall, Recording
from djinn_conformance.samples import (
    CHANGING_ARGUMENTS,
    DATA_DEPENDENT,
    DISAGREEING,
    MODELS,
    PLAIN_RESULTS,
    SIZED_BY_FLOATS,
    WRONG,
    on_examples,
)
from djinn_conformance.strategies import recordings
from djinn_conformance.subjects import Subject

_ANY = recordings(grouped() + RANDOM + PLAIN)


def _expect_same(got: OutputSpec | None, wanted: OutputSpec | None, what: str, where: str) -> None:
    """Compare specs, either of which may be absent."""
    if got is None or wanted is None:
        expect_equal(got, wanted, what, where)
        return
    expect_same_spec(got, wanted, what, where)


def _where(subject: Subject, asked: InferredCall, recording: Recording) -> str:
    return f"{subject}: {asked.call} in {recording}"


def _answer(asked: InferredCall, where: str) -> Inference | None:
    if isinstance(asked.answer, Exception):
        violated("answer", got=f"{type(asked.answer).__name__}: {asked.answer}", wanted="an Inference or None",
                 where=where)
    return asked.answer


def _expect_members(got: Any, wanted: Any, what: str, where: str) -> None:
    expect_equal(isinstance(got, tuple), isinstance(wanted, tuple), f"being a list of {what}", where)
    mine, theirs = (got, wanted) if isinstance(wanted, tuple) else ((got,), (wanted,))
    expect_equal(len(mine), len(theirs), f"length of {what}", where)
    for member, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        _expect_same(one, other, f"{what}[{member}]" if isinstance(wanted, tuple) else what, where)


@law("shapes.equals_eager")
@given(recording=_ANY)
@on_examples(*MODELS, *DISAGREEING, *CHANGING_ARGUMENTS)
def test_equals_eager(subject: Subject, plugin: ShapeInference, recording: Recording) -> None:
    """Query calls of random programs and of models, and compare the result with eager."""
    for asked in asked_calls(plugin, recording):
        where = _where(subject, asked, recording)
        answer = _answer(asked, where)
        if answer is None or asked.wanted is None:
            continue
        expect_equal(len(answer.results), len(asked.wanted.results), "number of results", where)
        for index, (got, wanted) in enumerate(zip(answer.results, asked.wanted.results, strict=True)):
            _expect_members(got, wanted, f"result {index}", where)


@law("shapes.arguments_reported")
@given(recording=recordings(grouped() + RANDOM, favoured=IN_PLACE))
@on_examples(*CHANGING_ARGUMENTS)
def test_arguments_reported(subject: Subject, plugin: ShapeInference, recording: Recording) -> None:
    """Query calls that write arguments, and compare the arguments' metadata with eager's afterwards."""
    for asked in asked_calls(plugin, recording):
        where = _where(subject, asked, recording)
        answer = _answer(asked, where)
        if answer is None or asked.wanted is None:
            continue
        expect_equal(len(answer.arguments), len(asked.wanted.arguments), "number of arguments", where)
        for index, (got, wanted) in enumerate(zip(answer.arguments, asked.wanted.arguments, strict=True)):
            _expect_same(got, wanted, f"argument {index} afterwards", where)


@law("shapes.no_guess")
def test_no_guess(subject: Subject, plugin: ShapeInference) -> None:
    """Query calls that cannot be inferred without data."""
    for pair in DATA_DEPENDENT:
        first, second = (next(asked_calls(plugin, recording)) for recording in pair)
        assert first.wanted != second.wanted, f"{first.call} does not depend on data; the sample is wrong"
        expect(first.answer is None, f"answer for {first.call}", got=first.answer,
               wanted=f"None, as sizes depend on the data: {first.wanted} or {second.wanted}", where=str(subject))
    for recording in PLAIN_RESULTS:
        [asked] = asked_calls(plugin, recording)
        expect(asked.answer is None, f"answer for {asked.call}", got=asked.answer,
               wanted="None, as the result is a Python value", where=str(subject))


@law("shapes.wrong_calls_unanswered")
@given(recording=st.sampled_from(WRONG))
@on_examples(*WRONG)
def test_wrong_calls_unanswered(subject: Subject, plugin: ShapeInference, recording: Recording) -> None:
    """Query calls that eager refuses."""
    [asked] = asked_calls(plugin, recording)
    assert asked.refused is not None, f"eager carries {recording} out; the sample is wrong"
    expect(asked.answer is None, f"answer for {asked.call}", got=asked.answer,
           wanted=f"None, as eager raises {type(asked.refused).__name__}: {str(asked.refused)[:80]!r}",
           where=f"{subject}: {recording}")


def _answers(plugin: ShapeInference, recordings: Sequence[Recording]) -> list[list[tuple[RecordedCall, Any]]]:
    """Query every call of every recording; exceptions are compared by type."""
    return [[(asked.call, type(asked.answer) if isinstance(asked.answer, Exception) else asked.answer)
             for asked in asked_calls(plugin, recording)] for recording in recordings]


@law("shapes.deterministic", effort=0.2)
@given(recordings=st.lists(_ANY, min_size=1, max_size=3), seed=st.integers(0, 99))
def test_deterministic(
    subject: Subject, plugin: ShapeInference, recordings: list[Recording], seed: int
) -> None:
    """Query again, in another order."""
    programs = [*recordings, *random.Random(seed).sample(MODELS + CHANGING_ARGUMENTS + WRONG, 3)]
    order = random.Random(seed).sample(range(len(programs)), len(programs))
    first = _answers(plugin, programs)
    second = _answers(plugin, [programs[index] for index in order])
    for index, again in zip(order, second, strict=True):
        for (call, got), (_, wanted) in zip(again, first[index], strict=True):
            expect_equal(got, wanted, "second answer", f"{subject}: {call} in {programs[index]}")


@law("shapes.numbers_declared")
def test_numbers_declared(subject: Subject, plugin: ShapeInference) -> None:
    """Query operators whose results are sized by a real number."""
    for pair in SIZED_BY_FLOATS:
        first, second = (next(asked_calls(plugin, recording)) for recording in pair)
        assert first.wanted != second.wanted, f"{first.call} does not depend on the number; the sample is wrong"
        expect_equal(plugin.depends_on_numbers(first.call.operator), True,
                     f"depends_on_numbers({first.call.operator.name()})",
                     f"{subject}: {first.call} and {second.call} have results of different metadata")


def _process_state() -> dict[str, Any]:
    return {
        "random generator": torch.get_rng_state().tolist(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "gradient mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
    }


class _Watched:
    """Shape inference that is watched while it runs."""

    def __init__(self, plugin: ShapeInference) -> None:
        self.name = plugin.name
        self.depends_on_numbers = plugin.depends_on_numbers
        self._plugin = plugin
        self.changes: list[str] = []

    def infer(
        self, operator: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Inference | None:
        before = _process_state()
        try:
            return self._plugin.infer(operator, args, kwargs)
        finally:
            self.changes += [f"{name} by {operator.name()}" for name, value in _process_state().items()
                             if value != before[name]]


@law("shapes.process_untouched", effort=0.5)
@given(recording=recordings(grouped() + RANDOM, favoured=RANDOM), grad=st.booleans(), inference=st.booleans())
def test_process_untouched(
    subject: Subject, plugin: ShapeInference, recording: Recording, grad: bool, inference: bool
) -> None:
    """Query in every mode, including operators that draw random numbers."""
    watched = _Watched(plugin)
    with torch.set_grad_enabled(grad), torch.inference_mode(inference):
        _answers(watched, [recording])
    expect_equal(watched.changes, [], "changes of the process's state", f"{subject}: {recording}")


@law("shapes.threads", effort=0.1)
@given(recordings=st.lists(_ANY, min_size=4, max_size=4))
def test_threads(subject: Subject, plugin: ShapeInference, recordings: list[Recording]) -> None:
    """Query on four threads at once."""
    wanted = _answers(plugin, recordings)
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda recording: _answers(plugin, [recording] * 3), recordings))
    for recording, mine, theirs in zip(recordings, got, wanted, strict=True):
        for answers in mine:
            expect_equal(answers, theirs, "answers on a thread", f"{subject}: {recording}")

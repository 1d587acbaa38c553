"""Forecasts: what travels is short where things go on evenly, and what arrives is what was meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from djinn.errors import ProtocolError
from djinn.wire import messages
from djinn.wire.messages import Batch, Run, RunDelta, to_wire
from djinn_plugins.common.wire.delta import PredictedRuns, RunPredictor
from djinn_plugins.common.wire.run_history import MAX_INDEXED, MAX_UNINDEXED, RunHistory

ODD_ONES = [0.0, -0.0, 1.0, 1, -1, True, 2.5, float("nan"), float("inf")]
numbers = st.integers(-(2**62), 2**62) | st.sampled_from(ODD_ONES)
lifted = st.recursive(numbers | st.complex_numbers(), lambda inner: st.lists(inner, max_size=3), max_leaves=4)
handles = st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 9), max_size=4).map(tuple)
runs = st.builds(Run, st.integers(1, 2), handles, st.lists(lifted, max_size=4).map(to_wire), handles, handles)


def over_the_wire(sent: Run | RunDelta) -> Run | RunDelta:
    batch = messages.decode(messages.encode(Batch([sent])))
    assert isinstance(batch, Batch)
    command = batch.commands[0]
    assert isinstance(command, (Run, RunDelta))
    return command


def conversation(meant: list[Run]) -> list[Run | RunDelta]:
    """Send runs from one side to the other, check that they arrive as meant, and return what travelled."""
    here, there = RunPredictor(), RunPredictor()
    travelled = []
    for run in meant:
        sent = here.shorten(run)
        # Written out, because zeros of either sign are equal, and no NaN is.
        assert repr(there.complete(over_the_wire(sent))) == repr(run)
        travelled.append(sent)
    return travelled


@settings(deadline=None, max_examples=300)
@given(st.lists(runs, max_size=8))
def test_what_arrives_is_what_was_meant(meant: list[Run]) -> None:
    conversation(meant)


@settings(deadline=None, max_examples=300)
@given(begin=runs, step=runs, rounds=st.integers(3, 8), odd=st.lists(runs, max_size=2), data=st.data())
def test_what_goes_on_evenly_arrives_too(
    begin: Run, step: Run, rounds: int, odd: list[Run], data: st.DataObject
) -> None:
    meant = [advanced(begin, step, count) for count in range(rounds)]
    for run in odd:
        meant.insert(data.draw(st.integers(0, len(meant))), run)
    conversation(meant)


def advanced(run: Run, step: Run, count: int) -> Run:
    def on(old: Any, by: Any) -> Any:
        return (old + count * by) % 2**62 if type(old) is int and type(by) is int else old

    def all_on(old: tuple[int, ...], by: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(on(one, by[index] if index < len(by) else 1) for index, one in enumerate(old))

    return Run(run.program, all_on(run.inputs, step.inputs),
               [on(old, step.numbers[index] if index < len(step.numbers) else 1)
                for index, old in enumerate(run.numbers)], all_on(run.outputs, step.outputs), run.released)


def decoding(count: int) -> Run:
    """One round of a loop: weights stay, a cache and a length grow, the epsilon of a norm does not."""
    return Run(1, (7, 8, 100 + 40 * count), [1e-5, count, [1, 12, 5 + count, 64], -1], (140 + 40 * count,),
               (100 + 40 * count,))


def test_nothing_but_the_program_travels_when_all_goes_on_evenly() -> None:
    travelled = conversation([decoding(count) for count in range(6)])
    assert travelled[2:] == [RunDelta(1)] * 4
    assert len(messages.encode(Batch(list(travelled[2:3])))) <= 34


def test_a_loop_that_begins_anew_rises_as_it_did_before() -> None:
    def begun_anew(count: int) -> Run:
        # The first round reads what another program made.
        cache = 900 if count == 0 else 5000 + 40 * count
        return Run(1, (7, 8, cache), [1e-5, count, [1, 12, 5 + count, 64], -1], (5040 + 40 * count,), (cache,))

    travelled = conversation([*map(decoding, range(6)), *map(begun_anew, range(5))])
    assert travelled[6] == begun_anew(0)
    assert travelled[7] == RunDelta(1, numbers={1: 1, 2: [1, 12, 6, 64]})
    assert travelled[8:] == [RunDelta(1)] * 3


def text(begin: int, tokens: int) -> list[Run]:
    """One text: the prompt, read by one program, and a loop of two, whose first round reads what the prompt left."""
    made = [Run(1, (7, begin), [8], (begin + 2, begin + 3))]
    cache, token = begin + 2, begin + 3
    for count in range(tokens):
        first = begin + 10 + 20 * count
        # The mask was uploaded just before the prompt was read; each round makes the next one.
        mask = begin + 1 if count == 0 else first - 15
        made += [Run(2, (7, cache, token), [8 + count], (first, first + 1), (cache,)),
                 Run(3, (first + 1, mask), [], (first + 4, first + 5), (mask, token))]
        cache, token = first, first + 4
    return made


def text_with_mask(begin: int, tokens: int) -> list[Run]:
    """Another text, whose loop has a third program that knows the length, and frees nothing in the first round."""
    made = [Run(1, (7, begin), [8], (begin + 2, begin + 3))]
    cache, token, scores = begin + 2, begin + 3, ()
    for count in range(tokens):
        first = begin + 10 + 20 * count
        made += [Run(2, (7, cache, token), [], (first, first + 1), (cache,)),
                 Run(3, (first + 1,), [], (first + 4,), (token,)),
                 Run(4, (first + 4, begin + 2), [[1, 8 + count]], (first + 6, first + 7), scores)]
        cache, token, scores = first, first + 6, (first + 7,)
    return made


@pytest.mark.parametrize("text", [text, text_with_mask])
def test_the_third_text_is_as_predicted_from_its_first_token(text: Callable[[int, int], list[Run]]) -> None:
    texts = [text(100, 6), text(300, 6), text(500, 6), text(700, 6)]
    travelled = conversation([run for each in texts for run in each])
    assert travelled[2 * len(texts[0]):] == [RunDelta(run.program) for each in texts[2:] for run in each]


def test_a_text_of_another_length_differs_in_its_begin_only() -> None:
    texts = [text(100, 6), text(300, 6), text(500, 9), text(800, 4)]
    travelled = conversation([run for each in texts for run in each])
    last = travelled[-len(texts[-1]):]
    assert last[3:] == [RunDelta(run.program) for run in texts[-1][3:]]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.one_of(runs.map(lambda run: [run]), st.builds(text, st.integers(0, 3000), st.integers(1, 4))),
                min_size=1, max_size=6), st.lists(st.integers(1, 3), max_size=12))
def test_runs_ahead_are_predicted_as_they_will_be_requested(past: list[list[Run]], programs: list[int]) -> None:
    requested, ahead = RunPredictor(), RunPredictor()
    for run in (run for each in past for run in each):
        requested.complete(run)
        ahead.complete(run)
    predicted = PredictedRuns(ahead)
    for program in programs:
        try:
            expected = predicted.expected(program)
        except ProtocolError:
            return
        predicted.follow(expected)
        assert repr(requested.complete(RunDelta(program))) == repr(expected)


def test_a_history_is_bounded() -> None:
    history = RunHistory()
    for count in range(3 * MAX_INDEXED // 8):
        history.add(1 + count % 5, tuple(range(8 * count, 8 * count + 8)), is_even=False)
        if count % 3 == 0:
            assert history.origin_of(8 * count + 1) == (1 + count % 5, 1, 0)
        assert len(history._index) <= MAX_INDEXED + 8 * MAX_UNINDEXED
        assert len(history._firsts) <= MAX_UNINDEXED


def test_lists_of_numbers_continue_on_both_sides_although_one_records_tuples() -> None:
    here, there = RunPredictor(), RunPredictor()
    for length in (5, 6, 7, 7, 8, 2**63 - 1, 2**63 - 1, -2**63, 3):
        sent = here.shorten(Run(1, (7,), [(1, length), length], (3,)))
        assert there.complete(over_the_wire(sent)) == Run(1, (7,), [[1, length], length], (3,))


def test_whole_real_numbers_continue_and_others_stay() -> None:
    travelled = conversation([Run(1, (7,), [7.0 + count, 0.1 * count, [1.0 * count]], (3,)) for count in range(4)])
    assert travelled[3] == RunDelta(1, numbers={1: 0.1 * 3})


def test_another_rate_counts_once_it_was_seen_twice() -> None:
    def made(*outputs: int) -> list[Run]:
        return [Run(1, (7,), [], (output,)) for output in outputs]

    travelled = conversation(made(10, 20, 30, 40, 41, 42, 43))
    assert travelled[2:] == [RunDelta(1), RunDelta(1), *[RunDelta(1, outputs={0: 41 + n}) for n in range(2)],
                             RunDelta(1)]


def test_only_what_is_not_expected_travels() -> None:
    odd = Run(1, (7, 9, 220), [1e-5, 3, [1, 12, 8, 32], -1], (260,), (220,))
    assert conversation([decoding(0), decoding(1), decoding(2), odd])[3] == RunDelta(1, {1: 9}, {2: [1, 12, 8, 32]})


@pytest.mark.parametrize(("before", "after"), [(0.0, -0.0), (-0.0, 0.0), (1, 1.0), (1.0, 1), ([0.0], [-0.0])])
def test_numbers_that_only_look_equal_travel(before: Any, after: Any) -> None:
    steady = [Run(1, (1, 2), [before], (3, 4))] * 3
    last = conversation([*steady, Run(1, (1, 2), [after], (3, 4))])[-1]
    assert repr(last) == repr(RunDelta(1, numbers={0: after}))


def test_a_forgotten_program_begins_anew() -> None:
    forecast = RunPredictor()
    for count in range(3):
        sent = forecast.shorten(decoding(count))
    assert isinstance(sent, RunDelta)
    forecast.forget((1,))
    assert forecast.shorten(decoding(3)) == decoding(3)


@pytest.mark.parametrize("bad", [
    RunDelta(2), RunDelta(1, {3: 1}), RunDelta(1, numbers={9: 1}), RunDelta(1, outputs={1: 1}),
    RunDelta(1, released={4: 1}),
])
def test_what_does_not_fit_is_refused_and_changes_nothing(bad: RunDelta) -> None:
    forecast = RunPredictor()
    for count in range(3):
        forecast.complete(decoding(count))
    with pytest.raises(ProtocolError):
        forecast.complete(bad)
    assert forecast.complete(RunDelta(1)) == decoding(3)


def test_handles_that_would_leave_their_range_are_refused() -> None:
    forecast = RunPredictor()
    for output in (9, 2):
        forecast.complete(Run(1, (), [], (output,)))
    with pytest.raises(ProtocolError, match="do not exist"):
        forecast.complete(RunDelta(1))

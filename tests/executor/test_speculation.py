"""What is run before it is asked for: nobody can tell, except by the clock."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from djinn.ir.program import ConstantArgument, NumberArgument, Program, Step, Template, TensorArgument
from djinn.ir.schema import facts_of
from djinn.wire.messages import GENERATOR_HANDLE, Batch, Command, Define, Free, Result, Run, Seed, TensorHeader, Upload
from djinn.wire.tensors import header_of
from djinn_plugins.common.wire.delta import RunPredictor
from djinn_plugins.executor.cpu.executor import CpuExecutor
from djinn_plugins.executor.service import SessionService
from djinn_plugins.executor.speculation import CONFIDENT, FEW_AHEAD, MAX_AHEAD

TENSOR, NUMBER = TensorArgument(), NumberArgument()


def one_step(operator: torch._ops.OpOverload, arguments: tuple[object, ...], results: int = 1) -> Program:
    facts = facts_of(operator)
    inputs = sum(argument is TENSOR for argument in arguments)
    template = Template(facts.name, facts.digest, arguments)  # type: ignore[arg-type]  # forms of arguments
    return Program((template,), (Step(0, tuple(-1 - index for index in range(inputs)), results),), inputs,
                   tuple(range(results)))


def filled() -> Program:
    """Return a program that writes to a tensor that it makes."""
    calls = (aten.zeros_like.default, (TENSOR,)), (aten.fill_.Scalar, (TENSOR, NUMBER))
    templates = tuple(Template(facts_of(operator).name, facts_of(operator).digest, arguments)
                      for operator, arguments in calls)
    return Program(templates, (Step(0, (-1,), 1), Step(1, (0,), 0)), 1, (0,))


aten = torch.ops.aten
ADD, WRITE, DRAW, MULTIPLY, NORM, ATTEND, FILL = 1, 2, 3, 4, 5, 6, 7
PROGRAMS = {
    ADD: one_step(aten.add.Tensor, (TENSOR, TENSOR)),
    WRITE: one_step(aten.add_.Tensor, (TENSOR, TENSOR), results=0),
    DRAW: one_step(aten.rand_like.default, (TENSOR,)),
    MULTIPLY: one_step(aten.mul.Scalar, (TENSOR, NUMBER)),
    NORM: one_step(aten.native_batch_norm.default, (
        TENSOR, ConstantArgument(None), ConstantArgument(None), TENSOR, TENSOR, ConstantArgument(value=True), NUMBER,
        NUMBER), results=3),
    ATTEND: one_step(aten._scaled_dot_product_flash_attention_for_cpu.default, (TENSOR, TENSOR, TENSOR, NUMBER),
                     results=2),
    FILL: filled(),
}
DEFINITIONS = [Define(number, body) for number, body in PROGRAMS.items()]


@attrs.define
class Side:
    """A client and its service, which looks ahead as far as it can after each batch, or never."""

    looks_ahead: bool
    service: SessionService = attrs.field(factory=lambda: SessionService(CpuExecutor()))
    forecast: RunPredictor = attrs.field(factory=RunPredictor)
    went_ahead: int = 0

    def __attrs_post_init__(self) -> None:
        self.service.handle(Batch(list(DEFINITIONS)), [])

    def ask(
        self, commands: Sequence[Command], tensors: Sequence[torch.Tensor] = (), fetch: tuple[int, ...] = ()
    ) -> tuple[Result, list[torch.Tensor]]:
        short = [self.forecast.shorten(one) if isinstance(one, Run) else one for one in commands]
        answer = self.service.handle(Batch(short, fetch=fetch), [tensor.clone() for tensor in tensors])
        while self.looks_ahead and self.service.look_ahead():
            self.went_ahead += 1
        return answer

    def upload(self, handle: int, tensor: torch.Tensor) -> None:
        self.ask([Upload(handle, header_of(tensor))], [tensor])


@pytest.fixture
def side() -> Side:
    made = Side(looks_ahead=True)
    made.upload(1, torch.ones(4))
    return made


def decode(side: Side, rounds: range, *, at_once: bool = False) -> list[float]:
    """Add and multiply in turns, each round on what the one before has made; ask twice or once in a round."""
    seen = []
    for count in rounds:
        begin = 10 + 2 * count
        last = begin - 1 if count else 1
        steps = [Run(ADD, (last, 1), [], (begin,)),
                 Run(MULTIPLY, (begin,), [0.5], (begin + 1,), (last,) if count else ())]
        if not at_once:
            side.ask([steps.pop(0)])
        _, data = side.ask(steps, fetch=(begin + 1,))
        seen.append(data[0][0].item())
    return seen


@pytest.mark.parametrize("at_once", [False, True])
def test_a_loop_is_run_ahead(side: Side, at_once: bool) -> None:
    plain = Side(looks_ahead=False)
    plain.upload(1, torch.ones(4))
    assert decode(side, range(20), at_once=at_once) == decode(plain, range(20))
    hits, misses = side.service.runs_ahead
    assert hits > 2 * (20 - CONFIDENT - 4)
    assert misses == 0
    assert plain.service.runs_ahead == (0, 0)
    assert side.service.live_handles == plain.service.live_handles


@pytest.mark.parametrize(("elements", "held", "least", "most"), [
    (4, 4, MAX_AHEAD, MAX_AHEAD), (2**18, 4, FEW_AHEAD, FEW_AHEAD + 2), (2**18, 2**23, FEW_AHEAD + 2, FEW_AHEAD + 9),
])
def test_results_of_runs_ahead_are_few_or_a_share_of_the_memory(
    side: Side, elements: int, held: int, least: int, most: int
) -> None:
    side.service.ahead.is_repeating = True
    side.upload(1, torch.ones(elements))
    side.upload(2, torch.ones(held))
    for count in range(16):
        before = (9 + count,) if count else ()
        side.ask([Run(ADD, (9 + count if count else 1, 1), [], (10 + count,), before)])
        assert len(side.service.ahead) <= most
    assert len(side.service.ahead) >= least


def loops(side: Side, lengths: Sequence[int]) -> tuple[list[float], list[tuple[int, int]]]:
    """Run loops with something else between them; return what was fetched, and hits and misses after each."""
    seen, counts, start = [], [], 0
    for length in lengths:
        seen += decode(side, range(start, start + length))
        start += length
        side.ask([Run(FILL, (1,), [2.0], (1000 + start,))])
        counts.append(side.service.runs_ahead)
    return seen, counts


def test_a_loop_is_not_run_beyond_the_length_of_the_last_two(side: Side) -> None:
    plain = Side(looks_ahead=False)
    plain.upload(1, torch.ones(4))
    lengths = [12, 12, 12, 16, 9]
    seen, counts = loops(side, lengths)
    assert seen == loops(plain, lengths)[0]
    hits, misses = zip(*counts, strict=True)
    wasted = [after - before for before, after in pairwise((0, *misses))]
    assert (wasted[1] > 0, wasted[2]) == (True, 0)
    # A longer one is ahead again after its twelfth round, and a shorter one is run beyond its end as ever.
    assert hits[3] - hits[2] == hits[2] - hits[1] + 2 * 4 - 1
    assert wasted[4] > 0


@pytest.mark.parametrize("between", ["write", "upload", "upload of what is read", "seed", "other run", "other number"])
def test_what_was_run_ahead_is_dropped_when_something_else_is_asked_for(side: Side, between: str) -> None:
    plain = Side(looks_ahead=False)
    plain.upload(1, torch.ones(4))
    seen = []
    for one in (side, plain):
        decode(one, range(12))
        last = 10 + 2 * 12 - 1
        if between == "write":
            one.ask([Run(WRITE, (1, 1), [], ())])
        elif between == "upload":
            one.upload(1, torch.full((4,), 7.0))
        elif between == "upload of what is read":
            one.upload(last, torch.full((4,), 7.0))
        elif between == "seed":
            one.ask([Seed(3)])
        elif between == "other run":
            one.ask([Run(ADD, (1, 1), [], (last,))])
        else:
            one.ask([Run(MULTIPLY, (1,), [-3.0], (last,))])
        seen.append(decode(one, range(12, 20)))
    assert seen[0] == seen[1]
    assert side.service.runs_ahead[1] > 0


def test_what_has_read_a_value_that_is_gone_is_dropped(side: Side) -> None:
    for count in range(6):
        side.ask([Run(ADD, (1, 1), [], (40 + count,))])
    side.ask([Free((1,))])
    result, _ = side.ask([Run(ADD, (1, 1), [], (46,))], fetch=(46,))
    assert {failure.kind for failure in result.failures} == {"UnknownHandleError"}


@pytest.mark.parametrize(("program", "inputs", "numbers", "results"), [
    (WRITE, (1, 2), [], 0), (NORM, (3, 1, 2), [0.1, 1e-5], 3),
])
def test_what_writes_is_run_ahead_and_undone(
    side: Side, program: int, inputs: tuple[int, ...], numbers: list[float], results: int
) -> None:
    side.upload(2, torch.ones(4))
    side.upload(3, torch.randn(2, 4))
    plain = Side(looks_ahead=False)
    for handle in (1, 2, 3):
        plain.upload(handle, side.service.memory.values[handle])
    for count in range(12):
        for one in (side, plain):
            one.ask([Run(program, inputs, numbers, tuple(range(100 + 3 * count, 100 + 3 * count + results)))])
    assert len(side.service.ahead) == 1
    assert repr(side.ask([], fetch=(1, 2, 3))) == repr(plain.ask([], fetch=(1, 2, 3)))
    assert side.service.runs_ahead[1] == 1


def test_what_writes_only_to_its_own_results_is_run_ahead(side: Side) -> None:
    for count in range(12):
        side.ask([Run(FILL, (1,), [2.5], (100 + count,))])
    assert side.went_ahead
    assert side.ask([], fetch=(111,))[1][0].tolist() == [2.5] * 4


def test_what_draws_is_run_ahead_and_undone(side: Side) -> None:
    plain = Side(looks_ahead=False)
    plain.upload(1, torch.ones(4))
    outcomes = []
    for one in (side, plain):
        one.ask([Seed(5)])
        for count in range(8):
            one.ask([Run(DRAW, (1,), [], (100 + count,))])
        [state] = one.ask([], fetch=(GENERATOR_HANDLE,))[1]
        one.ask([Run(ADD, (1, 1), [], (200,))])
        one.ask([Run(DRAW, (1,), [], (201,))])
        outcomes.append([state, *one.ask([], fetch=(107, 201))[1], *one.ask([], fetch=(GENERATOR_HANDLE,))[1]])
    assert side.went_ahead
    assert side.service.runs_ahead[1], "a run that was not asked for"
    assert all(map(torch.equal, *outcomes))


def test_attention_with_dropout_is_refused_by_its_kernel_ahead_as_ever(side: Side) -> None:
    side.upload(2, torch.randn(1, 1, 3, 4))
    for dropout, goes_ahead in ((0.5, False), (0.0, True)):
        for count in range(8):
            side.ask([Run(ATTEND, (2, 2, 2), [dropout], (300 + 2 * count, 301 + 2 * count))])
        assert bool(side.went_ahead) == goes_ahead


def test_a_failure_ahead_is_reported_when_it_is_asked_for(side: Side) -> None:
    side.upload(2, torch.ones(3))
    side.upload(3, torch.ones(3))
    for count in range(8):
        # After the last round, the forecast adds four numbers to three.
        inputs = (2, 3) if count < 7 else (1, 3)
        result, _ = side.ask([Run(ADD, inputs, [], (50 + count,))], fetch=(50 + count,))
    assert len(result.failures) == 1
    result, _ = side.ask([Run(ADD, (1, 1), [], (70,))], fetch=(70,))
    assert result.failures == ()
    assert isinstance(result.items[0], TensorHeader)


operands = st.integers(1, 6)
commands = st.one_of(
    st.builds(lambda a, b, to: Run(ADD, (a, b), [], (to,)), operands, operands, operands),
    st.builds(lambda a, b: Run(WRITE, (a, b), [], ()), operands, operands),
    st.builds(lambda a, to: Run(DRAW, (a,), [], (to,)), operands, operands),
    st.builds(lambda a, by, to: Run(MULTIPLY, (a,), [by], (to,)), operands, st.sampled_from([0.5, -1.0]), operands),
    st.builds(lambda a: Free((a,)), operands),
    st.builds(Seed, st.integers(0, 3)),
)


@settings(deadline=None, max_examples=300)
@given(rounds=st.lists(commands, min_size=1, max_size=4), times=st.integers(4, 9),
       odd=st.lists(st.tuples(st.integers(0, 40), commands), max_size=4))
def test_looking_ahead_changes_nothing(rounds: list[Command], times: int, odd: list[tuple[int, Command]]) -> None:
    asked = rounds * times
    for place, command in odd:
        asked.insert(place % (len(asked) + 1), command)
    outcomes = []
    for looks_ahead in (True, False):
        side = Side(looks_ahead)
        for handle in range(1, 7):
            side.upload(handle, torch.arange(4.0) + handle)
        told = []
        for command in asked:
            result, data = side.ask([copy.deepcopy(command)], fetch=(1, 2, 3, 4, 5, 6))
            kinds = [type(item).__name__ for item in result.items]
            told.append((kinds, [failure.kind for failure in result.failures], [tensor.tolist() for tensor in data]))
        outcomes.append(told)
    assert repr(outcomes[0]) == repr(outcomes[1])

"""Answers before the question: both sides agree which of them are answers, also if they are late, wrong or too much."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import torch
from executor.test_speculation import ADD, DEFINITIONS, DRAW, MULTIPLY, WRITE
from hypothesis import given, settings
from hypothesis import strategies as st

from djinn.errors import ProtocolError
from djinn.wire.messages import (
    GENERATOR_HANDLE,
    Batch,
    Command,
    Failure,
    Plain,
    Poisoned,
    Result,
    Run,
    Seed,
    TensorHeader,
    Upload,
)
from djinn.wire.tensors import header_of
from djinn_plugins.client.early_inbox import EarlyInbox
from djinn_plugins.common.wire import short_messages
from djinn_plugins.common.wire.assumptions import MAX_EARLY, MAX_EARLY_BYTES, digest_of_batches
from djinn_plugins.common.wire.delta import RunPredictor
from djinn_plugins.executor.cpu.executor import CpuExecutor
from djinn_plugins.executor.service import SessionService
from djinn_plugins.transport.resumption import ClientEnd, ServerEnd


@attrs.define
class Pair:
    """A client and a server with early answers, or without; what the server sends arrives as late as the test says."""

    is_early: bool
    service: SessionService = attrs.field(factory=lambda: SessionService(CpuExecutor()))
    predictor: RunPredictor = attrs.field(factory=RunPredictor)
    inbox: EarlyInbox = attrs.field(factory=EarlyInbox)
    under_way: deque[tuple[int, Result, list[torch.Tensor]]] = attrs.field(factory=deque)
    is_clear: bool = True
    number: int = 0
    answered: int = 0
    used: int = 0

    def __attrs_post_init__(self) -> None:
        if self.is_early:
            self.service.answer_early(self)
        self.ask(list(DEFINITIONS))
        for handle in (1, 2):
            self.ask([Upload(handle, header_of(torch.ones(4)))], tensors=[torch.linspace(-1.0, 1.0, 4)])

    def send_early(self, sequence: int, message: Result, tensors: Sequence[torch.Tensor]) -> bool:
        self.under_way.append((sequence, message, [tensor.clone() for tensor in tensors]))
        return True

    def ask(self, commands: Sequence[Command], fetch: tuple[int, ...] = (), *, tensors: Sequence[torch.Tensor] = (),
            arriving: int = 0, ahead: int = 100) -> list[Any]:
        """Send a batch; return what the client takes for its answer."""
        batch = Batch([self.predictor.shorten(one) if isinstance(one, Run) else one for one in commands], fetch)
        self.number += 1
        self.inbox.sent(self.number, memoryview(short_messages.encode(batch)))
        self._arrive(arriving)
        early = self.inbox.take(self.number, len(fetch)) if fetch else None
        result, data = self.service.handle(batch, list(tensors), number=self.number)
        if fetch and result.assumes:
            # The server takes it for answered: the client has the answer, or it is under way.
            while early is None:
                assert self.under_way, "both sides know that it is answered"
                self._arrive(1)
                early = self.inbox.take(self.number, len(fetch))
            self.used += 1
            result, data = early
        else:
            assert early is None, "the client takes no answer that the server has not given"
        self.answered = self.number if fetch else self.answered
        while ahead and self.service.can_look_ahead and self.service.look_ahead():
            ahead -= 1
        kinds = [type(item).__name__ if isinstance(item, (TensorHeader, Poisoned)) else item for item in result.items]
        return [kinds, [failure.kind for failure in result.failures], [tensor.tolist() for tensor in data]]

    def _arrive(self, count: int) -> None:
        for _ in range(min(count, len(self.under_way))):
            number, result, tensors = self.under_way.popleft()
            self.inbox.arrived(number, result, tensors, self.answered)


_STEPS: dict[str, Callable[[int, int], Run]] = {
    "add": lambda last, to: Run(ADD, (last, 1), [], (to,)),
    "halve": lambda last, to: Run(MULTIPLY, (last,), [0.5], (to,)),
    "draw": lambda last, to: Run(DRAW, (last,), [], (to,)),
    "add up": lambda last, to: Run(WRITE, (2, last), [], ()),
    "use": lambda last, to: Run(ADD, (last, 2), [], (to,)),
}
_ODD: dict[str, Any] = {
    "write": lambda last, to: [Run(WRITE, (1, 1), [], ())], "seed": lambda last, to: [Seed(3)],
    "other number": lambda last, to: [Run(MULTIPLY, (last,), [-1.0], (to + 50,))],
    "fail": lambda last, to: [Run(ADD, (1, 9999), [], (to + 50,))],
    "question": lambda last, to: [],
}


def _loop(pair: Pair, steps: Sequence[str], rounds: int, split: bool, odd: dict[int, str],
          late: Sequence[int], ahead: Sequence[int]) -> list[Any]:
    """Do the same steps in each round, in one batch or in several, and ask for the last value."""
    seen, last = [], 1
    for count in range(rounds):
        commands: list[Command] = []
        for step, name in enumerate(steps):
            to = 100 + 100 * count + step
            command = _STEPS[name](last, to)
            commands.append(command)
            last = to if command.outputs else last
        when: Any = {"arriving": late[count % len(late)], "ahead": ahead[count % len(ahead)]}
        if split:
            for command in commands[:-1]:
                pair.ask([command], **when)
            commands = commands[-1:]
        if odd.get(count) == "in the round":
            commands.append(Run(ADD, (1, 1), [], (last + 60,)))
        seen.append(pair.ask(commands, (last,), **when))
        if count in odd and odd[count] in _ODD:
            seen.append(pair.ask(_ODD[odd[count]](last, last), (1, 2), **when))
    return seen


@settings(deadline=None, max_examples=120)
@given(steps=st.lists(st.sampled_from(sorted(_STEPS)), min_size=1, max_size=3, unique=True), split=st.booleans(),
       odd=st.dictionaries(st.integers(5, 19), st.sampled_from([*_ODD, "in the round"]), max_size=3),
       late=st.lists(st.integers(0, 4), min_size=1, max_size=5),
       ahead=st.lists(st.integers(0, 9), min_size=1, max_size=3))
def test_early_answers_are_the_answers(steps: list[str], split: bool, odd: dict[int, str], late: list[int],
                                       ahead: list[int]) -> None:
    pairs = [Pair(is_early=True), Pair(is_early=False)]
    outcomes = [_loop(pair, steps, 20, split, odd, late, ahead) for pair in pairs]
    assert outcomes[0] == outcomes[1]
    assert pairs[0].ask([], (GENERATOR_HANDLE,)) == pairs[1].ask([], (GENERATOR_HANDLE,))


def test_most_rounds_of_a_loop_are_answered_early() -> None:
    pair = Pair(is_early=True)
    _loop(pair, ["add", "halve"], 40, split=True, odd={}, late=[9], ahead=[100])
    assert pair.used >= 30
    assert pair.service.early is not None
    assert pair.service.early.used == pair.used


def test_confidence_lasts_from_one_loop_to_the_next() -> None:
    pair = Pair(is_early=True)
    used = []
    for _ in range(3):
        before = pair.used
        _loop(pair, ["add", "halve"], 20, split=True, odd={}, late=[9], ahead=[100])
        pair.ask([Run(ADD, (1, 1), [], (5,))], (5,))
        used.append(pair.used - before)
    assert used[1] > used[0]
    assert used[2] == used[1] >= 15


def test_nothing_is_sent_to_a_client_that_does_not_read() -> None:
    pair = Pair(is_early=True)
    _loop(pair, ["add"], 12, split=False, odd={}, late=[0], ahead=[100])
    pair.is_clear = False
    pair.under_way.clear()
    _loop(pair, ["add"], 12, split=False, odd={}, late=[0], ahead=[100])
    assert not pair.under_way


def test_what_is_sent_early_is_bounded() -> None:
    pair = Pair(is_early=True)
    _loop(pair, ["add"], 12, split=False, odd={}, late=[20], ahead=[1000])
    for _ in range(1000):
        pair.service.look_ahead()
    assert len(pair.under_way) <= MAX_EARLY
    assert sum(tensor.nbytes for _, _, tensors in pair.under_way for tensor in tensors) <= MAX_EARLY_BYTES


def test_values_that_were_sent_are_computed_again_if_their_runs_were_dropped_because_memory_is_short() -> None:
    pair = Pair(is_early=True)
    _loop(pair, ["draw"], 12, split=False, odd={}, late=[20], ahead=[1000])
    sent = pair.inbox._answers[pair.number + 1][1][0].tolist()
    hits, _ = pair.service.runs_ahead
    pair.service.ahead.shed()
    last = 100 + 100 * 11
    pair.ask([Run(DRAW, (last,), [], (last + 100,))])
    assert pair.service.runs_ahead[0] == hits
    assert pair.ask([], (last + 100,))[2] == [sent]


@pytest.mark.parametrize("result", [
    Result((Poisoned(1),), assumes=b"x"), Result((), assumes=b"x"), Result((Plain(1),), assumes=b"x", since=7),
    Result((Plain(1),), (Failure(1, "ValueError", ""),), assumes=b"x"),
], ids=["poison", "nothing", "of the past", "failure"])
def test_a_server_may_send_nothing_but_values_early(result: Result) -> None:
    with pytest.raises(ProtocolError):
        EarlyInbox().arrived(7, result, [], 0)


def test_a_server_may_not_send_more_than_the_bound() -> None:
    with pytest.raises(ProtocolError, match="too much"):
        EarlyInbox().arrived(7, Result((Plain(1),), assumes=b"x"), [torch.ones(MAX_EARLY_BYTES)], 0)
    for items in ((Plain("x" * (MAX_EARLY_BYTES + 1)),), (Plain([1] * MAX_EARLY_BYTES),),
                  (Plain(1),) * MAX_EARLY_BYTES):
        with pytest.raises(ProtocolError, match="too much"):
            EarlyInbox().arrived(7, Result(items, assumes=b"x"), [], 0)
    inbox = EarlyInbox()
    for number in range(1, MAX_EARLY + 1):
        inbox.arrived(number, Result((Plain(1),), assumes=b"x"), [], 0)
    with pytest.raises(ProtocolError, match=f"more than {MAX_EARLY}"):
        inbox.arrived(MAX_EARLY + 1, Result((Plain(1),), assumes=b"x"), [], 0)


def test_an_answer_to_another_question_is_no_answer() -> None:
    for size, assumes in ((1, b"x"), (2, None)):
        inbox = EarlyInbox()
        inbox.sent(1, memoryview(b"batch"))
        inbox.arrived(1, Result((Plain(1),), assumes=assumes or digest_of_batches([b"batch"])), [], 0)
        assert inbox.take(1, size) is None


def test_an_early_answer_acknowledges_nothing() -> None:
    client: ClientEnd[bytes] = ClientEnd(1, 1000)
    client.send(b"one", 3)
    client.answered_early(2)
    assert (client.answered, client.acked, client.kept) == (2, 1, 1)
    assert not client.answer(2), "the answer itself is a second one"
    server: ServerEnd[str] = ServerEnd(1, 30.0)
    with pytest.raises(ProtocolError):
        server.check(2)
    server.promised = 2
    server.check(2)

"""The law of sessions about values that come later: loops that keep some, with writes and failures after them."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

import djinn
from djinn.session.session import Session
from djinn_conformance.assertions import expect, expect_same_tensor
from djinn_conformance.laws import is_thorough, law
from djinn_conformance.subjects import Subject

_LOOPS = 60 if is_thorough() else 10
_STEPS = 20
_CPU = torch.device("cpu")


@attrs.define
class _State:
    """The values of a loop; and the values that are to come, with those of eager in their place."""

    value: torch.Tensor
    weight: torch.Tensor
    asked: list[Any] = attrs.field(factory=list)


def _ask(state: _State, tensor: torch.Tensor) -> None:
    state.asked.append(djinn.later(tensor) if tensor.device.type != "cpu" else tensor.clone())


_STEPS_OF_LOOPS: Sequence[Callable[[_State], object]] = (
    lambda state: _ask(state, state.value.sum()), lambda state: _ask(state, state.weight),
    lambda state: _ask(state, state.value.view(-1)[1:]), lambda state: _ask(state, state.weight > 0),
    lambda state: _ask(state, state.value.expand(3, 4).t()),
    lambda state: _ask(state, state.value.to(torch.complex64).conj()),
    lambda state: state.weight.add_(0.5), lambda state: state.weight.view(-1)[1:].mul_(-1.0),
    lambda state: state.value.zero_(), lambda state: setattr(state, "value", state.value * 0.5 + state.weight),
    lambda state: setattr(state, "value", torch.full((4,), 2.0).to(state.value.device)),
    lambda state: setattr(state, "weight", state.weight.clone()), lambda state: state.weight.sum().item(),
    lambda state: _ask(state, torch.zeros(2**15, device=state.value.device) + state.value[0]),
    lambda state: [value.ready() for value in state.asked if isinstance(value, djinn.LaterValue)],
    lambda state: str(state.asked[-1]) if state.asked else None,
    # Large enough to be sent before what is pending.
    lambda state: torch.ones(2**15).to(state.value.device),
)


@law("session.later_exact")
def test_later_exact(subject: Subject, session: Session) -> None:
    """Draw loops, read what they have asked for, and compare it with eager's; and let one value fail."""
    for seed in range(_LOOPS):
        plan = random.Random(seed)
        steps = [plan.choice(_STEPS_OF_LOOPS) for _ in range(_STEPS)]
        got, wanted = _run(session.device, steps), _run(_CPU, steps)
        if plan.random() < 0.5:
            session.flush()
            time.sleep(plan.choice((0.0, 0.002)))
        _compare(got, wanted, f"{subject}: loop {seed}")
    _check_failure(str(subject), session)


def _check_failure(where: str, session: Session) -> None:
    """Log a value that cannot be computed: the line says so, and so does the program's next wait."""
    lines: list[str] = []
    handler = djinn.LaterHandler(_Collecting(lines))
    table, index = torch.ones(3, 1).to(session.device), torch.tensor([7.0]).to(session.device)
    lost = djinn.later(torch.nn.functional.embedding(index.long(), table).sum())
    handler.emit(_record("lost %5.2f, kept %.1f", lost, djinn.later(table.sum())))
    handler.flush()
    expect(len(lines) == 1 and "IndexError" in lines[0] and lines[0].endswith("kept 3.0"), "the line", got=lines,
           wanted="an IndexError and 3.0", where=where)
    for what, wait in (("the next wait", session.synchronize), ("the value", lost.result)):
        try:
            wait()
        except IndexError:
            continue
        expect(False, what, got="nothing", wanted="an IndexError", where=where)
    session.synchronize()


class _Collecting(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


def _record(message: str, *values: object) -> logging.LogRecord:
    return logging.LogRecord("djinn_conformance", logging.INFO, __file__, 1, message, values, None)


def _run(device: torch.device, steps: Sequence[Callable[[_State], object]]) -> list[Any]:
    state = _State(torch.arange(4.0).to(device), torch.linspace(-1.0, 1.0, 4).to(device))
    for step in steps:
        step(state)
    return state.asked


def _compare(got: Sequence[Any], wanted: Sequence[torch.Tensor], where: str) -> None:
    for count, (mine, ours) in enumerate(zip(got, wanted, strict=True)):
        made = mine.result()
        expect_same_tensor(made, ours, f"value {count}", where)

"""A program for which there is no room as a whole runs in parts, with the same values and failures."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.memory.room import ROW_BYTES, N, T, open_executor, rows, template

from djinn.ir.program import ListArgument, Program, Step
from djinn.wire.messages import Batch, Define, Forget, Free, Result, Run, Upload
from djinn.wire.tensors import header_of
from djinn_conformance.subjects import default_plugins
from djinn_plugins.common.kinds.guard import Bounds
from djinn_plugins.common.kinds.memory import MemoryOptions
from djinn_plugins.executor.memory.manager import TieredManager
from djinn_plugins.executor.program_parts import DividedProgram
from djinn_plugins.executor.service import SessionService

MOST_ROWS = 8
STEP_ROWS = 3 * MOST_ROWS + 2
"""What one step needs: two operands, which may be views of more, and a result."""
TEMPLATES = {
    "add": template("aten::add.Tensor", T, T), "scale_": template("aten::mul_.Scalar", T, N),
    "rows": template("aten::slice.Tensor", T, N, N, N), "join": template("aten::cat", ListArgument((T, T))),
    "random": template("aten::rand_like", T), "wrong": template("aten::select.int", T, N, N),
    "turn_": template("aten::t_", T), "halves": template("aten::split.Tensor", T, N, N)}
NUMBERS: dict[str, list[Any]] = {"scale_": [0.5], "rows": [0, 0, 2, 1], "wrong": [0, 99], "halves": [2, 0]}


@attrs.frozen
class Drawn:
    """A program, and the numbers of a run."""

    body: Program
    numbers: list[Any]


@st.composite
def programs(draw: st.DrawFn) -> Drawn:
    sizes, steps, numbers = {-1: 3, -2: 4}, list[Step](), list[Any]()
    kinds, produced = list(TEMPLATES), 0
    # What is turned has another number of halves.
    left_out = draw(st.sampled_from(["turn_", "halves"]))
    for _ in range(draw(st.integers(2, 14))):
        kind = draw(st.sampled_from([kind for kind in kinds if kind != left_out]))
        first, second = (draw(st.sampled_from(sorted(sizes))) for _ in range(2))
        if kind == "add" and sizes[first] != sizes[second]:
            second = first
        made = {"join": [sizes[first] + sizes[second]], "rows": [2], "halves": [2, 2], "scale_": [], "turn_": []}.get(
            kind, [sizes[first]])
        if sum(made) > MOST_ROWS or (kind == "halves" and sizes[first] != 4):
            continue
        operands = (first, second) if kind in {"add", "join"} else (first,)
        steps.append(Step(kinds.index(kind), operands, len(made)))
        numbers += NUMBERS.get(kind, [])
        sizes.update(enumerate(made, produced))
        produced += len(made)
    kept = tuple(sorted(draw(st.sets(st.integers(0, produced - 1))))) if produced else ()
    return Drawn(Program(tuple(TEMPLATES.values()), tuple(steps), 2, kept), numbers)


def service(*, limit_rows: int = 0, program_rows: int = 0) -> SessionService:
    executor, plugins = open_executor(), default_plugins()
    watch = plugins.choose("guard", "core").watch(Bounds("cpu", program_rows * ROW_BYTES or 2**40),
                                                  plugins.choose("shapes", "meta"))
    manager = TieredManager(executor, MemoryOptions(limit_rows * ROW_BYTES)) if limit_rows else None
    return SessionService(executor, seed=5, watch=watch, manager=manager)


def outcome(session: SessionService, drawn: Drawn, inputs: tuple[int, int], first: int) -> list[Any]:
    """Run a program, and return all that a client sees of it."""
    outputs = tuple(range(first, first + len(drawn.body.keep)))
    result, data = session.handle(
        Batch([Run(1, inputs, drawn.numbers, outputs)], fetch=(*inputs, *outputs), synchronize=True), [])
    tensors = iter(data)
    items = [next(tensors) if hasattr(item, "size") else item for item in result.items]
    return [result.failures, [(item.tolist(), item.stride()) if isinstance(item, torch.Tensor) else item
                              for item in items]]


def begun(session: SessionService, drawn: Drawn) -> Result:
    tensors = [rows(3, 1), rows(4, 2)]
    return session.handle(Batch([Upload(handle, header_of(tensor)) for handle, tensor in enumerate(tensors, 1)]
                                + [Define(1, drawn.body)], synchronize=True), tensors)[0]


@pytest.mark.parametrize("limits", [{"limit_rows": STEP_ROWS}, {"program_rows": MOST_ROWS}], ids=["server", "program"])
@given(drawn=programs())
def test_a_program_that_runs_in_parts_has_the_results_and_failures_of_the_whole(
    limits: dict[str, int], drawn: Drawn
) -> None:
    sessions = service(), service(**limits)
    for session in sessions:
        assert not begun(session, drawn).failures
    for first in (10, 110, 210):
        wanted, found = (outcome(session, drawn, (1, 2), first) for session in sessions)
        assert found == wanted
    assert sessions[0].live_handles == sessions[1].live_handles, "nothing is left of the parts"
    for session in sessions:
        session.close()


def test_parts_are_as_large_as_there_is_room_for_and_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    part = DividedProgram._part

    def counting(divided: DividedProgram, begin: int, end: int) -> Any:
        made.append(end - begin)
        return part(divided, begin, end)

    monkeypatch.setattr(DividedProgram, "_part", counting)
    session = service(limit_rows=STEP_ROWS)
    body = Program((TEMPLATES["add"],), (Step(0, (-1, -1), 1),) * 32, 1, tuple(range(32)))
    session.handle(Batch([Upload(1, header_of(rows(2))), Define(1, body)]), [rows(2)])
    for first in (100, 200):
        assert not session.handle(Batch([Run(1, (1,), [], tuple(range(first, first + 32)))], synchronize=True),
                                  [])[0].failures
        result, data = session.handle(Batch(fetch=tuple(range(first, first + 32))), [])
        assert not result.failures
        assert all(torch.equal(value, 2 * rows(2)) for value in data)
    assert max(made) == 16
    assert sum(made) < 4 * 32
    count = len(made)
    assert session.handle(Batch([Free(tuple(range(100, 300))), Run(1, (1,), [], tuple(range(300, 332)))],
                                synchronize=True), [])[0].failures == ()
    assert len(made) <= count + 1
    session.handle(Batch([Forget((1,))]), [])
    assert not session._runs._divided
    session.close()



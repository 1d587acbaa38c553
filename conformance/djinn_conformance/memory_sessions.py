"""Sessions that share a memory manager, each beside the same values in eager."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from types import TracebackType
from typing import Any, Self, TypeAlias

import torch
from hypothesis import strategies as st

from djinn.ir.program import ListArgument, NumberArgument, Program, Step, Template, TensorArgument
from djinn.ir.schema import facts_of
from djinn.wire.messages import Batch, Command, Copy, Define, Failure, Free, Run, Upload
from djinn.wire.tensors import header_of
from djinn_conformance.assertions import expect, expect_same_tensor
from djinn_conformance.subjects import default_plugins
from djinn_plugins.common.kinds.guard import Bounds, ProgramChecker
from djinn_plugins.common.kinds.memory import MemoryFactory, MemoryOptions
from djinn_plugins.common.operators.operators import operator_named
from djinn_plugins.common.wire.delta import RunPredictor
from djinn_plugins.executor.service import SessionService

__all__ = ("ROW_BYTES", "SESSIONS", "MemorySessions", "Steps", "steps")

Steps: TypeAlias = tuple[tuple[str, int, int, int], ...]
"""What sessions do: the kind of step, the session, and two numbers that choose its operands."""
SESSIONS = 2
MAX_ROWS = 3
"""Most rows of an operand, so that one step adds at most `SOME_TIMES` times as many."""
SOME_TIMES = 6
MANY_TIMES = 9
_COLUMNS = 8
ROW_BYTES = 4 * _COLUMNS
_KINDS = ("upload", "add", "add", "scale_", "rows", "join", "copy", "free", "repeat")
_T, _N = TensorArgument(), NumberArgument()


def _template(name: str, *arguments: Any) -> Template:
    facts = facts_of(operator_named(name))
    return Template(facts.name, facts.digest, arguments)


@cache
def _definitions() -> list[Define]:
    add = Program((_template("aten::add.Tensor", _T, _T),), (Step(0, (-1, -2), 1),), 2, (0,))
    scale = Program((_template("aten::mul_.Scalar", _T, _N),), (Step(0, (-1,), 0),), 1, ())
    rows = Program((_template("aten::slice.Tensor", _T, _N, _N, _N),), (Step(0, (-1,), 1),), 1, (0,))
    join = Program((_template("aten::cat", ListArgument((_T, _T))),), (Step(0, (-1, -2), 1),), 2, (0,))
    many = Program((_template("aten::cat", ListArgument((_T,) * MANY_TIMES)),),
                   (Step(0, (-1,) * MANY_TIMES, 1),), 1, (0,))
    return [Define(number, program) for number, program in enumerate((add, scale, rows, join, many), 1)]


_ADD, _SCALE, _ROWS, _JOIN, _MANY = range(1, 6)


def _watch() -> ProgramChecker:
    shapes = default_plugins().choose("shapes", "meta")
    watch: ProgramChecker = default_plugins().choose("guard", "core").watch(Bounds("cpu"), shapes)
    return watch


def steps(most: int = 25) -> st.SearchStrategy[Steps]:
    """Draw what sessions do."""
    step = st.tuples(st.sampled_from(_KINDS), st.integers(0, SESSIONS - 1), st.integers(0, 15), st.integers(0, 15))
    return st.lists(step, min_size=1, max_size=most).map(tuple)


class MemorySessions:
    """Sessions on one executor and one memory manager.

    Args:
        factory: Opens the manager.
        options: Its limits.

    Attributes:
        executor: The executor.
        manager: The manager.
        services: The sessions.
        eager: For each session, by handle: the same values in eager.
    """

    def __init__(self, factory: MemoryFactory, options: MemoryOptions) -> None:
        self.executor = default_plugins().find_executor("cpu").value.open("cpu")
        self.manager = factory.open(self.executor, options)
        self.services = [SessionService(self.executor, watch=_watch(), manager=self.manager)
                         for _ in range(SESSIONS)]
        self.eager: list[dict[int, torch.Tensor]] = [{} for _ in self.services]
        self._predictors = [RunPredictor() for _ in self.services]
        self._last = 0
        for session in range(SESSIONS):
            assert not self.do(session, *_definitions()), "definitions fail"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        for service in self.services:
            service.close()
        self.executor.close()

    def do(self, session: int, *commands: Command, tensors: Sequence[torch.Tensor] = ()) -> tuple[Failure, ...]:
        """Carry out commands in a session, and return its failures."""
        predictor = self._predictors[session]
        short = [predictor.shorten(command) if isinstance(command, Run) else command for command in commands]
        return self.services[session].handle(Batch(short, synchronize=True), tensors)[0].failures

    def upload(self, session: int, rows: int) -> tuple[Failure, ...]:
        """Upload a new value."""
        handle = self._fresh()
        value = torch.arange(rows * _COLUMNS, dtype=torch.float32).reshape(rows, _COLUMNS) + handle
        return self._made(session, Upload(handle, header_of(value)), {handle: value}, value)

    def oversized(self, session: int, rows: int) -> Iterator[tuple[Failure, ...]]:
        """Upload a value, and compute one, that are larger than that many rows."""
        yield self.do(session, Upload(self._fresh(), header_of(torch.zeros(rows + 1, _COLUMNS))),
                      tensors=[torch.zeros(rows + 1, _COLUMNS)])
        for handle, value in list(self.eager[session].items()):
            if MANY_TIMES * len(value) > rows:
                yield self.do(session, Run(_MANY, (handle,), [], (self._fresh(),)))
                return

    def apply(self, steps: Steps) -> Iterator[tuple[Failure, ...]]:
        """Carry out steps, one for each item that is consumed, and return the failures of each."""
        for kind, session, first, second in steps:
            held = sorted(handle for handle, value in self.eager[session].items() if len(value) <= MAX_ROWS)
            if kind == "upload" or not held:
                yield self.upload(session, 1 + first % MAX_ROWS)
            elif kind == "repeat":
                for _ in range(SOME_TIMES):
                    yield self._applied("add", session, held[first % len(held)], held[first % len(held)])
                    self.services[session].look_ahead()
            else:
                yield self._applied(kind, session, held[first % len(held)], held[second % len(held)])

    def _applied(self, kind: str, session: int, first: int, second: int) -> tuple[Failure, ...]:
        eager = self.eager[session]
        x, y, handle = eager[first], eager[second], self._fresh()
        if kind == "add" and len(x) == len(y):
            return self._made(session, Run(_ADD, (first, second), [], (handle,)), {handle: x + y})
        if kind == "add":
            return self._made(session, Run(_ADD, (first, first), [], (handle,)), {handle: x + x})
        if kind == "rows":
            return self._made(session, Run(_ROWS, (first,), [0, 0, 1], (handle,)), {handle: x[:1]})
        if kind == "join":
            return self._made(session, Run(_JOIN, (first, second), [], (handle,)), {handle: torch.cat([x, y])})
        if kind == "copy":
            return self._made(session, Copy(((first, handle, 0),)), {handle: x.clone()})
        if kind == "scale_":
            failures = self.do(session, Run(_SCALE, (first,), [0.5], ()))
            if not failures:
                x.mul_(0.5)
            return failures
        del eager[first]
        return self.do(session, Free((first,)))

    def _made(self, session: int, command: Command, values: dict[int, torch.Tensor],
              *tensors: torch.Tensor) -> tuple[Failure, ...]:
        failures = self.do(session, command, tensors=[tensor.clone() for tensor in tensors])
        if not failures:
            self.eager[session] |= values
        return failures

    def _fresh(self) -> int:
        self._last += 1
        return self._last

    def expect_eager(self, where: str, *, may_fail: bool = False) -> None:
        """Fetch every value, and compare it with that of eager."""
        for session, values in enumerate(self.eager):
            for handle, wanted in values.items():
                result, data = self.services[session].handle(Batch(fetch=(handle,)), [])
                if result.failures and may_fail:
                    expect_refused(result.failures, where)
                    continue
                expect(not result.failures, f"failures of value {handle}", got=result.failures, wanted="none",
                       where=where)
                expect_same_tensor(data[0], wanted, f"value {handle} of session {session}", where)


def expect_refused(failures: Sequence[Failure], where: str) -> None:
    """Check that failures say that memory is short."""
    kinds = {failure.kind for failure in failures}
    expect(kinds <= {"OutOfMemoryError"}, "failures", got=failures, wanted="OutOfMemoryError only", where=where)

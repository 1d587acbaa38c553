"""The law of executors that write values which grow into spare room."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from djinn.wire.messages import Poisoned
from djinn_conformance.assertions import expect_same_metadata, expect_same_tensor
from djinn_conformance.laws import law
from djinn_conformance.oracle import run_eager
from djinn_conformance.programs import RecordedCall, Recording, Ref, RunnableProgram, call, pieces
from djinn_conformance.strategies import filled
from djinn_conformance.subjects import Subject, torch_device
from djinn_plugins.common.kinds.executor import CompiledProgram, Executor, RandomState, SpareRoom, SupportsGrowth

_HEADS, _WIDTH, _LENGTH = 8, 64, 64
"""Large enough for an executor that copies what is small."""
_MOST_ROWS = 40
_APPEND = (call("aten::cat", [Ref(-1), Ref(-2)], 2),
           call("aten::scaled_dot_product_attention", Ref(-3), Ref(0), Ref(0)))
_MOVES: dict[str, tuple[RecordedCall, ...]] = {
    "append": _APPEND,
    "attend": (call("aten::scaled_dot_product_attention", Ref(-3), Ref(-1), Ref(-1)),),
    "view": (call("aten::view", Ref(-1), [-1]), call("aten::neg", Ref(0))),
    "write": (call("aten::mul_.Scalar", Ref(-1), 0.5, results=0),),
    "prepend": (call("aten::cat", [Ref(-2), Ref(-1)], 2),),
}


class _Cache:
    """Values of an executor, and the same values of eager PyTorch."""

    def __init__(self, executor: Executor, room: SpareRoom, device: torch.device, where: str) -> None:
        self._executor = executor
        self._room = room
        self._random: RandomState = executor.random_state(0)
        self._device = device
        self._where = where
        self._programs: dict[str, CompiledProgram] = {}
        start = filled((1, _HEADS, _LENGTH, _WIDTH), torch.float32, 1)
        self.values: list[tuple[Any, torch.Tensor]] = [(executor.put(start), start)]

    def move(self, name: str, which: int, rows: int) -> None:
        """Run a program on a value, and compare what it gives except for values that may have gaps."""
        mine, theirs = self.values[which % len(self.values)]
        new, query = (filled((1, _HEADS, count, _WIDTH), torch.float32, 7 * len(self.values)) for count in (rows, 1))
        recording = Recording((theirs, new, query), _MOVES[name])
        part, program = self._program(name, recording)
        given = {-1: mine, -2: self._executor.put(new), -3: self._executor.put(query)}
        inputs = [given[index] for index in part.inputs]
        self._room.make_ready(program, inputs)
        got = dict(zip(part.outputs, program.run(inputs, list(part.numbers), self._random, self._poison), strict=True))
        wanted = run_eager(recording, self._device).values
        if name == "write":
            self.values[which % len(self.values)] = mine, wanted[-1]
        for index, value in got.items():
            if name in ("append", "prepend") and index == 0:
                self.values.append((value, wanted[0]))
            else:
                self._compare(value, wanted[index], f"r{index} of {name}")

    def drop(self, which: int) -> None:
        """Forget a value, but not the last one."""
        if len(self.values) > 1:
            del self.values[which % len(self.values)]

    def settle(self) -> None:
        """Compare all values as they lie, and again when they are laid out as eager's."""
        for index, (mine, theirs) in enumerate(self.values):
            expect_same_tensor(self._executor.get(mine), theirs.cpu(), f"value {index} as it lies", self._where)
            self._room.make_dense(mine)
            self._compare(mine, theirs, f"value {index}")

    def _program(self, name: str, recording: Recording) -> tuple[RunnableProgram, CompiledProgram]:
        part, = pieces(recording, [], range(recording.results))
        if name not in self._programs:
            self._programs[name] = self._executor.compile(part.program)
            self._room.admit(self._programs[name])
        return part, self._programs[name]

    def _compare(self, mine: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
        expect_same_metadata(mine, theirs, what, self._where)
        expect_same_tensor(self._executor.get(mine), theirs.cpu(), what, self._where)

    def _poison(self, step: int, error: BaseException) -> Poisoned:
        raise error


@law("executor.growth_invisible")
@given(moves=st.lists(st.tuples(st.sampled_from([*["append"] * 3, *_MOVES, "drop"]), st.integers(-4, 3),
                                st.integers(1, _MOST_ROWS)), min_size=3, max_size=12))
@example(moves=[("append", -1, 1)] * 4 + [("append", -2, 3), ("append", 1, 2), ("view", -1, 1), ("write", 2, 1)])
@example(moves=[("append", -1, 1)] * 3 + [("drop", -1, 1), ("append", -1, 1), ("append", -1, 1), ("write", -1, 1)])
def test_growth_invisible(subject: Subject, executor: Executor, moves: list[tuple[str, int, int]]) -> None:
    """Append to the newest value and to older ones, read and write them otherwise, and forget some."""
    if not isinstance(executor, SupportsGrowth):
        return
    cache = _Cache(executor, executor.spare_room(), torch_device(subject), f"{subject}: {moves}")
    for name, which, rows in moves:
        if name == "drop":
            cache.drop(which)
        else:
            cache.move(name, which, rows)
    cache.settle()

"""Running programs again and again on one executor, and comparing it with another."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import attrs
import torch

from djinn.wire.messages import Poisoned
from djinn_conformance.assertions import expect_same_metadata, expect_same_tensor
from djinn_conformance.programs import RecordedCall, Recording, RunnableProgram, pieces
from djinn_conformance.strategies import filled
from djinn_plugins.common.kinds.executor import CompiledProgram, Executor, RandomState


@attrs.define
class Session:
    """One executor, and the values that it is given run by run."""

    executor: Executor
    parts: list[RunnableProgram]
    values: dict[int, Any] = attrs.field(factory=dict)
    reports: list[tuple[int, str]] = attrs.field(factory=list)
    programs: list[CompiledProgram] = attrs.field(init=False)
    random: RandomState = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.programs = [self.executor.compile(part.program) for part in self.parts]
        self.random = self.executor.random_state(7)

    def give(self, index: int, tensor: torch.Tensor) -> None:
        self.values[-1 - index] = self.executor.put(tensor)

    def run(self, numbers: Sequence[Any] | None = None) -> dict[int, Any]:
        results: dict[int, Any] = {}

        def report(step: int, error: BaseException) -> Poisoned:
            self.reports.append((step, type(error).__name__))
            return Poisoned(step)

        for part, program in zip(self.parts, self.programs, strict=True):
            known = self.values | results
            outputs = program.run([known[index] for index in part.inputs],
                                  list(part.numbers if numbers is None else numbers), self.random, report)
            results.update(zip(part.outputs, outputs, strict=True))
        return results


def session(executor: Executor, inputs: Sequence[torch.Tensor], *calls: RecordedCall, every: int = 1) -> Session:
    recording = Recording(tuple(inputs), calls)
    made = Session(executor, pieces(recording, [], range(0, recording.results, every)))
    for index, tensor in enumerate(inputs):
        made.give(index, tensor)
    return made


def same(got: dict[int, Any], wanted: dict[int, Any], where: str) -> None:
    assert got.keys() == wanted.keys()
    for index, should in wanted.items():
        if isinstance(should, torch.Tensor):
            expect_same_metadata(got[index], should, f"r{index}", where)
            expect_same_tensor(got[index].cpu(), should.cpu(), f"r{index}", where)
        else:
            assert repr(got[index]) == repr(should), where


def same_in_each_run(
    plain: Session, recorded: Session, recording: Recording, runs: int, replaced: AbstractSet[int], at: AbstractSet[int]
) -> None:
    """Compare all runs of two sessions; some inputs are new in every run, some in those of ``at``, some never."""
    before: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for number in range(runs):
        for index, tensor in enumerate(recording.inputs):
            if number == 0 or index in replaced or number in at:
                plain.give(index, tensor)
                recorded.give(index, tensor)
        wanted, got = plain.run(), recorded.run()
        same(got, wanted, f"run {number} of {recording}")
        same(recorded.values, plain.values, f"inputs after run {number} of {recording}")
        assert recorded.reports == plain.reports
        before.append((got, wanted))
        # Results of earlier runs that alias inputs change with them, all others stay.
        for earlier, (theirs, ours) in enumerate(before):
            same(theirs, ours, f"results of run {earlier} after run {number} of {recording}")


def weights() -> tuple[torch.Tensor, ...]:
    return filled((4, 4), torch.float32, 1), filled((4, 4), torch.float32, 2)

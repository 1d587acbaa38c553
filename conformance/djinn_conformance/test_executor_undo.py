"""The law of executors whose programs can undo what they write."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import example, given

from djinn.wire.messages import Poisoned
from djinn_conformance.assertions import bytes_of, expect, expect_equal, expect_same_tensor
from djinn_conformance.execution import prepare
from djinn_conformance.laws import law
from djinn_conformance.operations import IN_PLACE, PLAIN, RANDOM, VIEWS, grouped
from djinn_conformance.programs import Recording, Ref, call, pieces
from djinn_conformance.strategies import filled, recordings
from djinn_conformance.subjects import Subject
from djinn_plugins.common.kinds.executor import Executor, SupportsUndo, Undo

_VIEWS = Recording((filled((2, 3), torch.float32, 1), filled((3,), torch.float32, 2)), (
    call("aten::select.int", Ref(-1), 0, 1),
    call("aten::add_.Tensor", Ref(0), Ref(-2), results=0),
    call("aten::mul_.Scalar", Ref(-1), 2.0, results=0),
))
"""A row that is written, and then all of them."""
_STATISTICS = Recording(tuple(filled(size, torch.float32, 1) for size in ((2, 3), (3,), (3,))), (
    call("aten::native_batch_norm", Ref(-1), None, None, Ref(-2), Ref(-3), True, 0.1, 1e-5, results=3),
))
"""A schema that does not mention all of its writes."""
_ROWS = Recording((filled((5, 3), torch.float32, 1), torch.tensor([4, 0]), filled((2, 3), torch.float32, 2)), (
    call("aten::index_copy_", Ref(-1), 0, Ref(-2), Ref(-3), results=0),
    call("aten::fill_.Scalar", Ref(-2), 1, results=0),
    call("aten::index_add_", Ref(-1), 0, Ref(-2), Ref(-3), results=0),
    call("aten::sum", Ref(-1)),
))
"""Rows that are written by an index, which is then written itself."""


@law("executor.undone_exactly")
@given(recording=recordings(grouped() + PLAIN + VIEWS + IN_PLACE + RANDOM, favoured=IN_PLACE, max_calls=4))
@example(recording=_VIEWS)
@example(recording=_STATISTICS)
@example(recording=_ROWS)
def test_undone_exactly(subject: Subject, executor: Executor, recording: Recording) -> None:
    """Run programs that can be undone, compare with an ordinary run, and undo them."""
    (part, compiled), = prepare(executor, pieces(recording, [], range(recording.results)))
    if not isinstance(compiled, SupportsUndo) or not compiled.can_undo(list(part.numbers)):
        return
    failed: list[int] = []

    def run(limit_bytes: int | None) -> tuple[list[Any], list[torch.Tensor], Undo | None]:
        inputs = [executor.put(recording.inputs[-1 - index]) for index in part.inputs]
        given, random = list(inputs), executor.random_state(0)

        def report(step: int, _: BaseException) -> Poisoned:
            failed.append(step)
            return Poisoned(1 + step)

        outputs, undo = (compiled.run(given, list(part.numbers), random, report), None) if limit_bytes is None else (
            compiled.run_with_undo((), given, list(part.numbers), random, report, limit_bytes))
        return [bytes_of(executor.get(value)) if isinstance(value, torch.Tensor) else value for value in outputs], (
            inputs), undo

    where = f"{subject}: {recording}"
    outputs, written, _ = run(None)
    failures = list(failed)
    changed = any(bytes_of(executor.get(value)) != bytes_of(recording.inputs[-1 - index])
                  for index, value in zip(part.inputs, written, strict=True))
    for limit_bytes in (2**30, 0):
        failed.clear()
        mine, inputs, undo = run(limit_bytes)
        if limit_bytes:
            expect_equal(repr(mine), repr(outputs), "results of a run that can be undone", where)
            expect_equal(failed, failures, "failures of a run that can be undone", where)
            for value, wanted in zip(inputs, written, strict=True):
                expect_same_tensor(executor.get(value), executor.get(wanted), "an input after that run", where)
        elif changed:
            expect(bool(failed), "writes beyond the limit", got="no failure", wanted="a failure", where=where)
        assert undo is not None
        undo.restore()
        for index, value in zip(part.inputs, inputs, strict=True):
            expect_same_tensor(executor.get(value), recording.inputs[-1 - index], f"input i{index}, undone", where)

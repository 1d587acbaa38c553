"""The law of executors whose programs pause between two steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import example, given

from djinn.wire.messages import Poisoned
from djinn_conformance.assertions import bytes_of, expect_equal
from djinn_conformance.execution import prepare
from djinn_conformance.laws import law
from djinn_conformance.operations import IN_PLACE, PLAIN, RANDOM, VIEWS, grouped
from djinn_conformance.programs import Recording, Ref, call, pieces
from djinn_conformance.strategies import filled, recordings
from djinn_conformance.subjects import Subject
from djinn_plugins.common.kinds.executor import Executor, SupportsPause
from djinn_plugins.executor.pauses import Pause

_WRITES = Recording((filled((2, 3), torch.float32, 1), filled((3,), torch.float32, 2), torch.zeros((2,) * 9)), (
    call("aten::select.int", Ref(-1), 0, 1),
    call("aten::add_.Tensor", Ref(0), Ref(-2), results=0),
    call("aten::bernoulli_.float", Ref(-2), 0.5, results=0),
    call("aten::add_.Tensor", Ref(-1), Ref(-3), results=0),
    call("aten::mul_.Scalar", Ref(-1), 2.0, results=0),
    call("aten::rand_like", Ref(-1)),
))
"""A row that is written through a view, numbers that are drawn in place, a step that raises, and a draw."""


@law("executor.pauses_between_steps")
@given(recording=recordings(grouped() + PLAIN + VIEWS + IN_PLACE + RANDOM, favoured=IN_PLACE + RANDOM, max_calls=5))
@example(recording=_WRITES)
def test_pauses_between_steps(subject: Subject, executor: Executor, recording: Recording) -> None:
    """Pause before every step, interpreted and compiled; compare with a run without pauses, and with its beginnings."""
    where, kept = f"{subject}: {recording}", range(recording.results)
    (part, compiled), = prepare(executor, pieces(recording, [], kept))
    if not (isinstance(compiled, SupportsPause) and compiled.can_pause):
        return
    pausing = compiled

    def bits(value: Any) -> Any:
        return bytes_of(executor.get(value)) if isinstance(value, torch.Tensor) else value

    def run(look: Callable[[list[Any]], None] | None = None) -> str:
        inputs = [executor.put(recording.inputs[-1 - index]) for index in part.inputs]
        random, reported = executor.random_state(0), list[int]()

        def report(step: int, _: BaseException) -> Poisoned:
            reported.append(step)
            return Poisoned(1 + step)

        breaks = [] if look is None else [Pause(lambda: look(inputs))]
        outputs = pausing.run_until(breaks, list(inputs), list(part.numbers), random, report)
        return repr((list(map(bits, outputs)), list(map(bits, inputs)), bits(random.get()), reported))

    def begun(steps: int) -> list[Any]:
        """Return the inputs after the first steps."""
        inputs = {index: executor.put(recording.inputs[-1 - index]) for index in part.inputs}
        (first, program), = prepare(executor, pieces(Recording(recording.inputs, recording.calls[:steps]), [], []))
        program.run([inputs[index] for index in first.inputs], list(first.numbers), executor.random_state(0),
                    lambda step, _: Poisoned(1 + step))
        return list(map(bits, inputs.values()))

    wanted, steps = run(), [begun(count) for count in range(len(recording.calls))]
    for _ in range(2):
        seen: list[list[Any]] = []
        expect_equal(run(lambda inputs: seen.append(list(map(bits, inputs)))), wanted, "a run with pauses", where)  # noqa: B023  # called at once
        expect_equal(seen, steps, "the inputs at each pause", where)

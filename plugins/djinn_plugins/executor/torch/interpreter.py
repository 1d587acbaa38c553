"""Runs a program step by step: the first time, and after an error in a compiled run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from djinn.errors import ProtocolError
from djinn.ir.program import Program
from djinn.ir.schema import facts_of
from djinn.wire.messages import Poisoned
from djinn_plugins.common.calls.arguments import fill
from djinn_plugins.common.calls.binding import BoundCall, results_of
from djinn_plugins.common.calls.checked import poison_sharing
from djinn_plugins.common.calls.results import result_check_of
from djinn_plugins.common.failures import is_out_of_memory
from djinn_plugins.common.kinds.executor import Report
from djinn_plugins.common.operators.operators import operator_named
from djinn_plugins.executor.pauses import reason_to_stop


def interpret(
    program: Program,
    calls: Sequence[BoundCall],
    inputs: list[Any],
    numbers: Sequence[Any],
    report: Report,
    *,
    start: int = 0,
    results: dict[int, Any] | None = None,
    refused: Mapping[int, Exception] | None = None,
    relieve: Callable[[], bool] = lambda: False,
    stop: Sequence[BaseException] = (),
) -> list[Any]:
    """Run the steps from ``start``.

    Args:
        program: A checked program.
        calls: Its bound templates.
        inputs: Values of the inputs; one that a failed step would have written becomes its poison.
        numbers: All lifted numbers, also those of earlier steps.
        report: See `djinn_plugins.common.kinds.executor.CompiledProgram.run`.
        start: First step to run.
        results: Results of the steps before ``start`` that are still needed.
        refused: By position: steps that are not executed, and the errors they raise instead.
        relieve: Called to free memory when there is none; if it succeeds, the step is retried once.
        stop: See `djinn_plugins.common.kinds.executor.SupportsPause`.
    """
    known = {} if results is None else results
    last_use = last_uses(program)
    taken = sum(calls[step.template].numbers for step in program.steps[:start])
    produced = sum(step.results for step in program.steps[:start])
    stopped: Poisoned | None = None
    for position in range(start, len(program.steps)):
        step = program.steps[position]
        call = calls[step.template]
        operands = [known[operand] if operand >= 0 else inputs[-1 - operand] for operand in step.operands]
        mine = numbers[taken : taken + call.numbers]
        taken += call.numbers
        if stop and stopped is None and (reason := reason_to_stop(stop)) is not None:
            stopped = report(position, reason)
        poison = next((operand for operand in operands if isinstance(operand, Poisoned)), None)
        if stopped is not None:
            if facts_of(operator_named(program.templates[step.template].operator)).changes_metadata:
                for written in call.written_operands:
                    poison_sharing(operands[written], stopped, known, inputs)
            outcome = [stopped] * step.results
        elif poison is not None:
            for written in call.written_operands:
                poison_sharing(operands[written], poison, known, inputs)
            outcome = [poison] * step.results
        elif refused and position in refused:
            outcome = [report(position, refused[position])] * step.results
        else:
            operator = program.templates[step.template].operator
            outcome = _call(operator, call, operands, mine, step.results, position, report, relieve)
        for result in outcome:
            known[produced] = result
            produced += 1
        for dead in last_use.get(position, ()):
            known.pop(dead, None)
    return [known[index] for index in program.keep]


def last_uses(program: Program) -> dict[int, list[int]]:
    """Return for each step the results that no later step needs."""
    last: dict[int, int] = {}
    produced = 0
    for position, step in enumerate(program.steps):
        for operand in step.operands:
            if operand >= 0:
                last[operand] = position
        for result in range(produced, produced + step.results):
            last[result] = position
        produced += step.results
    for kept in program.keep:
        last.pop(kept, None)
    by_step: dict[int, list[int]] = {}
    for result, position in last.items():
        by_step.setdefault(position, []).append(result)
    return by_step


def _call(
    operator: str, call: BoundCall, operands: list[Any], numbers: Sequence[Any], expected: int, position: int,
    report: Report, relieve: Callable[[], bool],
) -> list[Any]:
    try:
        arguments, keywords = fill(call.arguments, call.keywords, operands, numbers)
        returned = _called(call, arguments, keywords, relieve)
        # The first run asks it of each call. Later ones ask it of those that the guard checks: others give the same.
        if operator.startswith("aten::") and not call.grows:
            result_check_of(operator)(returned, (*arguments, *keywords.values()))
        results = results_of(call, returned)
        if len(results) != expected:
            raise ProtocolError(f"The step gave {len(results)} results, {expected} were announced.")
    except Exception as error:  # noqa: BLE001  # reported as the step's failure
        # Any error of an operation belongs to that operation's results; independent steps still run.
        return [report(position, error)] * expected
    return results


def _called(
    call: BoundCall, arguments: list[Any], keywords: dict[str, Any], relieve: Callable[[], bool]
) -> Any:
    try:
        return call.function(*arguments, **keywords)
    except RuntimeError as error:
        # An operation that writes or draws random numbers may have taken partial effect.
        if not (call.is_pure and is_out_of_memory(error) and relieve()):
            raise
    return call.function(*arguments, **keywords)

"""Compiles a program to straight-line Python over ATen calls.

The source consists only of this module's own words, indices, and argument names from operator schemas; it contains no
text from outside. One step is one line, so a traceback's line number identifies the step that raised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter_ns
from types import TracebackType
from typing import Any

import attrs
import torch

from djinn.ir.program import ConstantArgument, ListArgument, NumberArgument, Program, TensorArgument
from djinn.ir.schema import ReturnKind
from djinn.wire.messages import Poisoned
from djinn_plugins.common.calls.arguments import Resolved
from djinn_plugins.common.calls.binding import BoundCall
from djinn_plugins.common.failures import is_out_of_memory
from djinn_plugins.common.kinds.executor import Report
from djinn_plugins.executor.pauses import reason_to_stop
from djinn_plugins.executor.torch.growing import CopiedGrowth
from djinn_plugins.executor.torch.interpreter import interpret, last_uses
from djinn_plugins.executor.torch.torchscript import GraphBudget, GraphSegment, segments_of

SEGMENTS_AFTER_RUNS = 32
"""After so many runs, calls from Python have cost about as much as it takes to make graphs."""
SMALL_STEP_NS = 200_000
"""If steps take longer on average, calls from Python are less than a hundredth of it. It also bounds the time for which
a segment delays a cancellation, and what values it keeps that it has read.
"""
_FIRST_STEP_LINE = 3
_FILE = "<djinn program>"


@attrs.frozen
class _Form:
    """A program as a function.

    Attributes:
        function: Takes the inputs, the numbers, and reasons to stop.
        segments: Its segments, by their first step.
    """

    function: Callable[..., list[Any]]
    segments: Mapping[int, GraphSegment] = attrs.field(factory=dict)


class Compiled:
    """A program as one Python function.

    Args:
        program: The program.
        calls: Its bound templates.
        relieve: See `djinn_plugins.executor.torch.interpreter.interpret`.
        graphs: Room for graphs, if PyTorch's interpreter may run segments of programs that run often and have small
            kernels.
        copied: What to run instead while values that could grow are small.
    """

    def __init__(
        self, program: Program, calls: Sequence[BoundCall], relieve: Callable[[], bool] = lambda: False, *,
        graphs: GraphBudget | None = None, copied: CopiedGrowth | None = None,
    ) -> None:
        self._program = program
        self._calls = calls
        self._relieve = relieve
        self._graphs = graphs
        self._copied = copied
        self._trials = 0 if graphs is None else SEGMENTS_AFTER_RUNS
        self._shortest_ns = math.inf
        self._has_graphs = False
        self._plain = _Form(straight_line(program, calls))
        self._with_graphs: dict[bool, _Form] = {}
        """By whether values that could grow are small."""

    def run(
        self, inputs: list[Any], numbers: Sequence[Any], report: Report, stop: Sequence[BaseException] = ()
    ) -> list[Any]:
        """Run once; interpret the rest from the first step that raises or is cancelled."""
        if any(type(value) is Poisoned for value in inputs):
            return interpret(self._program, self._calls, inputs, numbers, report, relieve=self._relieve, stop=stop)
        form = self._chosen(inputs) if self._has_graphs else self._plain
        try:
            return self._tried(inputs, numbers, stop) if self._trials else form.function(inputs, numbers, stop)
        except Exception as error:
            # The interpreter continues after the failed step; it needs that step's position and the results so far.
            frames = frames_of(error.__traceback__)
            if not frames:
                raise
            step, variables = frames[0]
            produced = sum(s.results for s in self._program.steps[:step])
            known = {int(name[1:]): value for name, value in variables.items()
                     if name[0] == "r" and name[1:].isdigit() and int(name[1:]) < produced}
            if step in form.segments and not isinstance(error, _StoppedError):
                return self._segment_again(step, known, inputs, numbers, report, stop)
            return self.resume(step, error, known, inputs, numbers, report, stop)

    def _tried(self, inputs: list[Any], numbers: Sequence[Any], stop: Sequence[BaseException]) -> list[Any]:
        """Run once, and measure whether segments would save anything."""
        began_ns = perf_counter_ns()
        outcome = self._plain.function(inputs, numbers, stop)
        self._shortest_ns = min(self._shortest_ns, perf_counter_ns() - began_ns)
        self._trials -= 1
        steps = len(self._program.steps)
        if (not self._trials and self._shortest_ns < SMALL_STEP_NS * steps and self._graphs is not None
                and self._graphs.take(self, steps if self._copied is None else 2 * steps)):
            self._has_graphs = True
        return outcome

    def _chosen(self, inputs: Sequence[Any]) -> _Form:
        """Return the program with graphs, as it is to run with these inputs."""
        copied = self._copied if self._copied is not None and self._copied.is_enough_for(inputs) else None
        if (copied is not None) not in self._with_graphs:
            program, calls = (self._program, self._calls) if copied is None else (copied.program, copied.calls)
            segments = segments_of(program, calls)
            function = straight_line(program, calls, segments)
            # The interpreter's optimizations would leave out steps whose results nobody reads, though they may raise.
            as_it_is: Any = torch.jit.optimized_execution(False)  # type: ignore[attr-defined]  # missing from its __all__
            self._with_graphs[copied is not None] = _Form(
                as_it_is(function) if segments else function, {segment.first: segment for segment in segments})
        return self._with_graphs[copied is not None]

    def resume(
        self, step: int, error: Exception, known: dict[int, Any], inputs: list[Any], numbers: Sequence[Any],
        report: Report, stop: Sequence[BaseException],
    ) -> list[Any]:
        """Continue after a step that raised, or that was cancelled, with the results that are known."""
        if isinstance(error, _StoppedError):
            return interpret(self._program, self._calls, inputs, numbers, report, start=step, results=known, stop=stop)
        if self._calls[self._program.steps[step].template].is_pure and is_out_of_memory(error) and self._relieve():
            # The step had no effect except its failure.
            return interpret(self._program, self._calls, inputs, numbers, report, start=step, results=known,
                             stop=stop)
        poison = report(step, error)
        failed = self._program.steps[step]
        produced = sum(s.results for s in self._program.steps[:step])
        for index in range(produced, produced + failed.results):
            known[index] = poison
        return interpret(self._program, self._calls, inputs, numbers, report, start=step + 1, results=known,
                         relieve=self._relieve, stop=stop)

    def _segment_again(
        self, step: int, known: dict[int, Any], inputs: list[Any], numbers: Sequence[Any], report: Report,
        stop: Sequence[BaseException],
    ) -> list[Any]:
        """Run a segment that raised step by step, and all that follows. Nothing of it has had an effect."""
        failed: list[int] = []

        def noted(position: int, error: BaseException) -> Poisoned:
            failed.append(position)
            return report(position, error)

        outcome = interpret(self._program, self._calls, inputs, numbers, noted, start=step, results=known,
                            relieve=self._relieve, stop=stop)
        if not failed:
            # The graph is to blame, or there was no memory for a moment.
            self._has_graphs = False
            self._with_graphs.clear()
        return outcome


class _StoppedError(Exception):
    """The rest of the program was cancelled."""


def _halt(stop: Sequence[BaseException]) -> None:
    if reason_to_stop(stop) is not None:
        raise _StoppedError


def frames_of(traceback: TracebackType | None) -> list[tuple[int, dict[str, Any]]]:
    """Return the steps that compiled programs have reached, and their variables; outermost program first."""
    found: list[tuple[int, dict[str, Any]]] = []
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == _FILE:
            found.append((traceback.tb_lineno - _FIRST_STEP_LINE, dict(traceback.tb_frame.f_locals)))
        traceback = traceback.tb_next
    return found


def straight_line(
    program: Program, calls: Sequence[BoundCall], segments: Sequence[GraphSegment] = ()
) -> Callable[..., list[Any]]:
    """Compile a program, with some segments as they are, to a function of its inputs, numbers, and reasons to stop."""
    constants: dict[str, Any] = {"halt": _halt}

    def constant(value: Any, prefix: str) -> str:
        for name, known in constants.items():
            if known is value and name.startswith(prefix):
                return name
        name = f"{prefix}{len(constants)}"
        constants[name] = value
        return name

    functions = [constant(call.function, "f") for call in calls]
    names = [f"i{index}" for index in range(program.inputs)]
    lines = ["def run(inputs, n, stop=()):", f" [{', '.join(names)}] = inputs"]
    dead = last_uses(program)
    begins, after = {segment.first: segment for segment in segments}, 0
    produced = taken = 0
    for position, step in enumerate(program.steps):
        call = calls[step.template]
        results = [f"r{index}" for index in range(produced, produced + step.results)]
        if position in begins:
            after = position + begins[position].steps
            line = _segment_call(begins[position], constant)
            gone = [index for each in range(position, after) for index in dead.get(each, ()) if index < produced]
        elif position < after:
            line, gone = "", []
        else:
            operands = iter([_value_name(operand) for operand in step.operands])
            numbers = iter([f"n[{index}]" for index in range(taken, taken + call.numbers)])
            arguments = [_text(argument, operands, numbers, constant) for argument in call.arguments]
            arguments += [f"{name}={_text(argument, operands, numbers, constant)}" for name, argument in call.keywords]
            line = f"{_targets(call, results)}{functions[step.template]}({', '.join(arguments)})"
            gone = dead.get(position, [])
        # The list is almost always empty, and then this costs only one check.
        parts = [" stop and halt(stop)", line, *(f"r{index} = None" for index in sorted(gone))]
        lines.append("; ".join(parts) if line else "")
        taken += call.numbers
        produced += step.results
    lines.append(f" return [{', '.join(f'r{index}' for index in program.keep)}]")
    namespace: dict[str, Any] = dict(constants)
    exec(compile("\n".join(lines), _FILE, "exec"), namespace)  # noqa: S102  # own words only, see the module docstring
    made: Callable[..., list[Any]] = namespace["run"]
    return made


def _value_name(operand: int) -> str:
    return f"r{operand}" if operand >= 0 else f"i{-1 - operand}"


def _segment_call(segment: GraphSegment, constant: Callable[[Any, str], str]) -> str:
    arguments = [_value_name(meaning) if kind == "operand" else f"n[{meaning}]" if kind == "number" else
                 constant(meaning, "c") for kind, meaning in segment.parameters]
    results = ", ".join(f"r{index}" for index in segment.results)
    targets = results if len(segment.results) == 1 else f"[{results}]"
    return f"{targets} = {constant(segment.function, 'f')}({', '.join(arguments)})"


def _targets(call: BoundCall, results: list[str]) -> str:
    """Return the left side of the assignment, with brackets that unpack lists of the announced length."""
    kinds = call.returns
    if not kinds or all(kind is ReturnKind.WRITTEN for kind in kinds):
        return ""
    fixed = sum(kind not in (ReturnKind.LIST, ReturnKind.WRITTEN) for kind in kinds)
    rest = iter(results)
    parts = []
    for kind in kinds:
        if kind is ReturnKind.LIST:
            parts.append("[" + ", ".join(next(rest) for _ in range(len(results) - fixed)) + "]")
        else:
            parts.append("_" if kind is ReturnKind.WRITTEN else next(rest, "_"))
    return (parts[0] if len(parts) == 1 else f"[{', '.join(parts)}]") + " = "


def _text(
    argument: Any, operands: Iterator[str], numbers: Iterator[str], constant: Callable[[Any, str], str]
) -> str:
    if isinstance(argument, TensorArgument):
        return next(operands)
    if isinstance(argument, NumberArgument):
        return next(numbers)
    if isinstance(argument, ConstantArgument) and not isinstance(argument.value, str):
        return repr(argument.value)
    if isinstance(argument, (ConstantArgument, Resolved)):
        return constant(argument.value, "c")
    if isinstance(argument, ListArgument):
        return "[" + ", ".join(_text(item, operands, numbers, constant) for item in argument.items) + "]"
    raise TypeError(f"unknown argument form {type(argument).__name__}")

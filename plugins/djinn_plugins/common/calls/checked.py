"""Calls that are checked immediately before they are made; and programs of executors that check none themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import attrs
import torch

from djinn.errors import ProtocolError
from djinn.ir.program import Argument, ListArgument, Program, Step, Template, TensorArgument
from djinn.ir.spec import tensors_in
from djinn.wire.messages import Poisoned
from djinn_plugins.common.calls.arguments import fill, resolve
from djinn_plugins.common.calls.results import result_check_of
from djinn_plugins.common.calls.writes import written_handles
from djinn_plugins.common.kinds.executor import CompiledProgram, Executor, RandomState, Report, SupportsStop
from djinn_plugins.common.kinds.guard import CallCheck, Prepared
from djinn_plugins.common.operators.dropout import count_numbers

__all__ = ("CheckedPieces", "checked_call", "poison_sharing")


def checked_call(
    check: CallCheck, args: Sequence[Any], kwargs: Mapping[str, Any], function: Callable[..., Any],
    results: Callable[[Any, Sequence[Any]], None],
) -> Any:
    """Check a call, make it with the arguments that the check wants, check its results, and write copies back.

    Raises:
        Exception: The check refuses the call or its results, or the function raises.
    """
    prepared = check(args, kwargs)
    try:
        if prepared is None:
            returned = function(*args, **kwargs)
            results(returned, (*args, *kwargs.values()))
            return returned
        returned = function(*prepared.args, **prepared.kwargs)
        results(returned, (*args, *kwargs.values()))
        for original, written in prepared.written:
            # An executor may keep its values as inference tensors.
            with torch.inference_mode():
                if original.shape != written.shape:
                    original.resize_(written.shape)
                original.copy_(written)
    except Exception:
        _empty_what_reaches_beyond((*args, *kwargs.values()))
        raise
    return returned


def _empty_what_reaches_beyond(arguments: Sequence[Any]) -> None:
    """Empty tensors that got a size without memory for it, or one that there cannot be: PyTorch leaves them with it."""
    for tensor in tensors_in(arguments):
        if tensor.layout is torch.strided and (tensor.numel() or min(tensor.shape, default=0) < 0):
            last = sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True))
            reach = (tensor.storage_offset() + last + 1) * tensor.element_size()
            if reach > tensor.untyped_storage().nbytes() or min(tensor.shape, default=0) < 0:
                with torch.inference_mode():
                    tensor.resize_(0)


def poison_sharing(written: Any, poison: Poisoned, known: dict[int, Any], inputs: list[Any]) -> None:
    """Poison a tensor that was not written, and all other values that would have seen the write."""
    if not isinstance(written, torch.Tensor):
        return
    storage = written.untyped_storage()._cdata
    for index, value in known.items():
        if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata == storage:
            known[index] = poison
    for index, value in enumerate(inputs):
        if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata == storage:
            inputs[index] = poison


@attrs.frozen
class _Piece:
    """Steps of a program that the executor runs as one program.

    Attributes:
        program: They, as a program.
        compiled: What the executor made of it.
        operands: For each of its inputs: the whole program's number of the value.
        results: For each result that it keeps: the whole program's number of it.
        first: Position of its first step.
        numbers: Which of a run's numbers it takes.
        check: The check before its only call, if there is one.
        dead: Results that no later piece needs.
    """

    program: Program
    compiled: CompiledProgram
    operands: tuple[int, ...]
    results: tuple[int, ...]
    first: int
    numbers: slice
    check: CallCheck | None
    dead: tuple[int, ...]


class CheckedPieces:
    """A program whose calls are checked between its pieces, for an executor that does not check calls itself.

    A step whose call is checked is a piece, and so are the steps between two of these. The executor is given the very
    arguments that were checked.

    Args:
        executor: Compiles and runs the pieces.
        program: A program whose indices were checked.
        checks: By template: the check before each of its calls.

    Raises:
        UnknownOperatorError, SchemaMismatchError, ProtocolError: An operator cannot be run here.

    Concurrency:
        One thread at a time.
    """

    def __init__(self, executor: Executor, program: Program, checks: Mapping[int, CallCheck]) -> None:
        self._executor = executor
        self._device = torch.device(executor.device)
        self._program = program
        self._checks = checks
        self._known: dict[Program, CompiledProgram] = {}
        self._pieces = self._cut()
        self._numbers = self._pieces[-1].numbers.stop if self._pieces else 0

    def run(self, inputs: list[Any], numbers: Sequence[Any], random: RandomState, report: Report) -> list[Any]:
        """Run once; see `djinn_plugins.common.kinds.executor.CompiledProgram`."""
        return self.run_until((), inputs, numbers, random, report)

    def run_until(
        self, stop: Sequence[BaseException], inputs: list[Any], numbers: Sequence[Any], random: RandomState,
        report: Report,
    ) -> list[Any]:
        """Run once, or the first pieces of it; see `djinn_plugins.common.kinds.executor.SupportsStop`."""
        if len(numbers) != self._numbers:
            raise ProtocolError(f"The program takes {self._numbers} numbers, the run brings {len(numbers)}.")
        known: dict[int, Any] = {}
        stopped: Poisoned | None = None
        for piece in self._pieces:
            operands = [known[operand] if operand >= 0 else inputs[-1 - operand] for operand in piece.operands]
            given = list(operands)
            if stop and stopped is None:
                stopped = report(piece.first, stop[0])
            if stopped is not None:
                outcome: list[Any] = [stopped] * len(piece.results)
                for position in written_handles(piece.program, range(len(operands)), metadata=True):
                    operands[position] = stopped
            else:
                outcome = self._outcome(piece, operands, numbers[piece.numbers], random, report, stop)
            known.update(zip(piece.results, outcome, strict=True))
            for before, after in zip(given, operands, strict=True):
                if isinstance(after, Poisoned) and after is not before:
                    poison_sharing(before, after, known, inputs)
            for dead in piece.dead:
                del known[dead]
        return [known[index] for index in self._program.keep]

    def _outcome(
        self, piece: _Piece, operands: list[Any], numbers: Sequence[Any], random: RandomState, report: Report,
        stop: Sequence[BaseException],
    ) -> list[Any]:
        def reported(step: int, error: BaseException) -> Poisoned:
            return report(piece.first + step, error)

        if piece.check is None or any(isinstance(operand, Poisoned) for operand in operands):
            # A step with a poisoned operand is skipped, and so is its check.
            if isinstance(piece.compiled, SupportsStop):
                return piece.compiled.run_until(stop, operands, numbers, random, reported)
            return piece.compiled.run(operands, numbers, random, reported)
        try:
            return self._checked(piece, piece.check, operands, numbers, random)
        except Exception as error:  # noqa: BLE001  # reported as the step's failure
            return [reported(0, error)] * len(piece.results)

    def _checked(
        self, piece: _Piece, check: CallCheck, operands: list[Any], numbers: Sequence[Any], random: RandomState
    ) -> list[Any]:
        """Check the call of a piece, and run the piece with the arguments that were checked."""
        template = piece.program.templates[0]

        def checked(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Prepared | None:
            with torch.inference_mode(mode=False), torch.no_grad():
                return check(args, kwargs)

        def run(*args: Any, **kwargs: Any) -> list[Any]:
            errors: list[BaseException] = []

            def keep(_: int, error: BaseException) -> Poisoned:
                errors.append(error)
                return Poisoned(0)

            given = [operand for form, value in zip(_forms(template), (*args, *kwargs.values()), strict=True)
                     for operand in _operands_in(form, value)]
            outcome = piece.compiled.run(given, numbers, random, keep)
            if errors:
                raise errors[0]
            return outcome

        args, kwargs = fill([resolve(form, self._device) for form in template.arguments],
                            [(name, resolve(form, self._device)) for name, form in template.keywords],
                            operands, numbers)
        made: list[Any] = checked_call(checked, args, kwargs, run, result_check_of(template.operator).of_values)
        return made

    def _cut(self) -> list[_Piece]:
        program = self._program
        alone = {position for position, step in enumerate(program.steps) if step.template in self._checks}
        last: dict[int, int] = {}
        firsts, produced = [], 0
        for position, step in enumerate(program.steps):
            last.update((operand, position) for operand in step.operands)
            firsts.append(produced)
            produced += step.results
        last.update((index, len(program.steps)) for index in program.keep)
        borders = sorted({0, len(program.steps), *alone, *(position + 1 for position in alone)})
        pieces: list[_Piece] = []
        taken = 0
        for begin, end in pairwise(borders):
            steps = program.steps[begin:end]
            own = range(firsts[begin], firsts[begin] + sum(step.results for step in steps))
            outside = [operand for step in steps for operand in step.operands if operand not in own]
            if begin not in alone:
                outside = list(dict.fromkeys(outside))
            keep = tuple(index for index in own if last.get(index, -1) >= end)
            made = _program_of(program, steps, own, outside, keep, is_alone=begin in alone)
            count = sum(count_numbers(form) for step in steps for form in _forms(program.templates[step.template]))
            check = self._checks.get(steps[0].template) if begin in alone else None
            dead = {operand for operand in outside if operand >= 0 and last[operand] < end}
            pieces.append(_Piece(made, self._compiled(made), tuple(outside), keep, begin, slice(taken, taken + count),
                                 check, tuple(dead)))
            taken += count
        return pieces

    def _compiled(self, program: Program) -> CompiledProgram:
        if program not in self._known:
            self._known[program] = self._executor.compile(program)
        return self._known[program]


def _program_of(
    whole: Program, steps: Sequence[Step], own: range, outside: Sequence[int], keep: Sequence[int], *, is_alone: bool
) -> Program:
    """Return some steps as a program.

    Args:
        whole: The program that has them.
        steps: The steps.
        own: Their results, as the whole program numbers them.
        outside: The values from outside, as the whole program numbers them.
        keep: The results to keep.
        is_alone: Whether it is one step, whose operands are the inputs in their order. Such programs are alike if their
            calls are, whatever the operands.
    """
    used = list(dict.fromkeys(step.template for step in steps))
    templates = {template: index for index, template in enumerate(used)}
    inputs = {operand: -1 - index for index, operand in enumerate(outside)}
    made = tuple(Step(
        templates[step.template],
        tuple(range(-1, -1 - len(step.operands), -1)) if is_alone else tuple(
            operand - own.start if operand in own else inputs[operand] for operand in step.operands),
        step.results) for step in steps)
    return Program(tuple(whole.templates[template] for template in used), made, len(outside),
                   tuple(index - own.start for index in keep))


def _forms(template: Template) -> tuple[Argument, ...]:
    return (*template.arguments, *(form for _, form in template.keywords))


def _operands_in(form: Argument, value: Any) -> Iterator[Any]:
    """Yield the operands in an argument, in the order in which they fill its form."""
    if isinstance(form, TensorArgument):
        yield value
    elif isinstance(form, ListArgument):
        for item, member in zip(form.items, value, strict=True):
            yield from _operands_in(item, member)

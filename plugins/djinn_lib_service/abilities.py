"""What a session makes use of where it is there: abilities of executors and of their programs, and an allowance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from djinn.ir.program import Program
from djinn.kinds.executor import CompiledProgram, RandomState, Report
from djinn.kinds.guard import CallCheck


@runtime_checkable
class SharingExecutor(Protocol):
    """What an executor may have beside the methods of `Executor`: ways without the copy, where memory can be shared."""

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Put a CPU tensor on the device.

        Ownership:
            Nobody else holds the argument: it may become the value.
        """

    def lend(self, value: torch.Tensor) -> torch.Tensor:
        """Give a dense CPU tensor of a value.

        Ownership:
            The result is only read, and only until the session's next batch: it may share the value's memory.
        """


@runtime_checkable
class EarlyProgram(CompiledProgram, Protocol):
    """What a compiled program may have beside the methods of `CompiledProgram`: it may run before it is asked for."""

    def is_pure(self, numbers: Sequence[Any]) -> bool:
        """Whether all that comes of a run with these numbers are its results.

        Laws:
            executor.purity_true
        """


class Turns(Protocol):
    """When a session may use the device."""

    def begin(self) -> None:
        """Wait until a program may run.

        Raises:
            LimitError: Too many wait already.
            TransportError: None will run any more.
        """

    def end(self) -> None:
        """The program is through; called once after each `begin` that has returned."""


class Allowance(Protocol):
    """How much a session may ask for."""

    def admit_program(self, program: Program) -> None:
        """Let a program in before it is compiled.

        Raises:
            LimitError: It is too large.
        """

    def admit_values(self, held: int, more: int) -> None:
        """Let a session that holds so many values hold more.

        Raises:
            LimitError: These are too many. Then they do not come about, and whoever asks for them is told so.
        """


@runtime_checkable
class CheckingExecutor(Protocol):
    """What an executor may have beside the methods of `Executor`: it asks before it makes a call."""

    def compile_checked(self, program: Program, checks: Mapping[int, CallCheck]) -> CompiledProgram:
        """Prepare a checked program, as `Executor.compile` does.

        Args:
            program: The program.
            checks: By template: to be called with the arguments of each of its calls right before the call; if that
                raises, so has the step.
        """


@runtime_checkable
class SettlingExecutor(Protocol):
    """What an executor may have beside the methods of `Executor`: one can wait for its device."""

    def settle(self) -> None:
        """Wait until the device is through with everything that was begun.

        Concurrency:
            Any thread.
        """


@runtime_checkable
class LosableExecutor(Protocol):
    """What an executor may have beside the methods of `Executor`: its device can be lost to its process."""

    def loss(self) -> str:
        """Say why the device can compute nothing any more in this process; empty if it can.

        Concurrency:
            Any thread. It is asked after each batch, so it waits for nothing.
        """


@runtime_checkable
class PartialProgram(CompiledProgram, Protocol):
    """What a compiled program may have beside the methods of `CompiledProgram`: it may run but for some steps."""

    def run_without(
        self, inputs: list[Any], numbers: Sequence[Any], random: RandomState, report: Report,
        refused: Mapping[int, Exception], stop: Sequence[BaseException] = (),
    ) -> list[Any]:
        """Run once as `CompiledProgram.run` does, as if some steps had raised.

        Args:
            inputs: As for `CompiledProgram.run`, like the next three.
            numbers: The lifted numbers.
            random: The session's random numbers.
            report: Called for a step that raises.
            refused: By position: the steps that are not made, and what they raise instead.
            stop: See `StoppableProgram`.
        """


@runtime_checkable
class StoppableProgram(CompiledProgram, Protocol):
    """What a compiled program may have beside the methods of `CompiledProgram`: it may end between two steps."""

    def run_until(
        self, stop: Sequence[BaseException], inputs: list[Any], numbers: Sequence[Any], random: RandomState,
        report: Report,
    ) -> list[Any]:
        """Run once as `CompiledProgram.run` does, but for the steps that have not begun when there is a reason to stop.

        These are not made: their results carry the poison of one failure, and what they would have written stays as it
        was, unless they would have changed its metadata. Then it is poisoned.

        Args:
            stop: Empty at first, or for ever. Any thread may add the reason while the program runs.
            inputs: As for `CompiledProgram.run`, like the rest.
            numbers: The lifted numbers.
            random: The session's random numbers.
            report: Called for a step that raises.

        Laws:
            executor.stops_between_steps
        """

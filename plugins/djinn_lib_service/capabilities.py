"""Interfaces that a session may use: optional abilities of executors and programs, turns and an allowance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from djinn.ir.program import Program
from djinn_lib_service.kinds.executor import CompiledProgram, RandomState, Report
from djinn_lib_service.kinds.guard import CallCheck


@runtime_checkable
class SupportsSharing(Protocol):
    """Optional methods of an `Executor` that avoid copies where memory can be shared."""

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Put a CPU tensor on the device.

        Ownership:
            The caller gives up the argument: the executor may use it as the value.
        """

    def lend(self, value: torch.Tensor) -> torch.Tensor:
        """Return a dense CPU tensor with the content of a value.

        Ownership:
            The caller only reads the result, and only until the session's next batch: it may share the value's memory.
        """


@runtime_checkable
class SupportsSpeculation(CompiledProgram, Protocol):
    """Optional method of a `CompiledProgram` that may run before the client requests it."""

    def is_pure(self, numbers: Sequence[Any]) -> bool:
        """Whether a run with these numbers has no effect except its results.

        Laws:
            executor.purity_true
        """


class Turns(Protocol):
    """Controls when a session may use the device."""

    def begin(self) -> None:
        """Wait until a program may run.

        Raises:
            LimitError: Too many sessions are waiting already.
            TransportError: No more programs will run.
        """

    def end(self) -> None:
        """Mark the program as finished; called once after each `begin` that has returned."""


class Allowance(Protocol):
    """Limits what a session may request."""

    def admit_program(self, program: Program) -> None:
        """Admit a program before it is compiled.

        Raises:
            LimitError: The program is too large.
        """

    def admit_values(self, held: int, more: int) -> None:
        """Admit ``more`` values to a session that holds ``held`` values.

        Raises:
            LimitError: The session would hold too many values. They are not created, and commands that use them fail.
        """


@runtime_checkable
class SupportsCheckedCompile(Protocol):
    """Optional method of an `Executor` that checks calls before it makes them."""

    def compile_checked(self, program: Program, checks: Mapping[int, CallCheck]) -> CompiledProgram:
        """Prepare a checked program, as `Executor.compile` does.

        Args:
            program: The program.
            checks: By template: called with the arguments of each call immediately before the call. If a check raises,
                the step fails.
        """


@runtime_checkable
class SupportsSettling(Protocol):
    """Optional method of an `Executor` that waits for the device."""

    def settle(self) -> None:
        """Wait until the device has finished all work submitted so far.

        Concurrency:
            Any thread.
        """


@runtime_checkable
class SupportsDeviceLoss(Protocol):
    """Optional method of an `Executor` whose process can lose the device."""

    def loss(self) -> str:
        """Say why the device is no longer usable in this process; empty if it is usable.

        Concurrency:
            Any thread. The server calls it after each batch, so it must not block.
        """


@runtime_checkable
class SupportsSkippedSteps(CompiledProgram, Protocol):
    """Optional method of a `CompiledProgram` that can run without some of its steps."""

    def run_without(
        self, inputs: list[Any], numbers: Sequence[Any], random: RandomState, report: Report,
        refused: Mapping[int, Exception], stop: Sequence[BaseException] = (),
    ) -> list[Any]:
        """Run once as `CompiledProgram.run` does, but treat some steps as if they had raised.

        Args:
            inputs: As for `CompiledProgram.run`, like the next three arguments.
            numbers: The lifted numbers.
            random: The session's random numbers.
            report: Called for a step that raises.
            refused: By position: the steps to leave out, and the exception that each raises instead.
            stop: See `SupportsStop`.
        """


@runtime_checkable
class SupportsStop(CompiledProgram, Protocol):
    """Optional method of a `CompiledProgram` that can stop between two steps."""

    def run_until(
        self, stop: Sequence[BaseException], inputs: list[Any], numbers: Sequence[Any], random: RandomState,
        report: Report,
    ) -> list[Any]:
        """Run once as `CompiledProgram.run` does, but start no further step once there is a reason to stop.

        The remaining steps are skipped. Their results carry the poison of one failure. Values that they would have
        written in place stay unchanged; only a value whose metadata they would have changed is poisoned.

        Args:
            stop: Empty as long as the program should run. Any thread may add the reason to stop while the program runs.
            inputs: As for `CompiledProgram.run`, like the remaining arguments.
            numbers: The lifted numbers.
            random: The session's random numbers.
            report: Called for a step that raises.

        Laws:
            executor.stops_between_steps
        """

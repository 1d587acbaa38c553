"""Guards check the programs of untrusted clients before they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import attrs
import torch

from djinn.ir.program import Program
from djinn.kinds.shapes import ShapeInference


@attrs.frozen
class Prepared:
    """Replacement arguments for a call.

    Attributes:
        args: Arguments by position.
        kwargs: Arguments by name.
        written: Pairs of an argument that the call would have written, and the copy that it writes instead. The copy is
            written back after the call.
    """

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    written: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()


CallCheck: TypeAlias = Callable[[Sequence[Any], Mapping[str, Any]], Prepared | None]
"""Checks the arguments of one call immediately before it is made. It raises if the call must not be made, and returns
replacements if it must not be made with these arguments, for example copies with the memory layout that the kernel
assumes.
"""


@attrs.frozen
class Bounds:
    """Limits for the programs of one session.

    Attributes:
        device: Device that runs them, in PyTorch's notation.
        program_bytes: How many bytes one run may hold at a time in addition to its inputs; 0 for no limit.
        namespaces: Namespaces of operators, in addition to PyTorch's own, that the server's operator allows.
    """

    device: str = "cpu"
    program_bytes: int = 0
    namespaces: frozenset[str] = frozenset()


class CheckedProgram(Protocol):
    """A program that may run, subject to conditions."""

    calls: Mapping[int, CallCheck]
    """By template: the check to run before each of its calls.

    Laws:
        guard.refuses_lies, guard.refuses_overlap, guard.stays_inside, guard.accepts_eager
    """

    def refused(self, inputs: Sequence[Any], numbers: Sequence[Any]) -> Mapping[int, Exception]:
        """Return by position which steps of a run must not be made, and why; steps that depend on them are left out.

        Args:
            inputs: One value per program input: a tensor, a plain result, or poison. Read only.
            numbers: The lifted numbers of the run.

        Raises:
            ProtocolError: A lifted number has the wrong type.

        Laws:
            guard.bounds_memory, guard.accepts_eager, guard.changes_nothing
        """


@runtime_checkable
class SupportsSizing(CheckedProgram, Protocol):
    """Optional members of a `CheckedProgram` that report how much memory a run takes."""

    taken_bytes: int
    """Most bytes that the last checked run holds at a time in addition to its inputs; 0 if unknown."""

    def measure(self, inputs: Sequence[Any], numbers: Sequence[Any]) -> int:
        """Return the same for a run, more precisely, by going through it step by step."""


class ProgramChecker(Protocol):
    """A guard for one session.

    Concurrency:
        One thread at a time.
    """

    def check(self, program: Program) -> CheckedProgram:
        """Check a program whose indices are valid.

        Raises:
            UnknownOperatorError: It calls an operator that is forbidden or does not exist.
            ProtocolError: A call does not fit its operator's schema, or the program is larger than any client's.

        Laws:
            guard.refuses_files, guard.refuses_pointers, guard.refuses_misfits, guard.refuses_lies, guard.accepts_eager
        """


class Guard(Protocol):
    """Checks programs."""

    name: str
    """Name in the configuration."""

    def watch(self, bounds: Bounds, shapes: ShapeInference) -> ProgramChecker:
        """Create the guard of a new session.

        Args:
            bounds: Limits for its programs.
            shapes: Infers the metadata of results, to determine how much memory they take.
        """


@runtime_checkable
class SupportsPreparation(Guard, Protocol):
    """Optional method of a `Guard`."""

    def prepare(self) -> None:
        """Do slow one-time initialization now, so that processes forked later need not repeat it."""

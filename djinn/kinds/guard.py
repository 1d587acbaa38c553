"""Guards look at what clients that nobody trusts want to run, before it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import attrs
import torch

from djinn.ir.program import Program
from djinn.kinds.shapes import ShapeInference


@attrs.frozen
class Prepared:
    """What a call is made with instead of what it was to be made with.

    Attributes:
        args: Arguments by position.
        kwargs: Arguments by name.
        written: What the call would have written, each with what it writes now. That is copied back when it is made.
    """

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    written: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()


CallCheck: TypeAlias = Callable[[Sequence[Any], Mapping[str, Any]], Prepared | None]
"""Looks at the arguments of one call right before it is made. It raises if the call must not be made, and returns
others if it must not be made with these, such as copies that lie in memory as the kernel believes."""


@attrs.frozen
class Bounds:
    """What the programs of one session may do.

    Attributes:
        device: Device that runs them, in PyTorch's words.
        program_bytes: What one run may hold at a time beside its inputs; 0 for no bound.
        namespaces: Namespaces of operators, beside PyTorch's own, that whoever runs the server lets in.
    """

    device: str = "cpu"
    program_bytes: int = 0
    namespaces: frozenset[str] = frozenset()


class CheckedProgram(Protocol):
    """A program that may run, under conditions."""

    calls: Mapping[int, CallCheck]
    """By template: what must be asked before each of its calls.

    Laws:
        guard.refuses_lies, guard.refuses_overlap, guard.stays_inside, guard.accepts_eager
    """

    def refused(self, inputs: Sequence[Any], numbers: Sequence[Any]) -> Mapping[int, Exception]:
        """Say which steps of a run must not be made, by position, and why; what depends on them is not counted.

        Args:
            inputs: One value per program input: a tensor, a plain result, or poison. Read only.
            numbers: The lifted numbers of the run.

        Raises:
            ProtocolError: A number is none.

        Laws:
            guard.bounds_memory, guard.accepts_eager, guard.changes_nothing
        """


@runtime_checkable
class SizingProgram(CheckedProgram, Protocol):
    """What a checked program may have beside: it says how much memory a run takes."""

    taken_bytes: int
    """What the run that was asked about last holds at a time beside its inputs, at most; 0 if that is not known."""

    def measure(self, inputs: Sequence[Any], numbers: Sequence[Any]) -> int:
        """Say the same of a run, more closely: go through it step by step."""


class Watch(Protocol):
    """A guard at one session.

    Concurrency:
        One thread at a time.
    """

    def check(self, program: Program) -> CheckedProgram:
        """Look at a program whose indices are right.

        Raises:
            UnknownOperatorError: It calls what must not be called, or what does not exist.
            ProtocolError: A call does not fit its operator's schema, or the program is larger than any client's.

        Laws:
            guard.refuses_files, guard.refuses_pointers, guard.refuses_misfits, guard.refuses_lies,
            guard.accepts_eager
        """


class Guard(Protocol):
    """Checks programs."""

    name: str
    """Name in the configuration."""

    def watch(self, bounds: Bounds, shapes: ShapeInference) -> Watch:
        """Take up watch at a new session.

        Args:
            bounds: What its programs may do.
            shapes: Infers the metadata of results, to tell how much memory they take.
        """


@runtime_checkable
class PreparedGuard(Guard, Protocol):
    """What a guard may have beside the methods of `Guard`."""

    def prepare(self) -> None:
        """Do now what takes long the first time in a process: processes that are forked off have it done."""

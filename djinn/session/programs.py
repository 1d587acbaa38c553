"""Converts a piece of tape to a program: canonical, position-independent, identified by its structure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from djinn.ir.phase import ExecutionPhase
from djinn.ir.program import Program, ProgramLayout, Step, Template
from djinn.ir.tape import Node
from djinn.ir.value import Slot
from djinn.wire.messages import Command, Define, Forget, Run, to_wire

MAX_PROGRAMS = 2048
"""Most programs that a session keeps; the least recently used are evicted, here and at the executor."""

MAX_SILENT = 16
"""After this many pieces in a row that do not reveal their phase, the phase is assumed to be a new one."""


@attrs.define(eq=False)
class KnownProgram:
    """A program that the executor knows."""

    number: int
    program: Program
    order: tuple[int, ...] | None
    """The scheduler's order of the nodes, if it differs from program order."""
    telling: tuple[int, ...]
    """Positions of nodes that may reveal the program's phase."""


def lay_out(nodes: Sequence[Node], released: set[int]) -> ProgramLayout:
    """Separate structure from handles and numbers. Neither shapes nor numbers are part of the structure."""
    operands: dict[Slot, int] = {}
    key: list[int] = []
    inputs: list[int] = []
    numbers: list[Any] = []
    keep: list[int] = []
    outputs: list[int] = []
    produced = 0
    for node in nodes:
        key.append(node.signature.template_number)
        for slot in node.inputs:
            operand = operands.get(slot)
            if operand is None:
                inputs.append(slot.number)
                operand = operands[slot] = -len(inputs)
            key.append(operand)
        numbers += node.numbers
        for slot in node.outputs:
            operands[slot] = produced
            if slot.number not in released:
                keep.append(produced)
                outputs.append(slot.number)
            produced += 1
        key.append(produced)
    key += keep
    return ProgramLayout(tuple(key), tuple(inputs), to_wire(numbers), tuple(keep), tuple(outputs))


def program_of(nodes: Sequence[Node], layout: ProgramLayout) -> Program:
    """Convert a layout to a program."""
    templates: dict[int, int] = {}
    bodies: list[Template] = []
    steps: list[Step] = []
    operands: dict[Slot, int] = {}
    inputs = produced = 0
    for node in nodes:
        signature = node.signature
        if signature.template_number not in templates:
            templates[signature.template_number] = len(bodies)
            bodies.append(signature.template)
        for slot in node.inputs:
            if slot not in operands:
                inputs += 1
                operands[slot] = -inputs
        steps.append(Step(templates[signature.template_number], tuple(operands[s] for s in node.inputs),
                          len(node.outputs)))
        for slot in node.outputs:
            operands[slot] = produced
            produced += 1
    return Program(tuple(bodies), tuple(steps), inputs, layout.keep)


class ProgramTable:
    """The programs of a session, looked up by structure.

    Args:
        arrange: Called once per new program for the order of its nodes; ``None``, or its answer ``None``, means program
            order.
    """

    def __init__(self, arrange: Callable[[Sequence[Node]], Sequence[int] | None] | None) -> None:
        self._arrange = arrange
        self._known: OrderedDict[tuple[int, ...], KnownProgram] = OrderedDict()
        self._last = 0
        self._phase = self._phase_told = ExecutionPhase.UNKNOWN
        self._silent = 0

    def __len__(self) -> int:
        return len(self._known)

    @property
    def defined(self) -> int:
        """How many programs have been sent."""
        return self._last

    def new_phase(self) -> ExecutionPhase | None:
        """Return the phase of the latest programs, as far as they revealed it; ``None`` if it was returned before.

        Pieces that reveal nothing are assumed to belong to the same phase as the pieces before them.
        """
        before, self._phase_told = self._phase_told, self._phase
        return None if self._phase is before else self._phase

    def commands(
        self, nodes: Sequence[Node], released: set[int], layout: ProgramLayout | None = None, freed: Sequence[int] = ()
    ) -> tuple[list[Command], Sequence[Node], ProgramLayout]:
        """Create the commands that run a piece of tape.

        Args:
            nodes: The piece.
            released: Numbers of results that are released at once.
            layout: The result of `lay_out` for them, if known.
            freed: Numbers of older values to free once the piece has run.

        Returns:
            The commands; the nodes in the order in which they run; the layout.
        """
        layout = layout or lay_out(nodes, released)
        key, commands = layout.key, list[Command]()
        known = self._known.get(key)
        order = known.order if known else self._arrange and self._arrange(nodes)
        if order is not None:
            nodes = [nodes[index] for index in order]
            layout = lay_out(nodes, released)
        if known is None:
            self._last += 1
            known = KnownProgram(self._last, program_of(nodes, layout), None if order is None else tuple(order),
                                 tuple(index for index, node in enumerate(nodes) if node.signature.phase is not None))
            self._known[key] = known
            commands.append(Define(known.number, known.program))
            if len(self._known) > MAX_PROGRAMS:
                commands.append(Forget((self._known.popitem(last=False)[1].number,)))
        self._known.move_to_end(key)
        self._silent = 0 if known.telling else self._silent + 1
        if self._silent > MAX_SILENT:
            self._phase = ExecutionPhase.UNKNOWN
        for index in known.telling:
            self._phase = nodes[index].signature.phase or ExecutionPhase.UNKNOWN
            if self._phase is not ExecutionPhase.UNKNOWN:
                break
        run = Run(known.number, layout.inputs, layout.numbers, layout.outputs, tuple(freed))
        return [*commands, run], nodes, layout

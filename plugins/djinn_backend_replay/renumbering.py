"""Pieces of tape that are run again and again, as the journal has to know them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from djinn.ir.tape import Node
from djinn.ir.value import Slot
from djinn_backend_replay.journal import Journal


def repeated(
    nodes: Sequence[Node], released: set[int], numbers: Iterator[int], journal: Journal
) -> tuple[list[Node], list[int]]:
    """Write one run of a piece down with slots of its own.

    The slots of a piece carry other numbers in each run, storages of the recording, and inside the piece the same
    numbers always; a journal needs what holds in this run.

    Args:
        nodes: The piece.
        released: Numbers of its results that nobody wants.
        numbers: Gives numbers to these.
        journal: Knows the storages of what is read.

    Returns:
        The operations, and the numbers of what nobody names behind them.
    """
    made: dict[Slot, Slot] = {}
    gone: list[int] = []

    def read(slot: Slot) -> Slot:
        if slot not in made:
            made[slot] = journal.live.get(slot.number) or Slot(slot.number, slot.number)
        return made[slot]

    def give(slot: Slot, alias: int, inputs: Sequence[Slot]) -> Slot:
        number = slot.number
        if number in released:
            number = next(numbers)
            gone.append(number)
        storage = inputs[alias].storage if alias >= 0 else number
        made[slot] = Slot(number, storage)
        if storage != number and slot.number not in released:
            # Whoever holds the value takes it for the owner of its storage.
            journal.merge(number, storage)
        return made[slot]

    own: list[Node] = []
    for node in nodes:
        inputs = tuple(map(read, node.inputs))
        outputs = tuple(give(slot, alias, inputs)
                        for slot, alias in zip(node.outputs, node.signature.aliases, strict=True))
        own.append(Node(node.signature, inputs, outputs, tuple(node.numbers), node.origin))
    return own, gone

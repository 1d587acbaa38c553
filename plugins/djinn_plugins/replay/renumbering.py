"""Records repeated runs of a piece of tape in the journal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from djinn.ir.tape import Node
from djinn.ir.value import Slot
from djinn_plugins.replay.journal import Journal


def repeated(
    nodes: Sequence[Node], released: set[int], numbers: Iterator[int], journal: Journal
) -> tuple[list[Node], list[int]]:
    """Copy one run of a piece, with new slots.

    The slots of a piece refer to different values in each run, to storages of the recording, and inside the piece
    always to the same numbers. A journal needs the values and storages of this particular run.

    Args:
        nodes: The piece.
        released: Numbers of results that are released at once.
        numbers: Provides numbers for these results.
        journal: Knows the storages of the inputs.

    Returns:
        The operations, and the numbers of the values that are no longer used after them.
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
            # The holder of the value treats it as the owner of its storage.
            journal.merge(number, storage)
        return made[slot]

    own: list[Node] = []
    for node in nodes:
        inputs = tuple(map(read, node.inputs))
        outputs = tuple(give(slot, alias, inputs)
                        for slot, alias in zip(node.outputs, node.signature.aliases, strict=True))
        own.append(Node(node.signature, inputs, outputs, tuple(node.numbers), node.origin))
    return own, gone

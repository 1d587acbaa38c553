"""What could not be made again, and what depends on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from djinn.errors import StateLostError
from djinn.ir.tape import Node
from djinn.ir.value import Slot
from djinn.wire.messages import GENERATOR_HANDLE
from djinn_backend_replay.entries import GENERATOR
from djinn_backend_replay.journal import Journal


class Losses:
    """Keeps the books of storages whose contents are lost, and finds out what depends on them.

    Args:
        journal: Knows which storage is whose.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._why: dict[int, str] = {}
        self._absent: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._why or self._absent)

    def __len__(self) -> int:
        return len(self._absent)

    def lose(self, number: int, why: str) -> None:
        """Learn that a value, or with `GENERATOR` the random numbers, could not be made again."""
        self._why[GENERATOR if number == GENERATOR_HANDLE else self._journal.storage_of(Slot(number, number))] = why
        if number != GENERATOR_HANDLE:
            self._absent.add(number)

    def restore(self, number: int, made: Iterable[int] = ()) -> None:
        """Learn that a storage, or the random numbers, are known again, and with them values."""
        if not self._journal.is_merged(number):
            self._why.pop(GENERATOR if number == GENERATOR_HANDLE else number, None)
        self._absent.difference_update(made)

    def allows(self, node: Node) -> bool:
        """Tell whether an operation can be carried out; if not, what comes of it is lost as well."""
        if not self._why:
            return True
        storage_of, signature = self._journal.storage_of, node.signature
        why = next((self._why[storage] for slot in node.inputs if (storage := storage_of(slot)) in self._why), None)
        if why is None and signature.is_random:
            why = self._why.get(GENERATOR)
        if why is None:
            return True
        for slot in node.outputs:
            self._absent.add(slot.number)
            self._why[storage_of(slot)] = why
        for index in signature.writes:
            self._why[storage_of(node.inputs[index])] = why
        if signature.is_random:
            self._why[GENERATOR] = why
        return False

    def present(self, numbers: Iterable[int]) -> list[int]:
        """Leave out of values that are freed those that no executor has."""
        kept = [number for number in numbers if number not in self._absent]
        self._absent.difference_update(numbers)
        return kept

    def check(self, slots: Sequence[Slot]) -> None:
        """Check that values are known.

        Raises:
            StateLostError: One is lost; names it and says why.
        """
        for slot in slots:
            is_state = slot.number == GENERATOR_HANDLE
            why = self._why.get(GENERATOR if is_state else self._journal.storage_of(slot))
            if why is None:
                continue
            if is_state:
                raise StateLostError(f"The state of the random numbers was lost with the server: {why}.",
                                     hint="Seed them again.")
            spec = self._journal.spec_of(slot.number)
            form = "A value" if spec is None else f"A tensor of {tuple(spec.size)} and {spec.dtype}"
            raise StateLostError(f"{form} (value {slot.number}) was lost with the server: {why}.",
                                 hint="Compute it again from what you have, or allow more recovery_bytes.")

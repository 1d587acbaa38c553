"""Values that could not be restored, and the values that depend on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from djinn.errors import StateLostError
from djinn.ir.tape import Node
from djinn.ir.value import Slot
from djinn.wire.messages import GENERATOR_HANDLE
from djinn_plugins.common.operators.dropout import draws
from djinn_plugins.replay.entries import GENERATOR
from djinn_plugins.replay.journal import Journal


class LostValues:
    """Tracks storages whose contents are lost, and finds the values that depend on them.

    Args:
        journal: Maps values to storages.
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
        """Mark a value as lost; `GENERATOR_HANDLE` stands for the random generators."""
        self._why[GENERATOR if number == GENERATOR_HANDLE else self._journal.storage_of(Slot(number, number))] = why
        if number != GENERATOR_HANDLE:
            self._absent.add(number)

    def restore(self, number: int, made: Iterable[int] = ()) -> None:
        """Mark a storage, or the random generators, as known again, together with the values in it."""
        if not self._journal.is_merged(number):
            self._why.pop(GENERATOR if number == GENERATOR_HANDLE else number, None)
        self._absent.difference_update(made)

    def allows(self, node: Node) -> bool:
        """Return whether an operation can be executed; if not, mark its results as lost too."""
        if not self._why:
            return True
        storage_of, signature = self._journal.storage_of, node.signature
        why = next((self._why[storage] for slot in node.inputs if (storage := storage_of(slot)) in self._why), None)
        if why is None and draws(node):
            why = self._why.get(GENERATOR)
        if why is None:
            return True
        for slot in node.outputs:
            self._absent.add(slot.number)
            self._why[storage_of(slot)] = why
        for index in signature.writes:
            self._why[storage_of(node.inputs[index])] = why
        if draws(node):
            self._why[GENERATOR] = why
        return False

    def present(self, numbers: Iterable[int]) -> list[int]:
        """Filter freed values: drop those that no executor has."""
        kept = [number for number in numbers if number not in self._absent]
        self._absent.difference_update(numbers)
        return kept

    def check(self, slots: Sequence[Slot]) -> None:
        """Check that values are not lost.

        Raises:
            StateLostError: A value is lost; the error names it and the reason.
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

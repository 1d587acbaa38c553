"""Identity and lifetime of values.

Two objects share the work. A `Slot` names a value and is what recorded nodes refer to; it says nothing about whether
anybody still wants the value. A `Value` is held by the lazy tensor alone and reports the slot's number when it dies.
"""

from __future__ import annotations

from collections.abc import Callable

from djinn.model.spec import TensorSpec


class Slot:
    """Name of one value within a session.

    Attributes:
        number: The value's handle, chosen by the client.
        storage: Number of the value that first owned the storage; views share it.
    """

    __slots__ = ("number", "storage")

    def __init__(self, number: int, storage: int) -> None:
        self.number = number
        self.storage = storage


class Value:
    """A lazy tensor's claim on a value.

    Attributes:
        slot: The value's name.
        spec: Its present metadata.

    Concurrency:
        May die on any thread, also during garbage collection; ``released`` must be atomic and must not raise.
    """

    __slots__ = ("_released", "slot", "spec")

    def __init__(self, slot: Slot, spec: TensorSpec, released: Callable[[int], None]) -> None:
        self.slot = slot
        self.spec = spec
        self._released = released

    def __del__(self) -> None:
        self._released(self.slot.number)

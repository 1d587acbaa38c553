"""Identity and lifetime of values.

Two objects share the work. A `Slot` names a value, and recorded nodes refer to it; it does not show whether the value
is still referenced. A `Value` is held only by the lazy tensor, and reports the slot's number when it is destroyed. Both
are created for every operation: as structs without cycle collection they cost a third of ordinary objects.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from djinn.ir.spec import TensorSpec


class Slot(msgspec.Struct, eq=False, gc=False):
    """Name of one value within a session.

    Attributes:
        number: The value's handle, chosen by the client.
        storage: Number of the value that originally owned the storage; views share it.
    """

    number: int
    storage: int


class Value(msgspec.Struct, eq=False, gc=False):
    """A lazy tensor's reference to a value.

    Attributes:
        slot: The value's name.
        spec: Its current metadata.
        released: Receives the slot's number when the value is released.

    Concurrency:
        May be destroyed on any thread, also during garbage collection; ``released`` must be atomic and must not raise.
    """

    slot: Slot
    spec: TensorSpec
    released: Callable[[int], None]

    def __del__(self) -> None:
        self.released(self.slot.number)

"""What a server tells about its device: properties and memory figures, fetched like values from reserved handles.

The answer is a list, whose fields are those of `DeviceProperties` or `MemoryFigures`. The three handles with an action
answer with the figures after the action.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from djinn.wire.messages import Size
from djinn_lib_service.memory_usage import MemoryUsage

__all__ = (
    "FIRST_REPORT",
    "FREE_UNUSED_HANDLE",
    "MEMORY_HANDLE",
    "PROPERTIES_HANDLE",
    "REPORT_HANDLES",
    "RESET_ACCUMULATED_HANDLE",
    "RESET_PEAK_HANDLE",
    "DeviceProperties",
    "MemoryFigures",
)

PROPERTIES_HANDLE: Final = 2**64 - 3
"""Reserved handle: the properties of the device."""
MEMORY_HANDLE: Final = 2**64 - 4
"""Reserved handle: the memory figures of the device."""
RESET_PEAK_HANDLE: Final = 2**64 - 5
"""Reserved handle: resets the peaks."""
RESET_ACCUMULATED_HANDLE: Final = 2**64 - 6
"""Reserved handle: resets the sums of what was allocated and freed."""
FREE_UNUSED_HANDLE: Final = 2**64 - 7
"""Reserved handle: gives memory that is kept for reuse back to the device."""
REPORT_HANDLES: Final = frozenset(range(FREE_UNUSED_HANDLE, PROPERTIES_HANDLE + 1))
FIRST_REPORT: Final = 2**63
"""The storage in a slot of one of these handles: this, plus the index of the device that is asked."""


class DeviceProperties(msgspec.Struct, frozen=True, array_like=True):
    """Properties of a device, as far as they are known.

    Attributes:
        kind: Kind of device, for example ``cuda``.
        name: Name of the model; of the processor for a CPU.
        total_bytes: Size of its memory; 0 if unknown.
        multi_processor_count: Streaming multiprocessors, or logical cores; 0 if unknown.
        major, minor: CUDA's compute capability; 0 for other devices.
        has_bfloat16: Whether operators accept ``torch.bfloat16``.
    """

    kind: Annotated[str, Meta(max_length=64)]
    name: Annotated[str, Meta(max_length=256)]
    total_bytes: Size = 0
    multi_processor_count: Size = 0
    major: Size = 0
    minor: Size = 0
    has_bfloat16: bool = False


class MemoryFigures(msgspec.Struct, frozen=True, array_like=True):
    """Memory figures of a device.

    Attributes:
        free_bytes: Memory that nobody uses.
        total_bytes: All memory; 0 if unknown.
        allocated: Memory of the session's values; of all values in the session's process, if the device counts those.
        reserved: The same with what is kept for reuse.
    """

    free_bytes: Size
    total_bytes: Size
    allocated: MemoryUsage
    reserved: MemoryUsage

"""What a server tells about its device: properties and memory figures, fetched like values from reserved handles.

The answer is a list, whose fields are those of `DeviceProperties`, `MemoryFigures` or `LoadFigures`. The three handles
with an action answer with the figures after the action. The properties are also part of the welcome: how operations are
recorded depends on them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from djinn.errors import ProtocolError
from djinn.wire.messages import MAX_FACTS_BYTES, Size, Welcome
from djinn_plugins.common.memory.usage import MemoryUsage
from djinn_plugins.common.net.terminal_text import harmless

if TYPE_CHECKING:
    from djinn_plugins.common.kinds.executor import Executor

__all__ = (
    "FIRST_REPORT",
    "FREE_UNUSED_HANDLE",
    "LOAD_HANDLE",
    "MEMORY_HANDLE",
    "PROPERTIES_HANDLE",
    "REPORT_HANDLES",
    "RESET_ACCUMULATED_HANDLE",
    "RESET_PEAK_HANDLE",
    "AttentionKernel",
    "DeviceProperties",
    "LoadFigures",
    "MemoryFigures",
    "device_of",
    "facts_of_device",
    "load_in",
    "properties_of",
    "summary_of",
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
LOAD_HANDLE: Final = 2**64 - 8
"""Reserved handle: how busy the device is with other sessions now."""
REPORT_HANDLES: Final = frozenset(range(LOAD_HANDLE, PROPERTIES_HANDLE + 1))
FIRST_REPORT: Final = 2**63
"""The storage in a slot of one of these handles: this, plus the index of the device that is asked."""


AttentionKernel: TypeAlias = Literal["flash", "efficient", "cudnn", "math"]
"""A kernel of attention, by the name that it has in ``torch.nn.attention.SDPBackend``, shortened."""


class DeviceProperties(msgspec.Struct, frozen=True, array_like=True):
    """Properties of a device, as far as they are known.

    Attributes:
        kind: Kind of device, for example ``cuda``.
        name: Name of the model; of the processor for a CPU.
        total_bytes: Size of its memory; 0 if unknown.
        multi_processor_count: Streaming multiprocessors, or logical cores; 0 if unknown.
        major, minor: CUDA's compute capability; 0 for other devices.
        has_bfloat16: Whether operators accept ``torch.bfloat16``.
        free_bytes: Unused memory at the time of the answer; 0 if unknown.
        cudnn: Release of cuDNN as one number, as PyTorch gives it; 0 if there is none.
        attention: Kernels among which the executor chooses one for each call of attention, in PyTorch's order; empty if
            the client can choose itself, because its own PyTorch has the same kernels.
        uuid: What tells it, or an instance of it, from others of its kind; empty if nothing does.
    """

    kind: Annotated[str, Meta(max_length=64)]
    name: Annotated[str, Meta(max_length=256)]
    total_bytes: Size = 0
    multi_processor_count: Size = 0
    major: Size = 0
    minor: Size = 0
    has_bfloat16: bool = False
    free_bytes: Size = 0
    cudnn: Size = 0
    attention: Annotated[tuple[AttentionKernel, ...], Meta(max_length=8)] = ()
    uuid: Annotated[str, Meta(max_length=64)] = ""


def properties_of(executor: Executor) -> DeviceProperties:
    """Ask an executor for the properties of its device."""
    from djinn_plugins.common.kinds.executor import SupportsDeviceReport

    if isinstance(executor, SupportsDeviceReport):
        return DeviceProperties(**executor.properties())
    return DeviceProperties(executor.device.partition(":")[0], executor.device)


def facts_of_device(executor: Executor) -> bytes:
    """Encode the properties of an executor's device for a welcome; empty if they do not fit in."""
    encoded = msgspec.msgpack.encode(properties_of(executor))
    return encoded if len(encoded) <= MAX_FACTS_BYTES else b""


def device_of(welcome: Welcome) -> DeviceProperties:
    """Return what a server has told about its device.

    Raises:
        ProtocolError: It is no description of a device.
    """
    return _decoded(welcome.device, welcome.facts)


def summary_of(device: DeviceProperties) -> str:
    """Describe a device in a few words: its model, and its memory as far as that is known."""
    parts = [device.name]
    if device.total_bytes:
        parts.append(f"{device.free_bytes / 2**30:.1f} of {device.total_bytes / 2**30:.1f} GiB free")
    if device.major:
        parts.append(f"compute capability {device.major}.{device.minor}")
    if device.uuid:
        parts.append(f"UUID {device.uuid}")
    return ", ".join(parts)


@lru_cache(maxsize=64)
def _decoded(device: str, facts: bytes) -> DeviceProperties:
    if not facts:
        return DeviceProperties(device.partition(":")[0], device)
    try:
        told = _decoder.decode(facts)
        return msgspec.structs.replace(
            told, kind=harmless(told.kind), name=harmless(told.name), uuid=harmless(told.uuid))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"The server described its device wrongly: {error}.") from None


class MemoryFigures(msgspec.Struct, frozen=True, array_like=True):
    """Memory figures of a device.

    Attributes:
        free_bytes: Unused memory.
        total_bytes: All memory; 0 if unknown.
        allocated: Memory of the session's values; of all values in the session's process, if the device counts those.
        reserved: The same with what is kept for reuse.
    """

    free_bytes: Size
    total_bytes: Size
    allocated: MemoryUsage
    reserved: MemoryUsage


class LoadFigures(msgspec.Struct, frozen=True, array_like=True):
    """How busy a device is.

    Attributes:
        others: Fraction of the last seconds in which other sessions had it.
    """

    others: Annotated[float, Meta(ge=0, lt=1)] = 0.0


def load_in(answer: object, address: str) -> float:
    """Read what a server has answered about its load.

    Raises:
        ProtocolError: It is no load.
    """
    try:
        return msgspec.convert(answer, LoadFigures).others
    except msgspec.ValidationError as error:
        raise ProtocolError(f"{address} described its load wrongly: {error}.") from error


_decoder = msgspec.msgpack.Decoder(DeviceProperties)
# `msgspec.convert` uses its form, which several threads must not work out at once.
msgspec.msgpack.Decoder(LoadFigures)

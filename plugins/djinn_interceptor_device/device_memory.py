"""Functions of the device's module that ask the server about its device: properties and memory."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any, NoReturn, TypeVar

import attrs
import msgspec
import torch
from djinn_lib_service import device_report
from djinn_lib_service.device_report import DeviceProperties, MemoryFigures
from djinn_lib_service.memory_usage import MemoryUsage

from djinn.errors import TransportError
from djinn.ir.value import Slot
from djinn.record import devices
from djinn.session import runtime
from djinn.wire.tensors import DTYPES

__all__ = ("MemoryFunctions", "device_named")

_Report = TypeVar("_Report", MemoryFigures, DeviceProperties)
_properties: weakref.WeakKeyDictionary[Any, dict[int, DeviceProperties]] = weakref.WeakKeyDictionary()
"""By session and index of the device."""
_FIGURES = ("current", "peak", "allocated", "freed")
_OF_TENSORS = ("active_bytes", "allocated_bytes", "requested_bytes")
_IN_POOLS = (
    *_OF_TENSORS, *"active allocation inactive_split inactive_split_bytes reserved_bytes segment".split())
_STATS = sorted([
    *(f"{group}.{pool}.{figure}" for group in _IN_POOLS for pool in ("all", "large_pool", "small_pool")
      for figure in _FIGURES),
    *(f"{group}.{figure}" for group in ("oversize_allocations", "oversize_segments") for figure in _FIGURES),
    *"max_split_size num_alloc_retries num_device_alloc num_device_free num_ooms num_sync_all_streams".split()])
"""Names of all figures of CUDA's allocator."""


@attrs.frozen
class RemoteDeviceProperties:
    """Properties of the device that the server runs operations on.

    Attributes:
        name: Name of the model.
        total_memory: Size of its memory in bytes; 0 if unknown.
        multi_processor_count: Streaming multiprocessors, or logical cores of a CPU; 0 if unknown.
        major, minor: CUDA's compute capability; 0 for other devices.
        kind: Kind of device, for example ``cuda``.
    """

    name: str
    total_memory: int
    multi_processor_count: int
    major: int
    minor: int
    kind: str


def device_named(named: Any) -> torch.device:
    """Convert an index, a device, a string or ``None`` to a device."""
    if named is None or (isinstance(named, int) and named < 0):
        return devices.checked_device(None)
    kind = devices.logical_device().type
    return devices.checked_device(torch.device(kind, named) if isinstance(named, int) else torch.device(named))


def _ask(handle: int, device: torch.device, form: type[_Report]) -> _Report:
    session = runtime.current()
    with session.lock:
        answer = session.backend.fetch([Slot(handle, device_report.FIRST_REPORT + (device.index or 0))], whole=True)[0]
    try:
        return msgspec.convert(answer, form)
    except msgspec.ValidationError as error:
        raise TransportError(f"{session.backend.address} described its device wrongly: {error}.") from error


def _known(device: Any) -> DeviceProperties:
    where = device_named(device)
    known = _properties.setdefault(runtime.current(), {})
    index = where.index or 0
    if index not in known:
        known[index] = _ask(device_report.PROPERTIES_HANDLE, where, DeviceProperties)
    return known[index]


def _memory(device: Any, handle: int = device_report.MEMORY_HANDLE) -> MemoryFigures:
    """Return the memory figures; zeros if no session runs, as there is nothing to ask."""
    if not runtime.is_initialized():
        device_named(device)
        return MemoryFigures(0, 0, MemoryUsage(), MemoryUsage())
    return _ask(handle, device_named(device), MemoryFigures)


class MemoryFunctions:
    """Functions of the device's module."""

    def get_device_properties(self, device: Any = None) -> RemoteDeviceProperties:
        """Return the properties of the server's device."""
        known = _known(device)
        return RemoteDeviceProperties(known.name, known.total_bytes, known.multi_processor_count, known.major,
                                      known.minor, known.kind)

    def get_device_name(self, device: Any = None) -> str:
        """Return the name of the server's device."""
        return _known(device).name

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        """Return CUDA's compute capability.

        Raises:
            RuntimeError: The server's device has none.
        """
        known = _known(device)
        if known.kind != "cuda":
            raise RuntimeError(f"The server's device, {known.name}, has no compute capability: it is no CUDA device.")
        return known.major, known.minor

    def supported_dtypes(self) -> set[torch.dtype]:
        """Return the dtypes of tensors that can be on the device."""
        return set(DTYPES.values())

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        """Whether operators of the server's device accept ``torch.bfloat16``."""
        known = _known(None)
        return known.has_bfloat16 if including_emulation or known.kind != "cuda" else known.major >= _AMPERE

    def is_tf32_supported(self) -> bool:
        """Whether the server's device can multiply in TF32."""
        return _known(None).kind == "cuda" and _known(None).major >= _AMPERE

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Return how many bytes are free, and how many there are, within the limit that the server sets."""
        found = _ask(device_report.MEMORY_HANDLE, device_named(device), MemoryFigures)
        limit_bytes = runtime.current().backend.welcome.memory_bytes
        if not limit_bytes:
            return found.free_bytes, found.total_bytes
        total_bytes = min(found.total_bytes or limit_bytes, limit_bytes)
        return min(found.free_bytes, max(total_bytes - found.allocated.current, 0)), total_bytes

    def device_memory_used(self, device: Any = None) -> int:
        """Return how many bytes of the server's device are in use, by all processes."""
        found = _ask(device_report.MEMORY_HANDLE, device_named(device), MemoryFigures)
        return max(found.total_bytes - found.free_bytes, 0)

    def memory_stats(self, device: Any = None) -> OrderedDict[str, int]:
        """Return the figures of the server's memory, with the names of those of CUDA; 0 where djinn has none."""
        if not runtime.is_initialized():
            return OrderedDict()
        found = _memory(device)
        usages = {**dict.fromkeys(_OF_TENSORS, found.allocated), "reserved_bytes": found.reserved}
        return OrderedDict(dict.fromkeys(_STATS, 0) | {
            f"{group}.all.{figure}": getattr(usage, figure) for group, usage in usages.items() for figure in _FIGURES})

    def memory_stats_as_nested_dict(self, device: Any = None) -> dict[str, Any]:
        """Return `memory_stats` by the parts of their names."""
        made: dict[str, Any] = {}
        for name, count in self.memory_stats(device).items():
            *groups, last = name.split(".")
            inner = made
            for group in groups:
                inner = inner.setdefault(group, {})
            inner[last] = count
        return made

    def memory_allocated(self, device: Any = None) -> int:
        """Return how many bytes tensors use on the server's device."""
        return _memory(device).allocated.current

    def max_memory_allocated(self, device: Any = None) -> int:
        """Return how many bytes tensors used at most."""
        return _memory(device).allocated.peak

    def memory_reserved(self, device: Any = None) -> int:
        """Return how many bytes the server uses and keeps for reuse."""
        return _memory(device).reserved.current

    def max_memory_reserved(self, device: Any = None) -> int:
        """Return how many bytes the server used and kept at most."""
        return _memory(device).reserved.peak

    def memory_summary(self, device: Any = None, abbreviated: bool = False) -> str:
        """Return the memory figures as a table."""
        where, found = device_named(device), _memory(device)
        lines = [f"Memory of {where}, in bytes", f"{'':<12}" + "".join(f"{figure:>16}" for figure in _FIGURES)]
        for name, usage in (("allocated", found.allocated), ("reserved", found.reserved)):
            lines.append(f"{name:<12}" + "".join(f"{getattr(usage, figure):>16}" for figure in _FIGURES))
        if not abbreviated:
            lines.append(f"{'device':<12}{found.free_bytes:>16} free of {found.total_bytes}")
        return "\n".join(lines)

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Set the peak to the current allocation."""
        _memory(device, device_report.RESET_PEAK_HANDLE)

    def reset_accumulated_memory_stats(self, device: Any = None) -> None:
        """Restart the sums of allocated and freed bytes."""
        _memory(device, device_report.RESET_ACCUMULATED_HANDLE)

    def empty_cache(self) -> None:
        """Let the server give memory that it keeps for reuse back to its device."""
        _memory(None, device_report.FREE_UNUSED_HANDLE)

    def can_device_access_peer(self, device: Any, peer_device: Any) -> bool:
        """Return False: devices of a session have no memory in common."""
        return False

    def ipc_collect(self) -> NoReturn:
        """Refuse.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError("Memory of a remote accelerator cannot be shared with other processes, so there is nothing "
                           "to collect.")


_AMPERE = 8

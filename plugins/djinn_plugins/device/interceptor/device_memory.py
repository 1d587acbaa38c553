"""Functions of the device's module that ask the server about its device: properties and memory."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, TypeVar

import attrs
import msgspec
import torch

from djinn.errors import TransportError
from djinn.ir.value import Slot
from djinn.record import devices
from djinn.session import runtime
from djinn.wire.tensors import DTYPES
from djinn_plugins.common import device_report
from djinn_plugins.common.device_report import DeviceProperties, MemoryFigures
from djinn_plugins.common.memory.usage import MemoryUsage

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


def _ask(handle: int, indices: Iterable[int], form: type[_Report]) -> list[_Report]:
    """Ask the servers with these indices."""
    session = runtime.current()
    with session.lock:
        slots = [Slot(handle, device_report.FIRST_REPORT + index) for index in indices]
        answers = session.backend.fetch(slots, whole=True)
    try:
        return [msgspec.convert(answer, form) for answer in answers]
    except msgspec.ValidationError as error:
        raise TransportError(f"{session.backend.address} described its device wrongly: {error}.") from error


def _known(device: Any) -> DeviceProperties:
    where = device_named(device)
    known = _properties.setdefault(runtime.current(), {})
    index = where.index or 0
    if index not in known:
        (known[index],) = _ask(device_report.PROPERTIES_HANDLE, (index,), DeviceProperties)
    return known[index]


def _memory(device: Any, handle: int = device_report.MEMORY_HANDLE) -> MemoryFigures:
    """Return the memory figures; zeros if no session runs, as there is nothing to ask."""
    if not runtime.is_initialized():
        device_named(device)
        return MemoryFigures(0, 0, MemoryUsage(), MemoryUsage())
    found = [figures for _, figures in _of_servers(device, handle)]
    return MemoryFigures(
        sum(figures.free_bytes for figures in found), sum(figures.total_bytes for figures in found),
        _sum([figures.allocated for figures in found]), _sum([figures.reserved for figures in found]))


def _of_servers(device: Any, handle: int = device_report.MEMORY_HANDLE) -> list[tuple[int, MemoryFigures]]:
    """Return the memory limit and the figures of each server of a device: several may form one device."""
    where, backend = device_named(device), runtime.current().backend
    executors = backend.executors
    indices = range(len(executors)) if backend.device_count == 1 else (where.index or 0,)
    limits = [executors[index].welcome.memory_bytes for index in indices]
    return list(zip(limits, _ask(handle, indices, MemoryFigures), strict=True))


def _sum(usages: Sequence[MemoryUsage]) -> MemoryUsage:
    return MemoryUsage(*(sum(getattr(usage, figure) for usage in usages) for figure in _FIGURES))


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
        free_bytes = total_bytes = 0
        for limit_bytes, found in _of_servers(device):
            most_bytes = min(found.total_bytes or limit_bytes, limit_bytes or found.total_bytes)
            left_bytes = max(most_bytes - found.allocated.current, 0)
            free_bytes += min(found.free_bytes, left_bytes) if limit_bytes else found.free_bytes
            total_bytes += most_bytes
        return free_bytes, total_bytes

    def device_memory_used(self, device: Any = None) -> int:
        """Return how many bytes of the server's device are in use, by all processes."""
        return sum(max(found.total_bytes - found.free_bytes, 0) for _, found in _of_servers(device))

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

"""Plugins of the kind ``memory`` keep the sessions of a server within its device memory.

A server opens one `MemoryManager`. Each session gets a `SessionMemory` from it, which holds the session's values. The
session calls it before it uses values, before a program runs, and after. Without a manager, a session has the base
class `SessionMemory`, which limits nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import attrs
import torch

from djinn.wire.messages import Run
from djinn_plugins.common.calls.handle_table import HandleTable, ValueTable
from djinn_plugins.common.kinds.executor import Executor, RandomState
from djinn_plugins.common.options import CRITICAL, WARNING, MemoryOptions

if TYPE_CHECKING:
    from djinn_plugins.executor.program_table import DefinedProgram

__all__ = ("CRITICAL", "WARNING", "Execute", "KeptUploads", "MemoryFactory", "MemoryManager", "MemoryOptions",
           "MemoryReport", "Put", "RunsAhead", "SessionMemory", "SpareData", "SupportsEviction")

_NO_COUNTS: Mapping[str, int] = MappingProxyType({})
Put: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Puts a CPU tensor on the device."""
Execute: TypeAlias = "Callable[[DefinedProgram, Run], list[Any]]"
"""Runs a program on the session's values, and returns the results."""


class RunsAhead(Protocol):
    """The results of runs that a session's client has not requested yet."""

    @property
    def results(self) -> Iterator[Any]:
        """All of these results."""

    def shed(self) -> None:
        """Drop them; they run again when they are requested."""


class KeptUploads(Protocol):
    """The uploads of a session that the host keeps."""

    def kept(self, handle: int) -> torch.Tensor | None:
        """Return the upload that a value came from, if it is kept. It must not be written."""


class SpareData(Protocol):
    """Data that the host keeps and no session needs."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all kept data."""

    def drop_spare(self) -> int:
        """Drop data that no session needs, and return how many bytes it used."""


class SessionMemory:
    """The memory of one session. This base class limits nothing, and never moves a value.

    Attributes:
        values: The session's values.
        lock: Held by the session while it reads, writes, adds or drops values. A manager that moves values of several
            sessions gives all of them the same lock.
        can_share: Whether values may share memory with the tensors that were uploaded and that are fetched.

    Concurrency:
        The session holds the lock when it calls a method, except for `settle`, `close` and `has_room_ahead`.

    Laws:
        memory.results_equal, memory.limit_kept, memory.room_used, memory.refusal_changes_nothing,
        memory.in_use_stays, memory.usage_honest, memory.all_returned
    """

    can_share = True

    def __init__(self) -> None:
        self.values: ValueTable = HandleTable()
        self.lock = threading.RLock()

    def use(self, handles: Sequence[int], wanted_bytes: int = 0) -> None:
        """Make values ready to be read, and make room for more bytes; both hold until `release`.

        Args:
            handles: The values. A handle may have none.
            wanted_bytes: How many bytes will be allocated.

        Raises:
            OutOfMemoryError: There is not enough room. Nothing is lost or changed.
        """

    def with_room_to_put(self, put: Put) -> Put:
        """Return a function that makes room for a tensor and then puts it on the device.

        The session calls this once, when it begins. The returned function raises `OutOfMemoryError` if there is not
        enough room; nothing is lost or changed then.

        Args:
            put: Puts a tensor on the device. It may be called again if the device is out of memory.
        """
        return put

    def with_room_to_run(self, execute: Execute) -> Execute:
        """Return a function that makes the inputs of a run ready, and room for what it allocates, and then runs it.

        The session calls this once, when it begins. The returned function raises `OutOfMemoryError` if there is not
        enough room; nothing is lost or changed then.

        Args:
            execute: Runs a program that was compiled, with the right number of inputs and outputs.
        """
        return execute

    def made(self, known: DefinedProgram, run: Run, outputs: Sequence[Any], *, is_complete: bool) -> None:
        """Note the results of a run before they are added to the values.

        Args:
            known: The program.
            run: The run. It may have run ahead.
            outputs: The results: tensors, plain results, or poison.
            is_complete: Whether no step has failed.

        Raises:
            OutOfMemoryError: There is no room for the results, so they must be dropped.
        """

    def uploaded(self, handle: int) -> None:
        """Note that a value was uploaded, or made from a kept upload."""

    def stated(self, value: torch.Tensor, role: str) -> None:
        """Note the role of a value, which the client has stated.

        Args:
            value: One of the session's values.
            role: One of `djinn_plugins.common.operators.stated_roles.STATED_ROLES`.
        """

    def dropping(self, handles: Sequence[int]) -> None:
        """Note that values will be dropped or replaced."""

    def has_room_ahead(self) -> bool:
        """Whether there is room to run anything ahead of its request."""
        return True

    def begin_run_ahead(self, run: Run, inputs: Sequence[Any]) -> bool:
        """Return whether a run may run ahead of its request; then its inputs stay ready until `release`.

        Args:
            run: The run.
            inputs: Its input values; some may be results of other runs ahead.
        """
        return True

    def release(self) -> None:
        """Note that a command was carried out, or something ran ahead: nothing is in use any more."""

    def settle(self) -> None:
        """Do what can be done between two batches, such as making room in advance."""

    def explain(self, error: BaseException) -> BaseException:
        """Return the error that the client gets in place of another one, for example with the sizes in its message."""
        return error

    def close(self) -> None:
        """Note that the session has ended. It has dropped its values already."""


@runtime_checkable
class SupportsEviction(Protocol):
    """Optional methods of a `SessionMemory` that can take values from the device at any time."""

    def storages(self) -> Sequence[torch.UntypedStorage]:
        """List the storages that the session keeps: those of values, and those that values are computed from again.

        One whose bytes are elsewhere is empty.
        """

    def evict(self, storage: torch.UntypedStorage) -> bool:
        """Take a storage from the device even if memory is not short, and return whether that was possible.

        Laws:
            session.pressure_invisible
        """


@attrs.frozen
class MemoryReport:
    """What a manager reports, for metrics.

    Attributes:
        device: Bytes on the device, by role, for example ``weight``; results of runs ahead are ``results_ahead``.
        host_bytes: Bytes moved to the host.
        evictions: How often something was evicted, by kind.
        restored: How often something was restored.
        moved_out_bytes, moved_in_bytes: Bytes copied to the host, and to the device.
        refused: How often there was no room.
        pressure: Current memory pressure: 0 normal, 1 warning, 2 critical.
    """

    device: Mapping[str, int] = _NO_COUNTS
    host_bytes: int = 0
    evictions: Mapping[str, int] = _NO_COUNTS
    restored: int = 0
    moved_out_bytes: int = 0
    moved_in_bytes: int = 0
    refused: int = 0
    pressure: int = 0


class MemoryManager(Protocol):
    """Keeps the sessions of one server within a memory limit."""

    def limit(self, options: MemoryOptions) -> None:
        """Change the limits. Values that are beyond a lower limit stay until something is used or added.

        Concurrency:
            Any thread.
        """

    def join(self, random: RandomState, ahead: RunsAhead, uploads: KeptUploads | None) -> SessionMemory:
        """Add a session, and return its memory.

        Args:
            random: The session's random numbers, for programs that are run again.
            ahead: Results of runs ahead. They count against the limit, and may be shed at any time.
            uploads: The session's kept uploads, if there are any.

        Concurrency:
            Any thread.
        """

    def report(self) -> MemoryReport:
        """Return amounts and counts.

        Concurrency:
            Any thread, without a lock.

        Laws:
            memory.usage_honest
        """


class MemoryFactory(Protocol):
    """Opens memory managers."""

    name: str
    """Name in the configuration."""

    def open(self, executor: Executor, options: MemoryOptions, spare: SpareData | None = None) -> MemoryManager:
        """Open the manager of a server.

        Args:
            executor: Holds the values of all sessions.
            options: The limits.
            spare: Uploads that the host keeps; they count against `MemoryOptions.host_bytes`.
        """

"""Executors hold values and run programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import attrs
import torch

from djinn.ir.program import Program
from djinn.wire.messages import Poisoned
from djinn_plugins.common.kinds.guard import CallCheck

Report: TypeAlias = Callable[[int, BaseException], Poisoned]
"""Reports that a step (by position) raised, and returns the poison that stands for its results."""


@runtime_checkable
class RandomState(Protocol):
    """A stream of random numbers that belongs to one session."""

    def seed(self, seed: int) -> None:
        """Restart from ``seed``, as ``torch.manual_seed`` would."""

    def get(self) -> torch.Tensor:
        """Return the state, ``u8[N]`` on the CPU."""

    def set(self, state: torch.Tensor) -> None:
        """Continue from a state that `get` returned."""


@runtime_checkable
class CompiledProgram(Protocol):
    """A program ready to run.

    A program that may run ahead of requests is also a `djinn_plugins.common.kinds.executor.SupportsSpeculation`.
    """

    def run(self, inputs: list[Any], numbers: Sequence[Any], random: RandomState, report: Report) -> list[Any]:
        """Run once.

        Args:
            inputs: One value per program input: a tensor, a plain result, or `Poisoned`. An entry that a skipped step
                would have written, or one sharing its storage, is replaced by the poison.
            numbers: The lifted numbers in the order of the steps.
            random: The session's random numbers; drawn from in program order.
            report: Called for a step that raises; the run continues with the steps that do not depend on it.

        Returns:
            The kept results, in order. A step that raises leaves the values that it would have written unchanged, as in
            eager mode, and its results are `Poisoned`. A step with a poisoned operand is skipped; its results, and the
            values that it would have written, get the same poison.

        Laws:
            executor.equals_eager, executor.order_kept, executor.replay_stable, executor.repetition_invisible,
            executor.failure_contained,
            executor.poison_propagates, executor.randomness_private, executor.plain_results, executor.purity_true,
            executor.stops_between_steps, executor.pauses_between_steps

        Concurrency:
            Any thread may call this; an executor serializes runs on its device itself.
        """


@runtime_checkable
class Executor(Protocol):
    """One device that runs programs."""

    name: str
    """Name in the configuration, for example ``cpu``."""
    device: str
    """Device in PyTorch's notation, for example ``cpu`` or ``cuda:0``."""

    def compile(self, program: Program) -> CompiledProgram:
        """Prepare a checked program.

        Raises:
            UnknownOperatorError, SchemaMismatchError: An operator cannot be run here; the error names it.

        Laws:
            executor.unknown_operator_named, executor.schema_mismatch_named
        """

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a CPU tensor to the device.

        Ownership:
            The argument belongs to the caller and may change as soon as this returns.

        Laws:
            executor.put_copies
        """

    def get(self, value: torch.Tensor) -> torch.Tensor:
        """Copy a value to a new dense CPU tensor that is not an inference tensor; preserve dense strides.

        Laws:
            executor.get_copies
        """

    def random_state(self, seed: int) -> RandomState:
        """Create a session's own stream of random numbers."""

    def close(self) -> None:
        """Release the device."""


@attrs.frozen
class Effects:
    """What a program does to its inputs, for any numbers.

    Attributes:
        written: Inputs that it may write or resize, and inputs that share a storage with one of these.
        changes_storages: Whether a value may get another storage, or a storage another size.
        repeats: Whether a repeated run on the same inputs gives bitwise the same results, as far as it is pure.
        grown: By position among the kept results: the input whose elements the result contains, with further elements.
        patched: Inputs that are partly written.
        attended: Inputs (``-1 - i``) and kept results (by position) that attention reads as keys or values.
    """

    written: frozenset[int] = frozenset()
    changes_storages: bool = False
    repeats: bool = False
    grown: Mapping[int, int] = attrs.field(factory=dict)
    patched: frozenset[int] = frozenset()
    attended: frozenset[int] = frozenset()


@runtime_checkable
class SupportsEffectReport(CompiledProgram, Protocol):
    """Optional attribute of a `CompiledProgram` that declares its effects.

    Laws:
        executor.effects_true
    """

    effects: Effects
    """An upper bound of its effects. The statements on caches are hints: errors there only cost time."""


@runtime_checkable
class SupportsOffload(Protocol):
    """Optional methods of an `Executor` that give back the memory of values while the values stay valid.

    A offloaded storage has no bytes. Tensors in it keep their sizes, strides and offsets, and are not read or written
    until the storage is restored again.

    Laws:
        executor.vacates_exactly
    """

    def can_offload(self, storage: torch.UntypedStorage) -> bool:
        """Whether the memory of a storage can be given back."""

    def copy_out(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Copy the bytes of a storage to new host memory, ``u8[N]``."""

    def offload(self, storage: torch.UntypedStorage) -> None:
        """Release the memory of a storage."""

    def restore(self, storage: torch.UntypedStorage, data: torch.Tensor) -> None:
        """Allocate memory for a offloaded storage, and fill it with these bytes.

        Args:
            storage: The storage.
            data: ``u8[N]``, on the host or on the device.

        Raises:
            Exception: There is no memory; the storage stays offloaded.
        """


@runtime_checkable
class SupportsOutOfMemoryRetry(Protocol):
    """Optional attribute of an `Executor` that asks for memory when it runs out, and tries again.

    It does so once, for a step that has no effects except its results.
    """

    relief: Callable[[], bool] | None
    """Releases memory that is not in use, and returns whether there was any."""


class SpareRoom(Protocol):
    """The values of one session that are kept in memory with room to grow.

    A program that was admitted writes the result of `cat` behind its first argument, if it can. Such a result has the
    size, dtype and elements that eager gives, and gaps between its elements. Only programs that were admitted may be
    given it as it is.

    Laws:
        executor.growth_invisible

    Concurrency:
        One thread at a time.
    """

    def admit(self, program: CompiledProgram) -> None:
        """Let a program write growing values into spare room. Call this before its first run."""

    def make_ready(self, program: CompiledProgram, inputs: Sequence[Any]) -> Sequence[int]:
        """Move, as `make_dense` does, the inputs that a program must not be given with gaps; return their positions."""

    def make_dense(self, value: Any) -> bool:
        """Move a value to separate memory, laid out as eager lays it out, if it has gaps; return whether it had."""


@runtime_checkable
class SupportsGrowth(Protocol):
    """Optional method of an `Executor` that can write values that grow into spare room."""

    def spare_room(self) -> SpareRoom:
        """Begin to keep spare room for the values of one session."""


class ExecutorFactory(Protocol):
    """Creates executors of one kind."""

    name: str
    """Name in the configuration."""

    def devices(self) -> list[str]:
        """List the devices available here, best first. Opens none."""

    def open(self, device: str) -> Executor:
        """Open a device; the best available one if ``device`` is empty.

        Raises:
            ConfigurationError: There is no such device on this machine.

        Laws:
            executor.devices_real
        """


@runtime_checkable
class SupportsOwnDevice(Protocol):
    """Optional method of an `ExecutorFactory` whose devices can be hidden from a process."""

    def alone(self, device: str) -> tuple[Mapping[str, str], str]:
        """Let a new process see one of the devices only.

        Returns:
            Environment variables of the process, and the name that the device has there.
        """


@runtime_checkable
class SupportsSharing(Protocol):
    """Optional methods of an `Executor` that avoid copies where memory can be shared."""

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Put a CPU tensor on the device.

        Ownership:
            The caller gives up the argument: the executor may use it as the value.
        """

    def lend(self, value: torch.Tensor) -> torch.Tensor:
        """Return a dense CPU tensor with the content of a value.

        Ownership:
            The caller only reads the result, and only until the session's next batch: it may share the value's memory.
        """


@runtime_checkable
class SupportsSpeculation(CompiledProgram, Protocol):
    """Optional method of a `CompiledProgram` that may run before the client requests it."""

    def is_pure(self, numbers: Sequence[Any]) -> bool:
        """Whether a run with these numbers has no effect except its results.

        Laws:
            executor.purity_true
        """


@runtime_checkable
class SupportsDrawingAhead(SupportsSpeculation, Protocol):
    """Optional method of a `CompiledProgram` that may run before the client requests it, although it draws numbers.

    The session restores the state of its random numbers if the client does not request the run after all.
    """

    def only_draws(self, numbers: Sequence[Any]) -> bool:
        """Whether a run with these numbers has no effect except its results, and that it draws random numbers.

        Laws:
            executor.purity_true
        """


class Undo(Protocol):
    """What a run has overwritten.

    Attributes:
        storages: Addresses of the storage objects (``_cdata``) of the inputs that it may have written.
        size_bytes: Bytes that are kept.
    """

    storages: frozenset[int]
    size_bytes: int

    def restore(self) -> None:
        """Put it back. Of several runs, the last one comes first."""


@runtime_checkable
class SupportsUndo(SupportsSpeculation, SupportsEffectReport, Protocol):
    """Optional methods of a `CompiledProgram` that may run before the client requests it, although it writes."""

    def can_undo(self, numbers: Sequence[Any]) -> bool:
        """Whether a run with these numbers has no effect except its results, random draws and writes to elements."""

    def run_with_undo(
        self, stop: Sequence[BaseException], inputs: list[Any], numbers: Sequence[Any], random: RandomState,
        report: Report, limit_bytes: int,
    ) -> tuple[list[Any], Undo]:
        """Run once as `SupportsStop.run_until` does, and keep what the run overwrites, up to a limit.

        A step that would exceed the limit is not executed; it is reported as failed. After an exception, what was
        overwritten has been put back.

        Laws:
            executor.undone_exactly
        """


@runtime_checkable
class SupportsCheckedCompile(Protocol):
    """Optional method of an `Executor` that checks calls before it makes them."""

    def compile_checked(self, program: Program, checks: Mapping[int, CallCheck]) -> CompiledProgram:
        """Prepare a checked program, as `Executor.compile` does.

        Args:
            program: The program.
            checks: By template: called with the arguments of each call immediately before the call. If a check raises,
                the step fails.
        """


@runtime_checkable
class SupportsSettling(Protocol):
    """Optional method of an `Executor` that waits for the device."""

    def settle(self) -> None:
        """Wait until the device has finished all work submitted so far.

        Concurrency:
            Any thread.
        """


class DeviceMark(Protocol):
    """A point in the work of a device, between two submissions; as much of `torch.cuda.Event` as is needed.

    Raises:
        RuntimeError: Each method does if the device is lost.
    """

    def query(self) -> bool:
        """Whether the device has reached it."""

    def synchronize(self) -> None:
        """Wait until the device has reached it; other threads run meanwhile."""

    def elapsed_time(self, later: Any) -> float:
        """Return the milliseconds from this point to a later one of the same device, which was reached."""


@runtime_checkable
class SupportsDeviceMarks(Protocol):
    """Optional method of an `Executor` whose programs return before the device has computed them."""

    def mark(self) -> DeviceMark:
        """Mark the point behind all work submitted so far.

        Concurrency:
            Any thread.
        """


@runtime_checkable
class SupportsDeviceLoss(Protocol):
    """Optional method of an `Executor` whose process can lose the device."""

    def loss(self) -> str:
        """Say why the device is no longer usable in this process; empty if it is usable.

        Concurrency:
            Any thread. The server calls it after each batch, so it must not block.
        """


@runtime_checkable
class SupportsDeviceReport(Protocol):
    """Optional methods of an `Executor` that tell clients about its device.

    Concurrency:
        Any thread.
    """

    def properties(self) -> Mapping[str, Any]:
        """Return the fields of a `djinn_plugins.common.device_report.DeviceProperties`."""

    def memory(self) -> Mapping[str, Any]:
        """Return fields of a `djinn_plugins.common.device_report.MemoryFigures`.

        Without ``allocated``, the session's values are counted instead.
        """

    def reset_peak(self) -> None:
        """Set the peak to the current allocation."""

    def reset_accumulated(self) -> None:
        """Restart the sums of allocated and freed bytes."""

    def free_unused(self) -> None:
        """Give memory that is kept for reuse back to the device."""


@runtime_checkable
class SupportsSkippedSteps(CompiledProgram, Protocol):
    """Optional method of a `CompiledProgram` that can run without some of its steps."""

    def run_without(
        self, inputs: list[Any], numbers: Sequence[Any], random: RandomState, report: Report,
        refused: Mapping[int, Exception], stop: Sequence[BaseException] = (),
    ) -> list[Any]:
        """Run once as `CompiledProgram.run` does, but treat some steps as if they had raised.

        Args:
            inputs: As for `CompiledProgram.run`, like the next three arguments.
            numbers: The lifted numbers.
            random: The session's random numbers.
            report: Called for a step that raises.
            refused: By position: the steps to leave out, and the exception that each raises instead.
            stop: See `SupportsStop`.
        """


@runtime_checkable
class SupportsStop(CompiledProgram, Protocol):
    """Optional method of a `CompiledProgram` that can stop between two steps."""

    def run_until(
        self, stop: Sequence[BaseException], inputs: list[Any], numbers: Sequence[Any], random: RandomState,
        report: Report,
    ) -> list[Any]:
        """Run once as `CompiledProgram.run` does, but start no further step once there is a reason to stop.

        The remaining steps are skipped. Their results carry the poison of one failure. Values that they would have
        written in place stay unchanged; only a value whose metadata they would have changed is poisoned.

        Args:
            stop: Empty as long as the program should run. Any thread may add the reason to stop while the program runs.
            inputs: As for `CompiledProgram.run`, like the remaining arguments.
            numbers: The lifted numbers.
            random: The session's random numbers.
            report: Called for a step that raises.

        Laws:
            executor.stops_between_steps
        """


@runtime_checkable
class SupportsPause(SupportsStop, Protocol):
    """Optional attribute of a `SupportsStop` that can also pause between two steps.

    Then ``stop`` may hold a `djinn_plugins.executor.pauses.Pause`, which is no reason to stop: before its next step,
    the program calls `djinn_plugins.executor.pauses.reason_to_stop`, which waits.

    Laws:
        executor.pauses_between_steps
    """

    can_pause: bool
    """Whether it can."""

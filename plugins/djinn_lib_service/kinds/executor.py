"""Executors hold values and run programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import attrs
import torch

from djinn.ir.program import Program
from djinn.wire.messages import Poisoned

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

    A program that may run before the client requests it is also a `djinn_lib_service.capabilities.SupportsSpeculation`.
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
            executor.equals_eager, executor.order_kept, executor.replay_stable, executor.failure_contained,
            executor.poison_propagates, executor.randomness_private, executor.plain_results, executor.purity_true,
            executor.stops_between_steps

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

    A vacated storage has no bytes. Tensors in it keep their sizes, strides and offsets, and are not read or written
    until the storage is furnished again.

    Laws:
        executor.vacates_exactly
    """

    def can_vacate(self, storage: torch.UntypedStorage) -> bool:
        """Whether the memory of a storage can be given back."""

    def copy_out(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Copy the bytes of a storage to new host memory, ``u8[N]``."""

    def vacate(self, storage: torch.UntypedStorage) -> None:
        """Release the memory of a storage."""

    def furnish(self, storage: torch.UntypedStorage, data: torch.Tensor) -> None:
        """Allocate memory for a vacated storage, and fill it with these bytes.

        Args:
            storage: The storage.
            data: ``u8[N]``, on the host or on the device.

        Raises:
            Exception: There is no memory; the storage stays vacated.
        """


@runtime_checkable
class SupportsOutOfMemoryRetry(Protocol):
    """Optional attribute of an `Executor` that asks for memory when it runs out, and tries again.

    It does so once, for a step that has no effects except its results.
    """

    relief: Callable[[], bool] | None
    """Releases memory that is not in use, and returns whether there was any."""


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

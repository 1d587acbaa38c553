"""Executors hold values and run programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import attrs
import torch

from djinn.ir.program import Program
from djinn.wire.messages import Poisoned

Report: TypeAlias = Callable[[int, BaseException], Poisoned]
"""Reports that a step (by position) raised, and gives the poison that stands for its results."""


@runtime_checkable
class RandomState(Protocol):
    """A stream of random numbers that belongs to one session."""

    def seed(self, seed: int) -> None:
        """Start again from ``seed``, as ``torch.manual_seed`` would."""

    def get(self) -> torch.Tensor:
        """Return the state, ``u8[N]`` on the CPU."""

    def set(self, state: torch.Tensor) -> None:
        """Continue from a state that `get` returned."""


@runtime_checkable
class CompiledProgram(Protocol):
    """A program made ready to run.

    What may run before it is asked for is a `djinn_lib_service.abilities.EarlyProgram` as well.
    """

    def run(self, inputs: list[Any], numbers: Sequence[Any], random: RandomState, report: Report) -> list[Any]:
        """Run once.

        Args:
            inputs: One value per program input: a tensor, a plain result, or `Poisoned`. An entry that a skipped step
                would have written, or one sharing its storage, is replaced by the poison.
            numbers: The lifted numbers in the order of the steps.
            random: The session's random numbers; drawn from in program order.
            report: Called for a step that raises; the run goes on with the steps that do not depend on it.

        Returns:
            The kept results, in order. A step that raises leaves what it would have written as it was, as eager does,
            and its results are `Poisoned`. A step with a poisoned operand is skipped; its results, and what it would
            have written, carry that poison on.

        Laws:
            executor.equals_eager, executor.order_kept, executor.replay_stable, executor.failure_contained,
            executor.poison_propagates, executor.randomness_private, executor.plain_results, executor.purity_true,
            executor.stops_between_steps

        Concurrency:
            Called from any thread; an executor serialises runs on its device itself.
        """


@runtime_checkable
class Executor(Protocol):
    """One device that runs programs."""

    name: str
    """Name in the configuration, for example ``torch``."""
    device: str
    """Device in PyTorch's words, for example ``cpu`` or ``cuda:0``."""

    def compile(self, program: Program) -> CompiledProgram:
        """Prepare a checked program.

        Raises:
            UnknownOperatorError, SchemaMismatchError: An operator cannot be run here; names it.

        Laws:
            executor.unknown_operator_named, executor.schema_mismatch_named
        """

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a CPU tensor to the device.

        Ownership:
            The argument is the caller's and may change as soon as this returns.

        Laws:
            executor.put_copies
        """

    def get(self, value: torch.Tensor) -> torch.Tensor:
        """Copy a value to a new dense CPU tensor that is no inference tensor, strides kept where they are dense.

        Laws:
            executor.get_copies
        """

    def random_state(self, seed: int) -> RandomState:
        """Make a session's own stream of random numbers."""

    def close(self) -> None:
        """Give the device back."""


@attrs.frozen
class Effects:
    """What a program does to what it is given, whatever the numbers are.

    Attributes:
        written: Inputs that it may write, or whose sizes it may change, or that share a storage with such a one.
        changes_storages: Whether a value may get another storage, or a storage another size.
        repeats: Whether it gives the same to the last bit if it is run again on the same, as far as it is pure.
        grown: By position among the kept results: the input whose elements the result has, and more of them.
        patched: Inputs that are written in part.
        attended: Inputs (``-1 - i``) and kept results (by position) that attention reads as keys or values.
    """

    written: frozenset[int] = frozenset()
    changes_storages: bool = False
    repeats: bool = False
    grown: Mapping[int, int] = attrs.field(factory=dict)
    patched: frozenset[int] = frozenset()
    attended: frozenset[int] = frozenset()


@runtime_checkable
class CandidProgram(CompiledProgram, Protocol):
    """What a compiled program may have beside the methods of `CompiledProgram`: it says what it does.

    Laws:
        executor.effects_true
    """

    effects: Effects
    """What it may do at most; what it says of caches is believed where being wrong costs time alone."""


@runtime_checkable
class VacatingExecutor(Protocol):
    """What an executor may have beside the methods of `Executor`: values stay while their memory is given back.

    A storage that was vacated has no bytes. Tensors in it keep their sizes, strides and offsets, and are not read or
    written until it is furnished again.

    Laws:
        executor.vacates_exactly
    """

    def can_vacate(self, storage: torch.UntypedStorage) -> bool:
        """Whether the memory of a storage can be given back."""

    def copy_out(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Copy the bytes of a storage to new memory of the host, ``u8[N]``."""

    def vacate(self, storage: torch.UntypedStorage) -> None:
        """Give the memory of a storage back."""

    def furnish(self, storage: torch.UntypedStorage, data: torch.Tensor) -> None:
        """Give a vacated storage memory, and these bytes.

        Args:
            storage: The storage.
            data: ``u8[N]``, on the host or on the device.

        Raises:
            Exception: There is no memory; then the storage stays vacated.
        """


@runtime_checkable
class RelievedExecutor(Protocol):
    """What an executor may have beside the methods of `Executor`: short of memory, it asks and tries again.

    It does so for a step that does nothing but give results, once.
    """

    relief: Callable[[], bool] | None
    """Gives memory back that is not in use, and says whether there was any."""


class ExecutorFactory(Protocol):
    """Makes executors of one kind."""

    name: str
    """Name in the configuration."""

    def devices(self) -> list[str]:
        """List the devices that exist here, best first. Opens none."""

    def open(self, device: str) -> Executor:
        """Open a device; the best there is, if ``device`` is empty.

        Raises:
            ConfigurationError: There is no such device here.

        Laws:
            executor.devices_real
        """

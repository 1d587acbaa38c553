"""The base of executors that run programs with PyTorch."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from djinn.errors import ConfigurationError, ProtocolError
from djinn.ir.program import Program
from djinn.wire.tensors import copied, to_dense_cpu
from djinn_plugins.common.calls.binding import BoundCall, bind
from djinn_plugins.common.calls.switches import switched
from djinn_plugins.common.kinds.executor import Effects, RandomState, Report
from djinn_plugins.common.kinds.guard import CallCheck
from djinn_plugins.common.memory.tensor_bytes import address_of, whole_of
from djinn_plugins.common.operators.attention import attention_operators
from djinn_plugins.common.operators.named_values import named_operators
from djinn_plugins.common.operators.norms import norm_operators
from djinn_plugins.common.operators.random_exchange import exchange_random_state
from djinn_plugins.common.operators.recurrent import recurrent_operators
from djinn_plugins.common.operators.stated_roles import state_role
from djinn_plugins.common.operators.stored_models import stored_operators
from djinn_plugins.common.sparse.operators import define
from djinn_plugins.executor.torch.codegen import Compiled
from djinn_plugins.executor.torch.effects import effects_of
from djinn_plugins.executor.torch.growing import CopiedGrowth, GrowingValues, Growth, growth_of, with_joins
from djinn_plugins.executor.torch.interpreter import interpret
from djinn_plugins.executor.torch.random import TorchRandomState
from djinn_plugins.executor.torch.torchscript import GraphBudget
from djinn_plugins.executor.torch.undo import Overwritten, WriteJournal, noting

__all__ = ("TorchExecutor", "TorchProgram", "no_such_device", "probabilities_of")


class TorchExecutor:
    """Runs programs on one device. A plugin derives its executor from it.

    Concurrency:
        Any thread; one program runs at a time, because the device's default generator is lent to the running session.
    """

    name = "torch"
    """A derived class has its own name."""

    def __init__(self, device: torch.device) -> None:
        self.device = str(device)
        self._device = device
        exchange_random_state()
        define()
        attention_operators()
        norm_operators()
        recurrent_operators()
        stored_operators()
        named_operators()
        state_role()
        self._lock = threading.RLock()
        self._graphs = GraphBudget()
        self.relief: Callable[[], bool] | None = None

    def compile(self, program: Program) -> TorchProgram:
        """Resolve every operator and check its schema against the client's.

        Raises:
            UnknownOperatorError, SchemaMismatchError, ProtocolError: Names the operator.
        """
        return self.compile_checked(program, {})

    def compile_checked(self, program: Program, checks: Mapping[int, CallCheck]) -> TorchProgram:
        """Resolve every operator, and check calls; see `djinn_plugins.common.kinds.executor.SupportsCheckedCompile`."""
        made = TorchProgram(program, bind(program, self._device, checks), self._lock, self.relieve)
        made.keeps_overwritten = self._device.type == "cpu"
        made.graphs = self._graphs if made.keeps_overwritten else None
        return made

    def relieve(self) -> bool:
        """Ask the callback to free memory; see `djinn_plugins.common.kinds.executor.SupportsOutOfMemoryRetry`."""
        return self.relief is not None and self.relief()

    def can_offload(self, storage: torch.UntypedStorage) -> bool:
        """Whether the memory of a storage can be freed; see `djinn_plugins.common.kinds.executor.SupportsOffload`."""
        return storage.device == self._device and bool(storage.resizable())

    def copy_out(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Copy a storage to the host; see `djinn_plugins.common.kinds.executor.SupportsOffload`."""
        with self._lock:
            return self.get(whole_of(storage))

    def offload(self, storage: torch.UntypedStorage) -> None:
        """Free the memory of a storage; see `djinn_plugins.common.kinds.executor.SupportsOffload`."""
        with self._lock:
            storage.resize_(0)

    def restore(self, storage: torch.UntypedStorage, data: torch.Tensor) -> None:
        """Allocate memory for a storage again and fill it.

        See `djinn_plugins.common.kinds.executor.SupportsOffload`.
        """
        with self._lock, torch.inference_mode(mode=False), torch.no_grad():
            storage.resize_(data.numel())
            whole_of(storage).copy_(data)

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a CPU tensor to the device."""
        with torch.inference_mode(mode=False), torch.no_grad():
            if tensor.itemsize == 1:
                # Some of these dtypes have no kernels.
                return tensor.detach().view(torch.uint8).to(self._device, copy=True).view(tensor.dtype)
            return tensor.detach().to(self._device, copy=True)

    def get(self, value: torch.Tensor) -> torch.Tensor:
        """Copy a value to a new dense CPU tensor."""
        with self._lock, torch.inference_mode(mode=False), torch.no_grad():
            made = to_dense_cpu(value)
            return copied(made) if address_of(made) == address_of(value) or made.is_inference() else made

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Move a CPU tensor without another owner there; see `djinn_plugins.common.kinds.executor.SupportsSharing`."""
        return self.put(tensor)

    def lend(self, value: torch.Tensor) -> torch.Tensor:
        """Return a CPU tensor for immediate reading; see `djinn_plugins.common.kinds.executor.SupportsSharing`."""
        with self._lock, torch.inference_mode(mode=False), torch.no_grad():
            return to_dense_cpu(value)

    def spare_room(self) -> GrowingValues:
        """Keep room behind values that grow; see `djinn_plugins.common.kinds.executor.SupportsGrowth`."""
        return GrowingValues(self._lock)

    def default_generator(self) -> torch.Generator:
        """Return the generator that operators draw from if they are given none."""
        return torch.default_generator

    def random_state(self, seed: int) -> RandomState:
        """Create a session's own stream of random numbers."""
        return TorchRandomState(self._device, seed, self._lock, self.default_generator)

    def close(self) -> None:
        """Do nothing: sessions own the values, and PyTorch's allocator owns the memory."""


class TorchProgram:
    """A program bound to PyTorch's operators.

    It is interpreted the first time, and compiled to straight-line Python when it repeats. If it repeats often, and its
    kernels are small, PyTorch's interpreter runs parts of it.

    Attributes:
        growth: Where values may grow into spare room.
        keeps_overwritten: Whether writes may run ahead and be undone. A loop's next write may be beyond the end of a
            tensor: a CPU kernel raises an error, but a GPU can compute nothing any more after that.
        graphs: Room for graphs, if PyTorch's own interpreter may run segments of it.
    """

    growth = Growth()
    can_pause = True
    keeps_overwritten = False
    graphs: GraphBudget | None = None

    def __init__(
        self, program: Program, calls: Sequence[BoundCall], lock: threading.RLock,
        relieve: Callable[[], bool] = lambda: False,
    ) -> None:
        self._program = program
        self._calls = calls
        self._relieve = relieve
        self._lock = lock
        self._is_random = any(call.is_random for call in calls)
        self._switches = calls[0].switches if calls else ()
        self._numbers = sum(calls[step.template].numbers for step in program.steps)
        self._runs = 0
        self._compiled: Compiled | None = None
        self._copied: CopiedGrowth | None = None
        self._undoable: tuple[TorchProgram, WriteJournal] | None = None
        self._draws = any(call.draws for call in calls)
        self._writes = any(call.writes for call in calls)
        self._probabilities = probabilities_of(program, calls)

    def grow(self, join: Callable[[BoundCall], BoundCall]) -> None:
        """Let values grow into spare room, in calls that ``join`` makes; before the first run."""
        self.growth = growth_of(self._program)
        self._copied = CopiedGrowth.of(self._program, self._calls, self.growth.steps)
        self._program, self._calls = with_joins(self._program, self._calls, self.growth.steps, join)

    @cached_property
    def effects(self) -> Effects:
        """Its possible effects; see `djinn_plugins.common.kinds.executor.SupportsEffectReport`."""
        return effects_of(self._program, self._calls)

    def run(self, inputs: list[Any], numbers: Sequence[Any], random: RandomState, report: Report) -> list[Any]:
        """Run once; see `djinn_plugins.common.kinds.executor.CompiledProgram`."""
        return self.run_until((), inputs, numbers, random, report)

    def run_until(
        self, stop: Sequence[BaseException], inputs: list[Any], numbers: Sequence[Any], random: RandomState,
        report: Report,
    ) -> list[Any]:
        """Run once, or a part of it; see `djinn_plugins.common.kinds.executor.SupportsStop`."""
        return self.run_without(inputs, numbers, random, report, {}, stop)

    def run_without(
        self, inputs: list[Any], numbers: Sequence[Any], random: RandomState, report: Report,
        refused: Mapping[int, Exception], stop: Sequence[BaseException] = (),
    ) -> list[Any]:
        """Run once without some steps; see `djinn_plugins.common.kinds.executor.SupportsSkippedSteps`."""
        if len(numbers) != self._numbers:
            raise ProtocolError(f"The program takes {self._numbers} numbers, the run brings {len(numbers)}.")
        # This call sets the thread count of this thread as PyTorch's own loops do; otherwise MKL's FFT uses its own
        # count.
        torch.get_num_threads()
        with self._lock, torch.inference_mode(), switched(self._switches):
            if not self._is_random:
                return self._run(inputs, numbers, report, refused, stop)
            if not isinstance(random, TorchRandomState):
                raise TypeError(f"a TorchRandomState is needed, not {type(random).__name__}")
            with random.lent_to_device():
                return self._run(inputs, numbers, report, refused, stop)

    def is_pure(self, numbers: Sequence[Any]) -> bool:
        """Whether a run has no effects besides its results.

        See `djinn_plugins.common.kinds.executor.CompiledProgram`.
        """
        return not self._draws and self.only_draws(numbers) and not any(
            numbers[index] for index in self._probabilities)

    def only_draws(self, numbers: Sequence[Any]) -> bool:
        """Whether a run does nothing but draw; see `djinn_plugins.common.kinds.executor.SupportsDrawingAhead`."""
        return len(numbers) == self._numbers and (not self._writes or self._writes_only_inside)

    def can_undo(self, numbers: Sequence[Any]) -> bool:
        """Whether writes can be undone; see `djinn_plugins.common.kinds.executor.SupportsUndo`."""
        return self.keeps_overwritten and len(numbers) == self._numbers and not self.effects.changes_storages

    def run_with_undo(
        self, stop: Sequence[BaseException], inputs: list[Any], numbers: Sequence[Any], random: RandomState,
        report: Report, limit_bytes: int,
    ) -> tuple[list[Any], Overwritten]:
        """Run once, and keep what is overwritten; see `djinn_plugins.common.kinds.executor.SupportsUndo`."""
        with self._lock:
            if self._undoable is None:
                journal = WriteJournal()
                self._undoable = TorchProgram(
                    self._program, noting(self._program, self._calls, journal), self._lock), journal
            program, journal = self._undoable
            storages = frozenset(value.untyped_storage()._cdata for position, value in enumerate(inputs)
                                 if position in self.effects.written and isinstance(value, torch.Tensor))
            kept = journal.kept = Overwritten(storages, limit_bytes, self._lock)
            try:
                return program.run_until(stop, inputs, numbers, random, report), kept
            except BaseException:
                kept.restore()
                raise
            finally:
                journal.kept = None

    @cached_property
    def _writes_only_inside(self) -> bool:
        """Whether it writes only to storages that it creates."""
        return not (self.effects.written or self.effects.changes_storages)

    def _run(
        self, inputs: list[Any], numbers: Sequence[Any], report: Report, refused: Mapping[int, Exception],
        stop: Sequence[BaseException],
    ) -> list[Any]:
        self._runs += not refused
        if refused or self._runs == 1:
            return interpret(self._program, self._calls, inputs, numbers, report, refused=refused,
                             relieve=self._relieve, stop=stop)
        if self._compiled is None:
            self._compiled = Compiled(
                self._program, self._calls, self._relieve, graphs=self.graphs, copied=self._copied)
        return self._compiled.run(inputs, numbers, report, stop)


def probabilities_of(program: Program, calls: Sequence[BoundCall]) -> list[int]:
    """Return which numbers of a run are dropout probabilities: if they are zero, no random numbers are drawn."""
    found: list[int] = []
    taken = 0
    for step in program.steps:
        call = calls[step.template]
        found += (taken + index for index in call.probabilities)
        taken += call.numbers
    return found


def no_such_device(executor: str, device: str, devices: Sequence[str]) -> ConfigurationError:
    """Build the error for a missing device."""
    needed = device.partition(":")[0]
    close = difflib.get_close_matches(device, {*devices, "cpu", "cuda:0"} - {device}, 1)
    return ConfigurationError(
        f"The executor {executor} has no device {device!r} here; it has {', '.join(devices)}.",
        hint=f"{f'Did you mean {close[0]}?' if close else 'Correct the device.'} To use a device of another executor, "
             f"install its plugin (djinn-executor-{needed}?), "
             f"and do not let DJINN_PLUGINS switch it off or choose the executor {executor}.")

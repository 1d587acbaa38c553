"""Recordings on the CPU: what a graph is on CUDA, so that everything around it can be tested on any machine.

As with a graph, nothing happens while recording, playing goes by the memory that it was recorded with, and results lie
in memory of the recording, which each time overwrites. All recordings share one pool: one that is played may use the
memory of the results of each one that was made later, so here it fills that memory with rubbish.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from djinn.ir.program import Program
from djinn.ir.schema import facts_of
from djinn.ir.spec import tensors_in
from djinn_plugins.common.calls.binding import bind
from djinn_plugins.common.kinds.guard import CallCheck
from djinn_plugins.executor.cpu.executor import CpuExecutor
from djinn_plugins.executor.cuda.cuda_graphs import NotRecordedError, Shelf
from djinn_plugins.executor.cuda.graph_eligibility import storage_of
from djinn_plugins.executor.cuda.recorded import RecordedProgram


def bytes_of_storage(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


class Undoing(TorchDispatchMode):
    """Remembers what was in the storages that are written and were there before."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.found: set[int] = set()
        self.made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        facts = facts_of(func)
        named = [*zip(facts.argument_names, args, strict=False), *(kwargs or {}).items()]
        for name, argument in named:
            for tensor in tensors_in([argument]):
                storage = storage_of(tensor)
                if storage in self.made:
                    continue
                self.found.add(storage)
                is_written = name in facts.written or name.startswith("running_")
                if is_written and storage not in self.before:
                    memory = bytes_of_storage(tensor)
                    self.before[storage] = memory, memory.clone()
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in([result]):
            self.kept.append(tensor)
            if storage_of(tensor) not in self.found:
                self.made.add(storage_of(tensor))
        return result

    def undo(self) -> None:
        for memory, content in self.before.values():
            memory.copy_(content)


class CpuTake:
    def __init__(
        self, run: Callable[[], list[Any]], results: list[Any], made: set[int], pool: WeakSet[CpuTake]
    ) -> None:
        self.results = results
        self.is_closed = False
        self._run = run
        self._pool = pool
        self._number = 1 + max((take._number for take in pool), default=0)
        pool.add(self)
        self._own: dict[int, tuple[int, torch.Tensor]] = {}
        for position, result in enumerate(results):
            if isinstance(result, torch.Tensor) and storage_of(result) in made:
                self._own[storage_of(result)] = position, bytes_of_storage(result)
        self.size_bytes = sum(len(memory) for _, memory in self._own.values())

    def play(self) -> None:
        assert not self.is_closed
        for take in self._pool:
            if take._number > self._number:
                for _, memory in take._own.values():
                    memory.fill_(0x41)
        results = self._run()
        for position, memory in self._own.values():
            memory.copy_(bytes_of_storage(results[position]))

    def forget(self) -> None:
        del self._run

    def close(self) -> None:
        self.is_closed = True
        self.results = []
        self._own = {}


class CpuRecorder:
    """Records on the CPU; `refuses` makes every recording fail, as one of an operation that waits would."""

    is_usable = True

    def __init__(self, *, refuses: bool = False, limit_bytes: int = 2**20) -> None:
        self.limit_bytes = limit_bytes
        self.refuses = refuses
        self.tries = 0
        self.pool: WeakSet[CpuTake] = WeakSet()

    def settings(self) -> tuple[Any, ...]:
        return (torch.are_deterministic_algorithms_enabled(),)

    def rehearse(self, run: Callable[[], list[Any]]) -> list[Any]:
        return run()

    def record(self, run: Callable[[], list[Any]]) -> CpuTake:
        self.tries += 1
        if self.refuses:
            raise NotRecordedError("as was asked for")
        with Undoing() as undoing:
            try:
                results = run()
            except (RuntimeError, LookupError) as error:
                undoing.undo()
                raise NotRecordedError(str(error)) from None
        undoing.undo()
        self.latest = CpuTake(run, results, undoing.made, self.pool)
        return self.latest


class RecordingExecutor(CpuExecutor):
    """The executor of the CPU, with recordings of whole programs, or only of their segments."""

    def __init__(self, recorder: CpuRecorder | None = None, *, limit: int = 64, whole: bool = True) -> None:
        super().__init__()
        self.whole = whole
        self.recorder = recorder or CpuRecorder()
        self.shelf = Shelf(self.recorder, limit=limit)

    def compile_checked(self, program: Program, checks: Mapping[int, CallCheck]) -> RecordedProgram:
        calls = bind(program, self._device, checks)
        return RecordedProgram(program, calls, self._lock, self._device, self.shelf, **self.options(program))

    def options(self, program: Program) -> dict[str, Any]:
        """How short what is recorded may be."""
        return {"min_saved": -len(program.keep) * 2 if self.whole else len(program.steps) + 1, "least_steps": 1}

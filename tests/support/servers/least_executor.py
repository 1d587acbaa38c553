"""An executor with the required methods only, and one that runs every step as a piece of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from djinn.ir.program import Program
from djinn_plugins.common.calls.checked import CheckedPieces
from djinn_plugins.common.kinds.executor import CompiledProgram, Executor, RandomState, Report
from djinn_plugins.executor.cpu.executor import CpuExecutorFactory


class LeastProgram:
    def __init__(self, inner: CompiledProgram) -> None:
        self._inner = inner

    def run(self, inputs: list[Any], numbers: Sequence[Any], random: RandomState, report: Report) -> list[Any]:
        return self._inner.run(inputs, numbers, random, report)


class LeastExecutor:
    name = "least"

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.device = inner.device

    def compile(self, program: Program) -> CompiledProgram:
        return LeastProgram(self._inner.compile(program))

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._inner.put(tensor)

    def get(self, value: torch.Tensor) -> torch.Tensor:
        return self._inner.get(value)

    def random_state(self, seed: int) -> RandomState:
        return self._inner.random_state(seed)

    def close(self) -> None:
        self._inner.close()


class PieceExecutor(LeastExecutor):
    name = "pieces"

    def compile(self, program: Program) -> CompiledProgram:
        """Check every other template."""
        return CheckedPieces(LeastExecutor(self._inner), program, {
            index: lambda args, kwargs: None for index in range(0, len(program.templates), 2)})


class LeastFactory:
    name = "least"
    made: type[LeastExecutor] = LeastExecutor

    def devices(self) -> list[str]:
        return ["cpu"]

    def open(self, device: str) -> Executor:
        return self.made(CpuExecutorFactory().open(device))


class PieceFactory(LeastFactory):
    name = "pieces"
    made = PieceExecutor

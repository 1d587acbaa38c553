"""Sessions whose values share one limit of memory, and small programs for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from djinn.ir.program import ConstantArgument, ListArgument, NumberArgument, Program, Step, Template, TensorArgument
from djinn.ir.schema import facts_of
from djinn.wire.messages import Batch, Define, Result, Upload
from djinn.wire.tensors import header_of
from djinn_conformance.memory_pressure import device_bytes, expect_honest
from djinn_conformance.subjects import default_plugins
from djinn_plugins.common.kinds.executor import Executor
from djinn_plugins.common.kinds.memory import MemoryOptions
from djinn_plugins.common.operators.operators import operator_named
from djinn_plugins.executor.content_store import Contents, ContentStore
from djinn_plugins.executor.memory.manager import TieredManager
from djinn_plugins.executor.memory.session import TieredMemory
from djinn_plugins.executor.memory.storages import ManagedStorage
from djinn_plugins.executor.service import SessionService

T, N, NONE = TensorArgument(), NumberArgument(), ConstantArgument(None)
SIDE = 32
ROW_BYTES = SIDE * 4


def template(name: str, *arguments: Any) -> Template:
    facts = facts_of(operator_named(name))
    return Template(facts.name, facts.digest, arguments)


PLUS = Program((template("aten::add.Tensor", T, T),), (Step(0, (-1, -2), 1),), 2, (0,))
WRITE = Program((template("aten::mul_.Scalar", T, N),), (Step(0, (-1,), 0),), 1, ())
ROWS = Program((template("aten::slice.Tensor", T, N, N, N),), (Step(0, (-1,), 1),), 1, (0,))
GROW = Program((template("aten::cat", ListArgument((T, T))),), (Step(0, (-1, -2), 1),), 2, (0,))
THROUGH_A_VIEW = Program((template("aten::slice.Tensor", T, N, N, N), template("aten::mul_.Scalar", T, N)),
                         (Step(0, (-1,), 1), Step(1, (0,), 0)), 1, ())
RESIZE = Program((template("aten::resize_", T, N), template("aten::fill_.Scalar", T, N)),
                 (Step(0, (-1,), 0), Step(1, (-1,), 0)), 1, ())
TWO = Program((template("aten::neg", T), template("aten::abs", T), template("aten::slice.Tensor", T, N, N, N)),
              (Step(0, (-1,), 1), Step(1, (-1,), 1), Step(2, (0,), 1)), 1, (0, 1, 2))
ATTEND = Program(
    (template("aten::cat", ListArgument((T, T))), template("aten::scaled_dot_product_attention", T, T, T)),
    (Step(0, (-1, -2), 1), Step(1, (-2, 0, 0), 1)), 2, (0, 1))
PROGRAMS = dict(enumerate((PLUS, WRITE, ROWS, GROW, THROUGH_A_VIEW, RESIZE, TWO, ATTEND), 1))
DEFINE = [Define(number, program) for number, program in PROGRAMS.items()]


def open_executor() -> Executor:
    return default_plugins().find_executor("cpu").value.open("cpu")


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        self.now_s += 1e-3
        return self.now_s


class Room:
    """Sessions that share a limit."""

    def __init__(self, limit_bytes: int, sessions: int = 1, *, keep_bytes: int = 0, **options: Any) -> None:
        self.clock = Clock()
        self.executor = open_executor()
        self.store = ContentStore(keep_bytes)
        self.manager = TieredManager(self.executor, MemoryOptions(limit_bytes, **options), self.store, self.clock)
        self.device = self.manager.device
        self.services = [SessionService(self.executor, travels=True, manager=self.manager,
                                        contents=Contents(self.store, "me") if keep_bytes else None)
                         for _ in range(sessions)]
        for session in range(sessions):
            self.do(session, *DEFINE)

    def do(self, session: int, *commands: Any, tensors: Sequence[torch.Tensor] = (), fetch: Sequence[int] = (),
           ) -> tuple[Result, list[torch.Tensor]]:
        answer = self.services[session].handle(Batch(list(commands), fetch=tuple(fetch), synchronize=True), tensors)
        self.expect_exact(str(commands))
        return answer

    def expect_exact(self, where: str) -> None:
        """Check all accounts against the storages."""
        expect_honest(self.manager, self.services, where)
        held = self.device.accounts
        assert held.held_bytes == device_bytes(self.services), where
        assert held.device_bytes == sum(held.device.values()), where

    def upload(self, session: int, handle: int, tensor: torch.Tensor) -> Result:
        return self.do(session, Upload(handle, header_of(tensor)), tensors=[tensor.clone()])[0]

    def value(self, session: int, handle: int) -> torch.Tensor:
        result, data = self.do(session, fetch=[handle])
        assert not result.failures, result
        return data[0]

    def place(self, session: int, handle: int) -> ManagedStorage:
        found = self.memory(session).places.at(handle)
        assert found is not None
        return found

    def memory(self, session: int) -> TieredMemory:
        memory = self.services[session].memory
        assert isinstance(memory, TieredMemory)
        return memory


def rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, SIDE, generator=torch.Generator().manual_seed(seed))

"""Sessions under memory pressure: values are evicted again and again, and must be restored."""

from __future__ import annotations

import random
import secrets
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from djinn_memory_tiered.manager import MemoryManager
from djinn_memory_tiered.roles import Gone
from djinn_memory_tiered.service import BudgetedService
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from djinn.session.session import Session
from djinn.wire.messages import PROTOCOL_VERSION, Batch, Command, Result, Welcome
from djinn_conformance.assertions import expect_equal
from djinn_conformance.harness import watch_over
from djinn_conformance.machine import Machine, Statistics

__all__ = ("PressedMachine", "Pressure", "expect_exact", "pressed")

_ROOMY_BYTES = 2**40
_TIGHT_HOST_BYTES = 1
"""No room on the host: values that cannot be recomputed stay."""


@attrs.define
class Pressure:
    """How memory is taken away.

    Attributes:
        part: Fraction of the held bytes evicted before each command.
        keepers: The keepers of the session's executors.
        dice: Chooses what to evict.
    """

    part: float = 0.0
    keepers: list[MemoryManager] = attrs.field(factory=list)
    dice: random.Random = attrs.field(factory=lambda: random.Random(0))

    def begin(self, seed: int, part: float, *, has_host: bool) -> None:
        """Begin another program."""
        self.dice.seed(seed)
        self.part = part
        for keeper in self.keepers:
            keeper.host_limit_bytes = 0 if has_host else _TIGHT_HOST_BYTES

    def evicted(self) -> dict[str, int]:
        """Count evictions and restorations."""
        gone = {name.value: sum(keeper.accounts.evicted[name] for keeper in self.keepers) for name in Gone}
        return gone | {"restored": sum(keeper.accounts.restored for keeper in self.keepers)}


class _PressedService(BudgetedService):
    """A session whose values are evicted before each command."""

    pressure: Pressure

    def _carry_out(self, command: Command, uploads: Iterator[torch.Tensor]) -> None:
        with self._keeper.lock:
            for place in list(self.places):
                if self.pressure.dice.random() < self.pressure.part:
                    self._keeper.evict(place)
        super()._carry_out(command, uploads)
        expect_exact(self._keeper, [self], f"after {type(command).__name__}")


def expect_exact(keeper: MemoryManager, services: Sequence[BudgetedService], where: str) -> None:
    """Check that the accounting matches the actual storages."""
    here: dict[int, int] = {}
    ahead: dict[int, int] = {}
    for service in services:
        for place in service.places:
            here[place.storage._cdata] = place.storage.nbytes()
        for value in service.places._values.values():
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                storage = value.untyped_storage()
                here[storage._cdata] = storage.nbytes()
        for value in service._lookahead.results:
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                ahead[storage._cdata] = storage.nbytes()
    held = keeper.accounts
    more = sum(size_bytes for storage, size_bytes in ahead.items() if storage not in here)
    expect_equal((held.device_bytes, sum(held.device.values()), held.ahead_bytes),
                 (sum(here.values()), sum(here.values()), more), "bytes in the books", where)


class _PressedConnection:
    """A session on a separate executor in this process; see `djinn.kinds.transport.Connection`."""

    flush_every = 1024
    bytes_sent = bytes_received = 0

    def __init__(self, session: Session, pressure: Pressure) -> None:
        executor = session.plugins.find_executor(session.config.device).value.open(session.config.device)
        keeper = MemoryManager(executor, _ROOMY_BYTES)
        pressure.keepers.append(keeper)
        self.address = "pressed://"
        self.welcome = Welcome(PROTOCOL_VERSION, str(torch.__version__), sys.version.split()[0], sys.byteorder,
                               executor.device, secrets.token_hex(8))
        self._executor = executor
        self._service = _PressedService(keeper, executor, watch=watch_over(executor))
        self._service.pressure = pressure
        # The caller's modes do not apply on another thread.
        self._thread = ThreadPoolExecutor(1)

    def submit(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> None:
        self.request(batch, tensors)

    def request(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> tuple[Result, list[torch.Tensor]]:
        threads = torch.get_num_threads()

        def work() -> tuple[Result, list[torch.Tensor]]:
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            answer = self._service.handle(batch, tensors)
            self._service.look_ahead()
            return answer

        return self._thread.submit(work).result()

    def close(self) -> None:
        self._service.close()
        self._executor.close()
        self._thread.shutdown()


@contextmanager
def pressed(session: Session) -> Iterator[Pressure]:
    """Run a running session under memory pressure for the length of a block.

    Tensors created in the block belong to it, and must be gone at its end.
    """
    pressure = Pressure()
    with session.lock:
        session.flush()
        before = session.backend
        connections: list[Any] = [_PressedConnection(session, pressure) for _ in before.executors]
        opens = session.backend_opener(session.plugins.settings.changed(recovery="none"))
        session.backend = opens(connections, session.tape, session.released)
    try:
        yield pressure
    finally:
        with session.lock:
            session.flush()
            session.backend.close()
            session.backend = before


class PressedMachine(Machine):
    """Draws programs for a session under memory pressure."""

    pressure: Pressure

    def __init__(self, session: Session, statistics: Statistics) -> None:
        super().__init__(session, statistics)
        self.before = self.pressure.evicted()

    @initialize(seed=st.integers(0, 99), part=st.sampled_from((0.3, 1.0)),
                has_host=st.sampled_from((True, True, False)))
    def press(self, seed: int, part: float, has_host: bool) -> None:
        """Choose how much memory is taken away."""
        self.pressure.begin(seed, part, has_host=has_host)

    def teardown(self) -> None:
        """Finish as every program does, and count evictions."""
        super().teardown()
        for name, count in self.pressure.evicted().items():
            self.statistics.counts[f"evicted {name}"] += count - self.before[name]

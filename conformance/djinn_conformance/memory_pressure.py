"""Sessions under memory pressure: values are evicted again and again, and must be restored."""

from __future__ import annotations

import random
import secrets
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import attrs
import msgspec
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from djinn.session.session import Session
from djinn.wire.messages import PROTOCOL_VERSION, Batch, Result, Upload, Welcome
from djinn_conformance.assertions import expect_equal
from djinn_conformance.harness import other_connections, watch_over
from djinn_conformance.machine import Machine, Statistics
from djinn_plugins.common.kinds.memory import MemoryManager, MemoryOptions, SupportsEviction
from djinn_plugins.executor.service import SessionService

__all__ = ("PressedMachine", "Pressure", "device_bytes", "expect_honest", "pressed")

_ROOMY_BYTES = 2**40
_TIGHT_HOST_BYTES = 1
"""No room on the host: values that cannot be recomputed stay."""


@attrs.define
class Pressure:
    """How memory is taken away.

    Attributes:
        part: Fraction of the held storages evicted before each command.
        managers: The memory managers of the session's executors.
        dice: Chooses what to evict.
    """

    part: float = 0.0
    managers: list[MemoryManager] = attrs.field(factory=list)
    dice: random.Random = attrs.field(factory=lambda: random.Random(0))

    def begin(self, seed: int, part: float, *, has_host: bool) -> None:
        """Begin another program."""
        self.dice.seed(seed)
        self.part = part
        for manager in self.managers:
            manager.limit(MemoryOptions(_ROOMY_BYTES, 0 if has_host else _TIGHT_HOST_BYTES))

    def evict(self, service: SessionService) -> None:
        """Evict some storages of a session."""
        memory = service.memory
        assert isinstance(memory, SupportsEviction), f"{memory} evicts nothing"
        with service.memory.lock:
            for storage in memory.storages():
                if self.dice.random() < self.part:
                    memory.evict(storage)

    def evicted(self) -> dict[str, int]:
        """Count evictions and restorations."""
        found: Counter[str] = Counter(restored=0)
        for report in (manager.report() for manager in self.managers):
            found.update(report.evictions)
            found["restored"] += report.restored
        return dict(found)


def device_bytes(services: Iterable[SessionService]) -> int:
    """Return how much device memory the values of sessions and their results ahead really use."""
    found: dict[int, int] = {}
    for service in services:
        memory = service.memory
        values = [memory.values[handle] for handle in memory.values]
        storages = [value.untyped_storage() for value in (*values, *service.ahead.results)
                    if isinstance(value, torch.Tensor) and value.layout is torch.strided]
        storages += memory.storages() if isinstance(memory, SupportsEviction) else ()
        found |= {storage._cdata: storage.nbytes() for storage in storages}
    return sum(found.values())


def expect_honest(manager: MemoryManager, services: Sequence[SessionService], where: str) -> None:
    """Check that a manager reports the memory that is really used."""
    expect_equal(sum(manager.report().device.values()), device_bytes(services), "reported bytes", where)


class _PressedConnection:
    """A session on a separate executor in this process; see `djinn.kinds.transport.Connection`."""

    flush_every = 1024
    bytes_sent = bytes_received = 0

    def __init__(self, session: Session, pressure: Pressure) -> None:
        executor = session.plugins.find_executor(session.config.device).value.open(session.config.device)
        self._manager: MemoryManager = session.plugins.choose("memory", "tiered").open(
            executor, MemoryOptions(_ROOMY_BYTES))
        pressure.managers.append(self._manager)
        self._pressure = pressure
        self.address = "pressed://"
        self.welcome = Welcome(PROTOCOL_VERSION, str(torch.__version__), sys.version.split()[0], sys.byteorder,
                               executor.device, secrets.token_hex(8))
        self._executor = executor
        self._service = SessionService(executor, watch=watch_over(executor), manager=self._manager)
        # The caller's modes do not apply on another thread.
        self._thread = ThreadPoolExecutor(1)

    def submit(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> None:
        self.request(batch, tensors)

    def request(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> tuple[Result, list[torch.Tensor]]:
        threads = torch.get_num_threads()

        def work() -> tuple[Result, list[torch.Tensor]]:
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            answer = self._handled(batch, tensors)
            self._service.look_ahead()
            return answer

        return self._thread.submit(work).result()

    def _handled(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> tuple[Result, list[torch.Tensor]]:
        """Execute a batch command by command, and evict values before each."""
        uploads = iter(tensors)
        for command in batch.commands:
            self._pressure.evict(self._service)
            given = [next(uploads)] if isinstance(command, Upload) else []
            self._service.handle(Batch([command], metered=batch.metered), given)
            expect_honest(self._manager, [self._service], f"after {type(command).__name__}")
        return self._service.handle(msgspec.structs.replace(batch, commands=[]), [])

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
    with other_connections(session, lambda: [_PressedConnection(session, pressure) for _ in session.backend.executors]):
        yield pressure


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

"""Sessions whose uploads lie in memory that they share: each program runs in two of them, command by command."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import attrs
import msgspec
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from djinn.session.session import Session
from djinn.wire.messages import PROTOCOL_VERSION, Batch, Result, Upload, Welcome
from djinn_conformance.assertions import expect
from djinn_conformance.harness import other_connections, watch_over
from djinn_conformance.machine import Machine, Statistics
from djinn_plugins.common.memory.kept_memory import KeptMemory
from djinn_plugins.common.memory.tensor_bytes import bytes_of
from djinn_plugins.executor.content_store import Contents, ContentStore
from djinn_plugins.executor.service import SessionService

__all__ = ("Sharing", "SharingMachine", "sharing")

_ROOM_BYTES = 2**26


@attrs.define
class Sharing:
    """How uploads are shared.

    Attributes:
        stores: Kept uploads, by executor.
        shared: Uploads that lie in memory of both sessions.
        drops: Whether a kept upload is dropped as soon as no handle holds it, as when room is needed.
    """

    stores: list[ContentStore] = attrs.field(factory=list)
    shared: int = 0
    drops: bool = False


class _TwiceConnection:
    """Two sessions of one owner that do the same; see `djinn.kinds.transport.Connection`."""

    flush_every = 1024
    bytes_sent = bytes_received = 0

    def __init__(self, session: Session, sharing: Sharing) -> None:
        executor = session.plugins.find_executor(session.config.device).value.open(session.config.device)
        self.address = "twice://"
        self.welcome = Welcome(PROTOCOL_VERSION, str(torch.__version__), sys.version.split()[0], sys.byteorder,
                               executor.device, secrets.token_hex(8))
        self._sharing = sharing
        self._executor = executor
        self._store = store = ContentStore(_ROOM_BYTES, memory=KeptMemory.opened(), least_bytes=1)
        sharing.stores.append(store)
        self._services = [SessionService(executor, travels=True, contents=Contents(store, "owner"),
                                         watch=watch_over(executor)) for _ in range(2)]
        # The caller's modes do not apply on another thread.
        self._thread = ThreadPoolExecutor(1)

    def submit(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> None:
        self.request(batch, tensors)

    def request(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> tuple[Result, list[torch.Tensor]]:
        threads = torch.get_num_threads()

        def work() -> tuple[Result, list[torch.Tensor]]:
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            return self._handled(batch, tensors)

        return self._thread.submit(work).result()

    def _handled(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> tuple[Result, list[torch.Tensor]]:
        """Execute a batch command by command, each in both sessions before the next."""
        uploads = iter(tensors)
        for command in batch.commands:
            given = [next(uploads)] if isinstance(command, Upload) else []
            before = self._shared_bytes()
            for service in self._services:
                service.handle(Batch([command], metered=batch.metered), [tensor.clone() for tensor in given])
            self._sharing.shared += self._shared_bytes() > before
            if self._sharing.drops:
                self._store.drop_spare()
        answers = [service.handle(msgspec.structs.replace(batch, commands=[]), []) for service in self._services]
        first, second = ([bytes_of(tensor).clone() for tensor in data] for _, data in answers)
        for position, (mine, other) in enumerate(zip(first, second, strict=True)):
            expect(torch.equal(mine, other), "a value", got="another in the other session", wanted="the same in both",
                   where=f"fetched value {position}")
        result, data = answers[1]
        return result, [tensor.clone() for tensor in data]

    def _shared_bytes(self) -> int:
        return min(service.memory.values.shared_bytes for service in self._services)

    def close(self) -> None:
        for service in self._services:
            service.close()
        self._executor.close()
        self._thread.shutdown()


@contextmanager
def sharing(session: Session) -> Iterator[Sharing]:
    """Run a running session twice, with shared uploads, for the length of a block.

    Tensors created in the block belong to it, and must be gone at its end.
    """
    made = Sharing()
    with other_connections(session, lambda: [_TwiceConnection(session, made) for _ in session.backend.executors]):
        yield made


class SharingMachine(Machine):
    """Draws programs for sessions that share uploads."""

    sharing: Sharing

    def __init__(self, session: Session, statistics: Statistics) -> None:
        super().__init__(session, statistics)
        self.before = self.sharing.shared

    @initialize(drops=st.booleans())
    def keep(self, drops: bool) -> None:
        """Choose how long uploads are kept."""
        self.sharing.drops = drops

    def teardown(self) -> None:
        """Finish as every program does, and count shared uploads."""
        super().teardown()
        self.statistics.counts["shared"] += self.sharing.shared - self.before

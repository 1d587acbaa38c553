"""Feeds tampered frames to the code of a server in this process, at the rate of the code.

``python -m support.network.frame_feeder CORPUS COUNT SEED JOURNAL DEVICE`` prints a report as JSON. The journal has the
frames that were fed last when the process dies.

On ``cpu`` operators run, and a guard watches, as in a worker. On ``meta`` there is neither, so that more of what comes
reaches what is behind the guard.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import gc
import json
import mmap
import os
import resource
import struct
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from support.network.frames import Frames, Mutated, Mutator, load

from djinn.errors import DjinnError, ProtocolError
from djinn.wire.messages import Batch, Poisoned
from djinn_plugins.common.kinds.executor import RandomState
from djinn_plugins.common.kinds.guard import Bounds
from djinn_plugins.device.shapes.shapes import MetaShapes
from djinn_plugins.executor.content_store import Contents, ContentStore
from djinn_plugins.executor.cpu.executor import CpuExecutor
from djinn_plugins.executor.service import SessionService
from djinn_plugins.executor.torch.executor import TorchExecutor
from djinn_plugins.executor.torch.random import TorchRandomState
from djinn_plugins.guard.guard import CoreGuard
from djinn_plugins.server.limits import Allowances
from djinn_plugins.server.memory import return_memory
from djinn_plugins.server.tenant_limits import Limits
from djinn_plugins.transport.tcp.stream import FrameStream, views_of

MEMORY_BYTES = 2**29
"""What operations may allocate beyond what the process has; more fails, as on a machine that is full."""
BOUNDS = Bounds(program_bytes=MEMORY_BYTES)
ROUND = 250
"""Tampered frames that one session is told before another begins."""
HANG_S = 60
JOURNAL_BYTES = 2**20
RECENT = 8
"""Frames in the journal: what kills a process is often one frame after the one that did the harm."""
SHOWN = 20
PARTS = 8
"""How often in the course of it memory is looked at."""


class Bytes:
    """Bytes in memory, read as a connection is; see `djinn_plugins.transport.tcp.sockets.ByteStream`."""

    def __init__(self) -> None:
        self.data = memoryview(b"")
        self.bytes_received = 0
        self.unread_bytes = 0

    def take(self, length: int) -> memoryview:
        taken, self.data = self.data[:length], self.data[length:]
        self.bytes_received += len(taken)
        return taken

    def receive(self, views: Sequence[memoryview]) -> int:
        received = 0
        for view in views:
            taken = self.take(len(view))
            if taken:
                view[:len(taken)] = taken
            received += len(taken)
            if len(taken) < len(view):
                break
        return received


class Journal:
    """The last frames that were fed, in memory that outlives the process."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(RECENT * JOURNAL_BYTES))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._count = 0

    def note(self, frame: bytes) -> None:
        at = self._count % RECENT * JOURNAL_BYTES
        self._count += 1
        entry = struct.pack("<QQ", self._count, len(frame)) + frame[:JOURNAL_BYTES - 16]
        self._map[at:at + len(entry)] = entry

    @staticmethod
    def read(path: Path) -> list[tuple[int, bytes]]:
        """The frames and their numbers, the last one last."""
        data = path.read_bytes()
        found = []
        for at in range(0, len(data), JOURNAL_BYTES):
            count, length = struct.unpack_from("<QQ", data, at)
            found.append((count, data[at + 16:at + 16 + length]))
        return sorted(entry for entry in found if entry[0])


class ShapesOnly(TorchExecutor):
    """Computes what comes of operators but for the numbers."""

    def __init__(self) -> None:
        super().__init__(torch.device("meta"))

    def lend(self, value: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(value, device="cpu").contiguous()

    def random_state(self, seed: int) -> RandomState:
        return TorchRandomState(torch.device("cpu"), seed, self._lock, self.default_generator)


class Feeder:
    """The code of a server, from bytes to bytes, in one session after the other."""

    def __init__(self, sessions: Sequence[Frames], journal: Journal, device: str) -> None:
        self._sessions = sessions
        self._journal = journal
        self._executor = ShapesOnly() if device == "meta" else CpuExecutor()
        self._guard = None if device == "meta" else CoreGuard()
        if self._guard is not None:
            self._guard.prepare()
        self._store = ContentStore(2**24)
        self._stream = Bytes()
        self._frames = FrameStream(self._stream)  # type: ignore[arg-type]  # all of it that reading takes
        self._service: SessionService | None = None
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.kinds: collections.Counter[str] = collections.Counter()
        self.unhandled: list[str] = []
        self.slowest: tuple[float, str] = (0.0, "")

    def begin(self, session: int) -> None:
        """Begin a session, and have it go well for a while."""
        self.end()
        contents = Contents(self._store, f"owner {session % 2}") if session % 3 else None
        allowance = Allowances(Limits(handles=20_000)).open()
        watch = None if self._guard is None else self._guard.watch(BOUNDS, MetaShapes())
        self._service = SessionService(
            self._executor, travels=True, contents=contents, allowance=allowance, watch=watch)
        for frame in self._sessions[session][1:]:
            # The wire's examples have frames that are refused even as they are.
            with contextlib.suppress(DjinnError, EOFError):
                self._feed_one(frame)

    def end(self) -> None:
        if self._service is not None:
            self._service.close()
            self._service = None

    def rest(self) -> int:
        """Let go of everything, and return the bytes that are resident then."""
        self.end()
        self._store = ContentStore(2**24)
        gc.collect()
        return_memory(self._executor)
        return resident_bytes()

    def feed(self, mutated: Mutated) -> None:
        self.kinds[mutated.kind] += 1
        for frame in mutated.frames:
            self._journal.note(frame)
            began = time.perf_counter()
            try:
                outcome = self._feed_one(frame)
            except (DjinnError, EOFError) as error:
                outcome = type(error).__name__
            except Exception:  # what a server would call a session that failed
                outcome = "unhandled"
                if len(self.unhandled) < SHOWN:
                    self.unhandled.append(f"{mutated.kind}: {traceback.format_exc()}\n{frame[:4000].hex()}")
            self.outcomes[outcome] += 1
            self.slowest = max(self.slowest, (time.perf_counter() - began, f"{mutated.kind} {frame[:4000].hex()}"))

    def _feed_one(self, frame: bytes) -> str:
        """Read, carry out, run ahead and answer, as `djinn_plugins.server.server` does."""
        self._stream.data = memoryview(frame)
        received = self._frames.read()
        if received is None:
            return "nothing"
        sequence, message, tensors = received
        if not isinstance(message, Batch):
            raise ProtocolError(f"A {type(message).__name__} where a Batch was expected.")
        service = self._service
        assert service is not None
        result, data = service.handle(message, tensors)
        if message.wants_reply:
            for view in views_of(sequence, result, data):
                len(view)
        while service.can_look_ahead and service.look_ahead():
            pass
        return "failed" if result.failures or any(isinstance(item, Poisoned) for item in result.items) else "done"


def resident_bytes(process: int | str = "self") -> int:
    """Memory of a process's own: what is mapped of libraries grows with what was executed of them."""
    _, resident, shared, *_ = map(int, Path(f"/proc/{process}/statm").read_text().split())
    return (resident - shared) * resource.getpagesize()


def limit_memory(process: int, more_bytes: int) -> None:
    """Let a process have so much more address space than now."""
    now = int(Path(f"/proc/{process}/statm").read_text().split()[0]) * resource.getpagesize()

    def limit() -> None:
        _, hard = resource.prlimit(process, resource.RLIMIT_AS)
        resource.prlimit(process, resource.RLIMIT_AS, (now + more_bytes, hard))

    said = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    user, group = (int(said[kind].split()[0]) for kind in ("Uid", "Gid"))
    if user == os.getuid():
        limit()
        return
    # A worker with a user of its own; only that one may limit it.
    child = os.fork()
    if child == 0:
        try:
            os.setresgid(group, group, group)
            os.setresuid(user, user, user)
            limit()
            os._exit(0)
        finally:
            os._exit(1)
    if os.waitpid(child, 0)[1] != 0:
        raise PermissionError(f"The memory of process {process} of user {user} cannot be limited.")


def main() -> None:
    corpus, count, seed, journal = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    faulthandler.enable()
    torch.set_num_threads(1)
    sessions = load(corpus)
    mutator = Mutator(sessions, seed)
    feeder = Feeder(sessions, Journal(journal), sys.argv[5])
    limit_memory(os.getpid(), MEMORY_BYTES)
    began = time.monotonic()
    resident: list[int] = []
    fed = session = 0
    while fed < count:
        if fed >= count * (len(resident) + 1) // PARTS:
            resident.append(feeder.rest())
        feeder.begin(session % len(sessions))
        for _ in range(ROUND):
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            feeder.feed(mutator.next(session % len(sessions)))
            fed += 1
        session += 1
    faulthandler.cancel_dump_traceback_later()
    resident.append(feeder.rest())
    report: dict[str, Any] = {
        "frames": sum(feeder.outcomes.values()), "seconds": time.monotonic() - began, "outcomes": feeder.outcomes,
        "kinds": feeder.kinds, "unhandled": feeder.unhandled, "slowest_s": feeder.slowest[0],
        "slowest": feeder.slowest[1], "resident": resident,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()

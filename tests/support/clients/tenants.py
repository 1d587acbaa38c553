"""Tenants that want a server's device: programs of a known length, and sessions that ask for them all the time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Self

import torch

from djinn.errors import DjinnError
from djinn.ir.phase import ExecutionPhase
from djinn.ir.program import Program, Step, Template, TensorArgument
from djinn.ir.schema import facts_of
from djinn.kinds.transport import ConnectOptions
from djinn.wire.messages import Batch, Define, Run, Upload
from djinn.wire.tensors import header_of
from djinn_plugins.transport.tcp.client import SocketConnection, connect

SIZE = 128
MATRIX = torch.eye(SIZE)
_PRODUCT = Template("aten::mm", facts_of(torch.ops.aten.mm.default).digest, (TensorArgument(), TensorArgument()))


def products(count: int) -> Program:
    """A program of so many products of matrices, one after the other."""
    steps = tuple(Step(0, (-1 if n == 0 else n - 1, -1), 1) for n in range(count))
    return Program((_PRODUCT,), steps, 1, (count - 1,))


def session(address: str, token: str = "", patience_s: float = 60) -> SocketConnection:
    return connect(address, ConnectOptions(token=token, connect_timeout_s=patience_s))


class Worked:
    """A session that has a program, and asks for it.

    Args:
        address: Of the server.
        token: The tenant's.
        count: Products in the program.
        phase: What its messages say they are.
    """

    def __init__(self, address: str, token: str, count: int,
                 phase: ExecutionPhase = ExecutionPhase.UNKNOWN) -> None:
        self.connection = session(address, token)
        self.phase = phase
        self._handle = 1
        result, _ = self.connection.request(Batch(
            [Upload(1, header_of(MATRIX)), Define(1, products(count))], synchronize=True), [MATRIX])
        assert not result.failures
        for _ in range(3):
            self.ask()
        # What a session uses before it is sent a value hardly counts.
        self.connection.request(Batch([], fetch=(1,)), ())

    def ask(self, runs: int = 1, *, waits: bool = True) -> float:
        """Have the program run so many times, and return how long that took."""
        commands = []
        for _ in range(runs):
            self._handle += 1
            commands.append(Run(1, (1,), [], (self._handle,), (self._handle,)))
        began = time.perf_counter()
        if not waits:
            self.connection.submit(Batch(commands, phase=self.phase), ())
            return 0.0
        result, _ = self.connection.request(Batch(commands, synchronize=True, phase=self.phase), ())
        assert not result.failures, result.failures[0].message
        return time.perf_counter() - began

    def close(self) -> None:
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def products_for(worked: Worked, seconds: float, count: int) -> int:
    """How many products take so long, given a session whose program has ``count`` of them."""
    return max(1, round(seconds * count / min(worked.ask(4) / 4 for _ in range(15))))


class Saturating:
    """A thread that has a session's program run all the time, within a ``with`` statement; pipelined, a few ahead.

    At the end of the block, the session ends too.

    Attributes:
        done: Programs that are through.
        error: Why it has ended, if it was not told to.
    """

    def __init__(self, worked: Worked, ahead: int = 4, pause: Callable[[], float] | None = None) -> None:
        self._worked = worked
        self._ahead = ahead
        self._pause = pause
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.done = 0
        self.took_s: list[float] = []
        self.error: DjinnError | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._worked.close()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                for _ in range(self._ahead - 1):
                    self._worked.ask(waits=False)
                self.took_s.append(self._worked.ask())
                self.done += self._ahead
                if self._pause is not None:
                    self._stopping.wait(self._pause())
        except DjinnError as error:
            self.error = error


def percentile(times: list[float], part: float) -> float:
    return sorted(times)[min(len(times) - 1, int(part * len(times)))]

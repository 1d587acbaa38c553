"""A crowd of clients: processes that are forked from one which has imported PyTorch and djinn.

An interpreter with PyTorch needs some 300 MB; what a fork changes of it is a tenth of that. A session belongs to a
process, so each client is one. What happens in a client goes to the process that has forked it through a pipe.
"""

from __future__ import annotations

import contextlib
import enum
import gc
import importlib
import os
import random
import select
import signal
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

import attrs
import torch
from support.scale.stored_models import StoredModel

import djinn

REQUESTS = 40
"""Of a session, at most."""
NICENESS = 5
"""Clients give way to the server, which has a machine of its own elsewhere."""
DEVICE = "remote_accelerator:0"
_EVENT = struct.Struct("<BHdd")


class Kind(enum.IntEnum):
    """What has happened in a client."""

    SESSION = 0
    """A session has begun and has a model; it took so long."""
    ANSWER = 1
    """A request was answered as eager PyTorch would."""
    WRONG = 2
    """A request was answered with something else."""
    LOST = 3
    """A request, or the beginning of a session, ended with an error, which the client's log has."""
    RECOVERED = 4
    """As `ANSWER`, and the session's worker had died meanwhile, so that its values were computed again."""


@attrs.frozen
class Event:
    """What has happened.

    Attributes:
        kind: What.
        client: To whom.
        at_s: When, by the monotonic clock of the machine.
        took_s: How long it took.
    """

    kind: Kind
    client: int
    at_s: float
    took_s: float


@attrs.frozen
class Orders:
    """What a client does: one session after the other until the time is over.

    Attributes:
        number: Which client it is.
        address: The server.
        token: Its tenant's.
        models: One of which each session loads.
        until_s: When to end, by the monotonic clock.
        pause_s: Mean pause between an answer and the next request.
        crashes: Fraction of its sessions in which its process is killed.
        log: Where it writes its errors.
    """

    number: int
    address: str
    token: str
    models: Sequence[StoredModel]
    until_s: float
    pause_s: float
    crashes: float
    log: Path


class _Client:
    def __init__(self, orders: Orders, pipe: int, seed: int) -> None:
        self._orders = orders
        self._pipe = pipe
        self._random = random.Random(f"{seed}/{orders.number}")

    def live(self) -> None:
        """Hold one session after the other until the time is over."""
        os.nice(NICENESS)
        while time.monotonic() < self._orders.until_s:
            began_s = time.monotonic()
            try:
                for kind in self.session():
                    now_s = time.monotonic()
                    self._tell(kind, now_s, now_s - began_s)
                    time.sleep(self._random.expovariate(1 / self._orders.pause_s))
                    began_s = time.monotonic()
            except Exception:  # it is counted, and written down
                with self._orders.log.open("a") as log:
                    traceback.print_exc(file=log)
                self._tell(Kind.LOST, time.monotonic(), time.monotonic() - began_s)
                time.sleep(1)

    def session(self) -> Iterator[Kind]:
        """Hold a session, and say what happens in it."""
        djinn.init(server=self._orders.address, token=self._orders.token, recovery="replay")
        if is_last := self._random.random() < self._orders.crashes:
            signal.setitimer(signal.ITIMER_REAL, self._random.uniform(0.1, 5.0))
        model = self._random.choice(self._orders.models)
        module = model.with_weights(djinn.models.load(model.name))
        yield Kind.SESSION
        recoveries = 0
        for _ in range(self._random.randrange(1, REQUESTS)):
            if time.monotonic() > self._orders.until_s:
                break
            case = self._random.randrange(len(model.inputs))
            with torch.no_grad():
                answer = module(model.inputs[case].to(DEVICE)).cpu()
            before, recoveries = recoveries, djinn.stats()["recoveries"]
            right = Kind.RECOVERED if recoveries > before else Kind.ANSWER
            yield right if torch.equal(answer, model.answers[case]) else Kind.WRONG
        while is_last:
            time.sleep(1)  # the timer ends the process
        djinn.shutdown()

    def _tell(self, kind: Kind, at_s: float, took_s: float) -> None:
        os.write(self._pipe, _EVENT.pack(kind, self._orders.number, at_s, took_s))


def _forked(work: Callable[[], None]) -> int:
    """Fork a process that works and ends; return its number."""
    if process := os.fork():
        return process
    status = 1
    try:
        warnings.simplefilter("ignore")
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it ends the process at once
        work()
        status = 0
    except Exception:  # nobody catches it
        traceback.print_exc()
    finally:
        os._exit(status)


class Crowd:
    """Clients in processes, within a ``with`` statement; the calling process must have one thread.

    Args:
        seed: Of their choices.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._reader, self._writer = os.pipe()
        self._living: dict[int, Orders] = {}
        self._forks = 0
        self.crashed = 0
        self.failed: list[str] = []

    def __len__(self) -> int:
        return len(self._living)

    def __enter__(self) -> Self:
        gc.freeze()  # the collector of a fork need not copy pages by looking through them
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._living:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        os.close(self._reader)
        os.close(self._writer)

    @property
    def processes(self) -> list[int]:
        """Those that live."""
        return list(self._living)

    def add(self, orders: Orders) -> None:
        """Let another client begin."""
        self._forks += 1
        client = _Client(orders, self._writer, self._seed + self._forks)
        self._living[_forked(client.live)] = orders

    def prepare(self, orders: Orders) -> None:
        """Import what a session imports, so that clients have it from this process."""
        reader, writer = os.pipe()
        client = _Client(attrs.evolve(orders, crashes=0.0), writer, self._seed)

        def work() -> None:
            list(client.session())
            with os.fdopen(writer, "w") as names:
                names.write("\n".join(sys.modules))

        process = _forked(work)
        os.close(writer)
        with os.fdopen(reader) as names:
            for name in names.read().splitlines():
                with contextlib.suppress(Exception):  # some are made by others that are imported
                    importlib.import_module(name)
        assert not os.waitpid(process, 0)[1], orders.log.read_text()

    def events(self, patience_s: float) -> Iterator[Event]:
        """Wait for what happens, for a while."""
        until_s = time.monotonic() + patience_s
        while select.select([self._reader], [], [], max(0.0, until_s - time.monotonic()))[0]:
            for kind, *rest in _EVENT.iter_unpack(os.read(self._reader, 2000 * _EVENT.size)):
                yield Event(Kind(kind), *rest)

    def replace(self) -> None:
        """Look which clients have ended; for one that was killed, another one begins."""
        for process, orders in list(self._living.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            if not ended:
                continue
            del self._living[process]
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
                self.crashed += 1
                self.add(orders)
            elif status:
                self.failed.append(f"client {orders.number} ended with {os.waitstatus_to_exitcode(status)}")

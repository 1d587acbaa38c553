"""A session on an executor in this process."""

from __future__ import annotations

import atexit
import contextlib
import queue
import secrets
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TypeAlias

import torch

from djinn.errors import (
    DjinnError,
    OperationCancelledError,
    TransportError,
    UnknownOperatorError,
)
from djinn.ir.program import Template
from djinn.ir.schema import facts_of
from djinn.kinds.transport import ConnectOptions
from djinn.wire.messages import PROTOCOL_VERSION, Batch, Define, Forget, PeerHello, Result, Run, RunDelta, Welcome
from djinn_plugins.client.upload_dedup import after
from djinn_plugins.common.calls.switches import Switches, switches
from djinn_plugins.common.device_report import facts_of_device
from djinn_plugins.common.interrupts import SessionLock, deferral
from djinn_plugins.common.kinds.executor import Executor
from djinn_plugins.common.kinds.transport import LaterReply, PeerConnection
from djinn_plugins.common.operators.operators import operator_named
from djinn_plugins.executor.mailbox import InboxRegistry
from djinn_plugins.executor.peer_exchange import DRAIN_S, LocalPeer, PeerExchange
from djinn_plugins.executor.service import SessionService
from djinn_plugins.transport.local.transport import LocalTransport

__all__ = ("LocalConnection", "connect_peer")

MAX_BATCHES = 64
"""Maximum batches that wait for the executor; recording continues until then."""
FLUSH_EVERY = 1024
"""Executor and recording share one interpreter, which runs one of them at a time, so short batches have only costs."""

_room = InboxRegistry()
"""The mailboxes of all sessions in this process."""
LOOK_S = 0.1
"""How often a thread that waits for the executor checks for an interrupt."""
_open: weakref.WeakSet[LocalConnection] = weakref.WeakSet()
_Answer: TypeAlias = tuple[Result, list[torch.Tensor]]


class LocalConnection:
    """A session on an executor in this process.

    The executor runs on its own thread, where none of the caller's modes (inference, autocast, function or dispatch
    modes) apply, and overlaps with recording. The caller blocks for a batch that needs an answer; for one with uploads,
    whose tensors belong to the caller; and for one for which the executor borrows process-wide state that the caller
    may also use: the default generator for random numbers, and the default dtype and PyTorch's process-wide switches if
    they have changed since. The executor computes with the caller's number of threads.
    """

    def __init__(self, address: str, executor: Executor) -> None:
        self.address = address
        self._mailbox = _room.open()
        self.welcome = Welcome(PROTOCOL_VERSION, torch.__version__, sys.version.split()[0], sys.byteorder,
                               executor.device, secrets.token_hex(8), mailbox=self._mailbox.key,
                               facts=facts_of_device(executor))
        self.flush_every = FLUSH_EVERY
        self.bytes_sent = 0
        self.bytes_received = 0
        self._executor = executor
        self._post = PeerExchange(self.welcome.session, self._mailbox, self._carry, self._is_gone)
        self._service = SessionService(executor, post=self._post)
        self._work: queue.SimpleQueue[tuple[Callable[[], _Answer], Future[_Answer]] | None] = queue.SimpleQueue()
        self._closed = False
        self._later: deque[LaterReply] = deque()
        """Values that were asked for without waiting; see `later_values`."""
        self._unfinished: deque[tuple[Future[_Answer], list[DjinnError]]] = deque()
        """Queued and running batches, with the lists that stop them; see
        `djinn_plugins.executor.service.SessionService.handle`."""
        self._owed: list[Future[_Answer]] = []
        """Answers that were not delivered, because the waiting caller was interrupted."""
        self._needs: dict[int, tuple[bool, set[str], set[Switches]]] = {}
        """By program: whether it may draw random numbers, and the default dtypes and the switches that it needs."""
        self._thread = threading.Thread(target=self._serve, name="djinn-local-executor", daemon=True)
        self._thread.start()
        if not _open:
            atexit.unregister(_end_all)
            atexit.register(_end_all)
        _open.add(self)

    def submit(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> None:
        """Execute a batch that needs no answer."""
        borrows = self._borrows(batch)
        done = self._carry_out(batch, tensors)
        if borrows:
            self._lend(done)
        elif tensors:
            _wait(done)

    def request(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> _Answer:
        """Execute a batch and return its answer."""
        borrows = self._borrows(batch)
        done = self._carry_out(batch, tensors)
        # Kept until it is delivered: failures are reported only once.
        self._owed.append(done)
        self._lend(done) if borrows else _wait(done)
        told = Result()
        for earlier in self._owed[:-1]:
            told = after(told, earlier.result()[0])
        self._owed.clear()
        result, data = done.result()
        return after(told, result), data

    def later_values(self) -> list[LaterReply]:
        """Return arrived values; see `djinn_plugins.common.kinds.transport.SupportsLaterValues.later_values`."""
        return [self._later.popleft() for _ in range(len(self._later))]

    def cancel(self) -> None:
        """Drop queued batches and stop the running one; see `djinn.kinds.transport.SupportsCancellation.cancel`."""
        self._stop(OperationCancelledError("The operation was cancelled by an interrupt before it ran.",
                                           hint="Compute it again."))

    def close(self) -> None:
        """End the session and its thread."""
        if self._closed:
            return
        self._closed = True
        self._work.put(None)
        # Values that wait there for another session must not block the thread.
        _room.remove(self._mailbox)
        self.end_thread()
        self._post.close(DRAIN_S)
        self._service.close()
        self._executor.close()

    def end_thread(self) -> None:
        """Wait until the running operator has ended. No other operator runs after it."""
        self._work.put(None)
        self._stop(OperationCancelledError("The operation was dropped: its session has ended."))
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _stop(self, reason: DjinnError) -> None:
        for _, stop in list(self._unfinished):
            stop.append(reason)

    def _lend(self, done: Future[_Answer]) -> None:
        """Wait for a batch that borrows state of the caller; after an interrupt, wait at least until it is returned."""
        try:
            _wait(done)
        except BaseException:
            self.cancel()
            wait([done])
            raise

    def _is_gone(self) -> bool:
        return self._closed

    def _carry(self, address: str, peer: PeerHello) -> PeerConnection:
        return LocalTransport().connect_peer(address, peer, ConnectOptions(is_gone=self._is_gone))

    def _carry_out(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> Future[_Answer]:
        if self._closed:
            raise TransportError(f"The session on {self.address} is closed.", hint="Call djinn.init() again.")
        done: Future[_Answer] = Future()
        stop: list[DjinnError] = []
        threads = torch.get_num_threads()

        def work() -> _Answer:
            # PyTorch's thread count is per thread, and libraries round differently with another count.
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            return self._handled(batch, tensors, stop)

        waits_for = self._unfinished[0][0] if len(self._unfinished) >= MAX_BATCHES else None
        self._unfinished.append((done, stop))
        self._work.put((work, done))
        if waits_for is not None:
            _wait(waits_for)
        return done

    def _handled(self, batch: Batch, tensors: Sequence[torch.Tensor], stop: Sequence[DjinnError]) -> _Answer:
        if not batch.later:
            return self._service.handle(batch, tensors, stop)
        values: tuple[Result | None, list[torch.Tensor]] = None, []
        try:
            answer = self._service.handle(batch, tensors, stop)
            values = self._service.later_values(batch)
            return answer
        finally:
            self._later.append((batch.later, *values))

    def _borrows(self, batch: Batch) -> bool:
        """Whether programs of the batch may draw random numbers, or need another default dtype or other switches.

        Remembers which do.
        """
        borrows = False
        here, set_here = str(torch.get_default_dtype()).removeprefix("torch."), switches()
        for command in batch.commands:
            if isinstance(command, Define):
                templates = command.body.templates
                self._needs[command.program] = (
                    any(map(_is_random, templates)), {t.default_dtype for t in templates},
                    {t.switches for t in templates})
            elif isinstance(command, Forget):
                for program in command.programs:
                    self._needs.pop(program, None)
            elif isinstance(command, (Run, RunDelta)):
                is_random, default_dtypes, needed = self._needs.get(command.program, (False, set(), set()))
                borrows = borrows or is_random or not (default_dtypes <= {"", here} and needed <= {set_here})
        return borrows

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            work, done = item
            try:
                answer = work()
            except BaseException as error:  # noqa: BLE001  # not swallowed: the waiting caller receives it
                self._unfinished.popleft()
                done.set_exception(error)
            else:
                self._unfinished.popleft()
                done.set_result(answer)
                del answer
            del item, work, done


def connect_peer(peer: PeerHello, is_gone: Callable[[], bool]) -> LocalPeer | None:
    """Connect to the session of this process that has a peer's mailbox; ``None`` if there is none."""
    mailbox = _room.find(peer.mailbox)
    return None if mailbox is None else LocalPeer(mailbox, peer.session, is_gone)


def _is_random(template: Template) -> bool:
    try:
        return facts_of(operator_named(template.operator)).is_random
    except UnknownOperatorError:
        return False


def _wait(done: Future[_Answer]) -> None:
    """Wait until a batch was executed, or the caller is interrupted."""
    deferred = deferral()
    if deferred is None:
        wait([done])
        return
    ready: queue.SimpleQueue[Future[_Answer] | None] = queue.SimpleQueue()
    done.add_done_callback(ready.put)

    def come() -> Future[_Answer] | None:
        while True:
            # A signal right before the thread falls asleep does not wake it, and is only handled then.
            with contextlib.suppress(queue.Empty):
                return ready.get(timeout=LOOK_S)

    if deferred.wait(lambda: ready.put(None), come) is None and deferred.error is not None:
        raise deferred.error


def _end_all() -> None:
    """End all threads. A thread inside an operator when the interpreter exits would abort the process."""
    with SessionLock(lambda: None):
        for connection in list(_open):
            connection.end_thread()

"""The server: runs sessions over any transport, each in its own thread and with its own values."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Self

import attrs
import msgspec

from djinn.errors import (
    ConfigurationError,
    DjinnError,
    LimitError,
    ProtocolError,
)
from djinn.kinds.transport import Transport
from djinn.wire.messages import Batch, Goodbye, Hello, PeerHello
from djinn_plugins.common.kinds.executor import Executor
from djinn_plugins.common.kinds.guard import ProgramChecker
from djinn_plugins.common.kinds.memory import MemoryFactory, MemoryManager
from djinn_plugins.common.kinds.transport import Channel, Listener, PeerConnection
from djinn_plugins.common.memory.kept_memory import KeptMemory
from djinn_plugins.common.operators.named_values import NamedSession, serving
from djinn_plugins.executor.content_store import ContentStore, SharedUploads
from djinn_plugins.executor.mailbox import InboxRegistry, Mailbox
from djinn_plugins.executor.peer_exchange import DRAIN_S, PeerExchange, check_versions, deliver
from djinn_plugins.executor.service import SessionService
from djinn_plugins.server.board import mark_of
from djinn_plugins.server.control import Part
from djinn_plugins.server.counters import MAX_NAMED, Meter, Meters, WorkerReport, told_of_memory
from djinn_plugins.server.draining import server_drains
from djinn_plugins.server.grants import Grants
from djinn_plugins.server.handshake import (
    HeldMemory,
    answer_again,
    answer_client,
    greeting_of,
    peer_welcome,
    refuse,
)
from djinn_plugins.server.kinds.metrics import Amounts, Outcome
from djinn_plugins.server.limits import Allowances, SessionAllowance
from djinn_plugins.server.log_lines import printable
from djinn_plugins.server.loss import DeviceLoss
from djinn_plugins.server.memory import SpareMemory, default_keep_bytes, no_memory_plugin, return_memory, trim_heap
from djinn_plugins.server.named_sessions import NamedSessions, SessionNames
from djinn_plugins.server.options import ServeOptions, ServerMemoryOptions
from djinn_plugins.server.peers import PeerConnector, PeerPolicy
from djinn_plugins.server.run_queue import RunQueue
from djinn_plugins.server.session_slot import SessionSlot
from djinn_plugins.server.sessions import HeldSession, Sessions
from djinn_plugins.server.tenant_limits import Limits
from djinn_plugins.server.tenant_use import Amount
from djinn_plugins.transport.resumable_channel import ResumableChannel, ResumableSessions, digest_of

__all__ = ("Server",)

TRIMMED_BYTES = 2**26
TRIMMED_IDLE_BYTES = 2**21
"""After how many bytes of uploads that moved to shared memory the heap is trimmed, also while the server is idle."""
_GOODBYE = Goodbye()
_OPTIONS = ServeOptions(memory=ServerMemoryOptions(keep_bytes=0))
_log = logging.getLogger("djinn.server")


def no_transport(scheme: str) -> Transport:
    """Reject every scheme.

    Raises:
        ConfigurationError: Always.
    """
    raise ConfigurationError(f"This server reaches no other by {scheme}://.")


class Server:
    """Serves an executor to every connection that a listener accepts.

    Malformed input from a connection ends at most that connection.

    Args:
        listener: Where clients connect; closed by `stop`.
        executor: Runs the programs of all sessions; closed by `stop`.
        admit: Raises if a client may not connect.
        allowances: Resource limits of the sessions; unlimited by default.
        options: Say how much is kept, for how long, and whether idle sessions' next requests are run ahead.
        memory: Opens the manager of device memory; ``None`` if there is none, and sessions with a limit are refused.
        public_digests: Digests of contents that every owner may use.
        kept_memory: Memory that values share with kept uploads; ``None`` if each value is a copy.
        shared_uploads: Memory that other workers share, too.
        peers: Which servers values may be sent to.
        transport_for: Returns the transport of a scheme, for sending values to other servers.
        dial: Lets another process connect to other servers; see `djinn_plugins.server.peers.PeerConnector`.
        mailbox_prefix: Prefix of the keys of the sessions' mailboxes, and of those that resume sessions.
        watch: Starts the guard's watch over a new session.
        meters: Counts events; the server has its own by default.
        line: Schedules the programs; by default, the server's own line, which has the device to itself.
        grants: Records the token that each session was admitted with.
        named_in_others: Returns the named sessions in the tenant's other workers.

    Attributes:
        is_draining: Whether new sessions are refused; existing ones can still be resumed.
        sessions: The current sessions.

    Concurrency:
        `start` and `stop` are called by one thread. Each connection is served by its own thread.
    """

    def __init__(
        self, listener: Listener, executor: Executor, *, admit: Callable[[Channel, Hello], None],
        watch: Callable[[], ProgramChecker], allowances: Allowances | None = None,
        options: ServeOptions = _OPTIONS, peers: PeerPolicy | None = None,
        transport_for: Callable[[str], Transport] = no_transport, mailbox_prefix: bytes = b"",
        meters: Meters | None = None, line: RunQueue | None = None,
        memory: MemoryFactory | None = None, public_digests: frozenset[bytes] = frozenset(),
        kept_memory: KeptMemory | None = None, shared_uploads: SharedUploads | None = None,
        dial: Callable[[str, PeerHello], tuple[int, bytes]] | None = None, grants: Grants | None = None,
        leave: Callable[[], None] | None = None, named_in_others: Callable[[], tuple[NamedSession, ...]] = tuple,
    ) -> None:
        self._listener = listener
        self._line = line or RunQueue()
        self._executor = executor
        self._loss = DeviceLoss(executor, leave)
        self._admit = admit
        self._meters = meters or Meters()
        self._allowances = allowances or Allowances(Limits(), self._meters.reject)
        keep_bytes = options.memory.keep_bytes
        self._store = ContentStore(default_keep_bytes() if keep_bytes is None else keep_bytes, public_digests,
                                   kept_memory, uploads=shared_uploads)
        self._looks_ahead = options.device.look_ahead
        self._memory = memory
        self._memory_options = options.memory.for_manager
        self._manager: MemoryManager | None = None
        self._room = InboxRegistry(mailbox_prefix)
        self._peers = PeerConnector(self._room, peers or PeerPolicy(), transport_for, dial)
        self._lease_s = options.sessions.lease_s
        self._resumable = ResumableSessions(mailbox_prefix)
        self._grants = grants or Grants()
        self._named = NamedSessions(options.sessions.named_lease_s, options.sessions.names, self._allowances,
                                   in_others=named_in_others)
        self.sessions = Sessions(SpareMemory(executor), self._named)
        self._present: set[Mailbox] = set()
        """Mailboxes of sessions, added before their clients learn that the sessions have begun."""
        self._watch = watch
        self._lock = threading.Lock()
        self._connections: dict[threading.Thread, Channel] = {}
        self._welcoming: set[threading.Thread] = set()
        """Threads that say goodbye to their clients themselves: only they can tell whether a client was welcomed."""
        self._goodbye = _GOODBYE
        self._count = 0
        self._stopping = False
        self.is_draining = False
        self._parts = 1
        self.limit_memory(self._allowances.limits)
        self._acceptor = threading.Thread(target=self._accept, name="djinn-accept", daemon=True)

    def limit_memory(self, limits: Limits) -> None:
        """Change the tenant's limits. A first memory limit applies only to sessions that begin later."""
        options = attrs.evolve(self._memory_options, limit_bytes=-(-limits.memory_bytes // self._parts),
                               host_bytes=-(-limits.host_bytes // self._parts))
        if self._manager is not None:
            self._manager.limit(options)
        elif options.limit_bytes and self._memory is not None:
            self._manager = self._memory.open(self._executor, options, self._store)

    def take_part(self, part: Part) -> None:
        """Take this worker's part of what the workers of its tenant have together."""
        self._parts = max(1, part.of)
        self.limit_memory(self._allowances.limits)
        if part.keep_bytes is not None:
            self._store.limit(part.keep_bytes)

    @property
    def address(self) -> str:
        """The address that clients connect to."""
        return self._listener.address

    @property
    def device(self) -> str:
        """The device of the executor."""
        return self._executor.device

    @property
    def connections(self) -> int:
        """Number of connections that are being served."""
        return len(self._connections)

    @property
    def is_accepting(self) -> bool:
        """Whether new connections are accepted; ``False`` before `start`, after `stop`, and if the listener failed."""
        return self._acceptor.is_alive()

    def start(self) -> None:
        """Start accepting connections."""
        self._acceptor.start()
        self.sessions.start()
        _log.info("serving %s%s", self._executor.device, f" on {self.address}" if self.address else "")

    def stop(self, timeout_s: float = 5.0, goodbye: Goodbye = _GOODBYE) -> bool:
        """Stop accepting, end all sessions, and wait for their threads.

        Args:
            timeout_s: How long to wait for running programs, which cannot be interrupted.
            goodbye: The reason to give to clients.

        Returns:
            Whether every thread has ended.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._stopping, self._goodbye = True, goodbye
            serving = dict(self._connections)
            welcoming = frozenset(self._welcoming)
        self.sessions.stop()
        self._listener.close()
        self._room.close()
        for session in self.sessions.all():
            session.post.close()
        partings = []
        for thread, channel in serving.items():
            if thread in welcoming:
                continue
            if isinstance(channel, ResumableChannel):
                # Closing waits briefly, until the client has read the reason.
                partings.append(threading.Thread(target=channel.close, args=(goodbye,), daemon=True))
                partings[-1].start()
            else:
                channel.close()
        for parting in partings:
            parting.join(max(0.0, deadline - time.monotonic()))
        # Close the line last: programs fail once it is closed, and clients would take that failure for the reason.
        self._line.close()
        threads = [thread for thread in (self._acceptor, *serving) if thread.ident is not None]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        busy = [thread.name for thread in threads if thread.is_alive()]
        if busy:
            _log.warning("still running after %g s: %s", timeout_s, ", ".join(busy))
            return False
        self._executor.close()
        _log.info("stopped")
        return True

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self.stop()

    def _accept(self) -> None:
        while (channel := self._listener.accept()) is not None:
            self._count += 1
            thread = threading.Thread(target=self._serve, args=(channel,), name=f"djinn-session-{self._count}",
                                      daemon=True)
            with self._lock:
                if self._stopping:
                    channel.close()
                    return
                self._connections[thread] = channel
            try:
                thread.start()
            except RuntimeError as error:
                _log.error("%s: no thread could be started: %s", channel.peer, error)
                channel.close()
                self._forget(thread)

    def _forget(self, thread: threading.Thread) -> None:
        with self._lock:
            self._connections.pop(thread, None)

    def _serve(self, channel: Channel) -> None:
        meter = self._meters.open(channel)
        is_ours = True
        try:
            is_ours = self._converse(channel, meter)
        except DjinnError as error:
            self._meters.ended(error)
            refuse(self._current(channel), error)
        except Exception as error:  # noqa: BLE001  # logged in full; must end neither the server nor another session
            _log.exception("%s: the session failed", channel.peer)
            mine = self._current(channel)
            tell = partial(refuse, mine)
            if not self._loss.check(mine, tell, partial(self.sessions.end_others, mine)):
                tell(error)
        finally:
            if is_ours:
                self._current(channel).close()
            self._meters.close(meter)
            self._forget(threading.current_thread())

    def _current(self, channel: Channel) -> Channel:
        """Return this thread's current connection: a resumed session has replaced its first one."""
        return self._connections.get(threading.current_thread(), channel)

    def _converse(self, channel: Channel, meter: Meter) -> bool:
        """Serve a connection, and return whether it still belongs to this thread."""
        greeted = greeting_of(channel.receive())
        if greeted is None:
            return True
        sequence, greeting = greeted
        if isinstance(greeting, Hello):
            check_versions(greeting)
            self._admit(channel, greeting)
            if greeting.resume:
                self._take_up(channel, sequence, greeting, meter)
                return False
            if self.is_draining:
                raise server_drains()
            self._line.check()
            self._check_memory()
            allowance = self._allowances.open()
            try:
                self._hold_session(channel, sequence, greeting, allowance, meter)
            finally:
                allowance.close()
            return True
        _log.info("%s: a peer of session %s begins", channel.peer, printable(greeting.session))
        deliver(channel, sequence, greeting, self._room, peer_welcome(self._executor.device))
        return True

    def _check_memory(self) -> None:
        """Refuse a session whose memory is limited while no plugin keeps it within the limit."""
        if self._manager is None and self._allowances.limits.memory_bytes:
            raise no_memory_plugin()

    def _take_up(self, channel: Channel, sequence: int, hello: Hello, meter: Meter) -> None:
        """Move a session to a new connection. The thread that holds the session keeps serving it."""
        steady = self._resumable.find(hello.resume)
        self._grants.hold(channel, steady)

        def welcome(received: int) -> None:
            answer_again(channel, sequence, hello, self._executor, steady, received)
            meter.follow(None)

        steady.take_up(channel, hello.answered, welcome, hello.cancelled)

    def _hold_session(self, channel: Channel, sequence: int, hello: Hello, allowance: SessionAllowance,
                      meter: Meter) -> None:
        steady = ResumableChannel(channel, sequence, self._lease_s if hello.resumes else 0.0)
        self._grants.hold(channel, steady)
        mailbox = self._room.open()
        key = self._resumable.add(steady) if steady.lease_s else b""
        thread = threading.current_thread()
        try:
            if not self._may_welcome(thread):
                return
            session, contents = answer_client(channel, sequence, hello, self._executor, self._store,
                                              mailbox.key, self._load(mailbox), key, steady.lease_s)
            steady.admit_body = allowance.admit_body
            meter.follow(steady)
            self._welcomed(thread, steady)
            _log.info("%s: session %s begins", channel.peer, session)

            def connect_peer(address: str, peer: PeerHello) -> PeerConnection:
                return self._peers.open(address, peer, steady.is_gone)

            post = PeerExchange(session, mailbox, connect_peer, steady.is_gone)
            place = self._line.open()
            place.stop, steady.stopped = steady.stop, place.give_up
            key_digest = digest_of(key)
            place.mark = mark_of(session, key_digest, hello.owner)
            service = SessionService(self._executor, travels=True, contents=contents, post=post, allowance=allowance,
                                     watch=self._watch(), turns=place, manager=self._manager)
            if hello.takes_early and steady.lease_s and self._looks_ahead:
                service.answer_early(steady)
            names = SessionNames(self._named, session, steady, service, allowance)
            self.sessions.add(HeldSession(session, key_digest, steady, service, post, place, mailbox, names))
            try:
                with serving(names):
                    self._answer_all(names, allowance, meter, place, mailbox)
            finally:
                place.carried_out()
                self._resumable.remove(key)
                self.sessions.remove(session)
                with self._lock:
                    self._present.discard(mailbox)
                post.close(0.0 if self._stopping else DRAIN_S)
                held = service.live_handles
                service.close(names.kept())
                names.left()
                del service, contents, names
                return_memory(self._executor)
                _log.info("%s: session %s ends, %d values dropped", steady.peer, session, held)
        finally:
            self._resumable.remove(key)
            with self._lock:
                self._present.discard(mailbox)
                self._welcoming.discard(thread)
            self._room.remove(mailbox)

    def _may_welcome(self, thread: threading.Thread) -> bool:
        with self._lock:
            if not self._stopping:
                self._welcoming.add(thread)
            return not self._stopping

    def _welcomed(self, thread: threading.Thread, steady: ResumableChannel) -> None:
        with self._lock:
            self._connections[thread] = steady
            self._welcoming.discard(thread)
            is_over = self._stopping
        if is_over:
            steady.close(self._goodbye)

    def _load(self, mailbox: Mailbox) -> HeldMemory:
        services = [session.service for session in self.sessions.all()]
        with self._lock:
            others = len(self._present)
            self._present.add(mailbox)
        use = self._allowances.use
        held_bytes = sum(service.held_bytes for service in services) + use.others(Amount.HELD_BYTES)
        return HeldMemory(self._allowances.limits.memory_bytes, held_bytes, others + use.others(Amount.SESSIONS))

    def report(self) -> WorkerReport:
        """Report the counters, the current amounts, and the programs that took the most time."""
        services = [session.service for session in self.sessions.all()]
        counts = msgspec.structs.replace(self._line.counts(self._meters.counts()), cache_hits=self._store.hits,
                                         cache_misses=self._store.misses)
        closed = self._named.closed()
        amounts = Amounts(len(services), sum(service.live_handles for service in services) + sum(
            count for _, _, _, count in closed), sum(service.held_bytes for service in services) + sum(
            named.size_bytes for _, _, named, _ in closed), self._store.size_bytes,
            shared_bytes=sum(service.shared_bytes for service in services))
        self._allowances.use.put(Amount.HELD_BYTES, amounts.held_bytes)
        made = (WorkerReport(counts, amounts) if self._manager is None else
                told_of_memory(counts, amounts, self._manager.report(), self._room.held_bytes))
        return msgspec.structs.replace(made, programs=self._line.slowest_programs(),
                                       named=self._named.began()[:MAX_NAMED])

    def _answer_all(self, names: SessionNames, allowance: SessionAllowance, meter: Meter, place: SessionSlot,
                    mailbox: Mailbox) -> None:
        channel, service = names.channel, names.service
        channel.settle = lambda: allowance.settle(service.live_handles)

        def tell(error: DjinnError) -> None:
            channel.close(Goodbye(error.code, error.summary, error.hint))

        try:
            while _answer_next(channel, service, allowance, meter, place, self._loss):
                self._loss.check(channel, tell, partial(self.sessions.end_others, channel), service.suspects)
                names.settle()
                self._tidy(channel)
                place.carried_out(has_more=place.is_wanted and channel.is_ready())
                self._look_ahead(channel, service, place, mailbox)
        finally:
            channel.settle = _nothing

    def _look_ahead(self, channel: ResumableChannel, service: SessionService, place: SessionSlot,
                    mailbox: Mailbox) -> None:
        """Run ahead until there is a batch, or nothing to run; then the values of other sessions may come ahead."""
        while self._looks_ahead:
            while (service.can_look_ahead and not place.is_wanted and not channel.is_ready()
                   and service.look_ahead()):
                pass
            if not service.ahead.awaits or (bell := mailbox.bell()) < 0 or not channel.wait_with(bell):
                return
            mailbox.hush()

    def _tidy(self, channel: ResumableChannel) -> None:
        """Return the memory of received uploads to the system; the C library would keep it in pieces of their size."""
        released_bytes = self._store.released_bytes
        if released_bytes >= TRIMMED_BYTES or (released_bytes >= TRIMMED_IDLE_BYTES and not channel.is_ready()):
            self._store.released_bytes = 0
            trim_heap()


def _nothing() -> None:
    pass


def _answer_next(channel: ResumableChannel, service: SessionService, allowance: SessionAllowance, meter: Meter,
                 place: SessionSlot, loss: DeviceLoss) -> bool:
    """Execute one batch. Its tensors are released before the next batch is awaited."""
    try:
        received = channel.receive()
    except LimitError:
        meter.refused()
        raise
    if received is None:
        return False
    begin_ns = time.perf_counter_ns()
    sequence, message, tensors = received
    if not isinstance(message, Batch):
        raise ProtocolError(f"A {type(message).__name__} where a Batch was expected.")
    outcome: Outcome = "error"
    allowance.admit_programs(message)
    place.received(message)
    skipped = service.skipped
    try:
        result, data = service.handle(message, tensors, channel.stop, sequence)
        allowance.settle(service.live_handles)
        outcome = "lost"
        if result.failures and loss.is_anothers(channel):
            return True
        result = loss.explained(channel, result, service.suspects)
        if message.later:
            channel.send_later(sequence, *service.later_values(message))
        if message.wants_reply:
            channel.send(sequence, result, data)
        outcome = "failed" if result.failures else "ok"
    finally:
        meter.answered(outcome, time.perf_counter_ns() - begin_ns)
        meter.dropped += service.skipped - skipped
    return True

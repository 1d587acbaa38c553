"""The layer that lets a session continue when servers die."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import monotonic, thread_time
from typing import Any, TypeVar

import torch

from djinn import errors
from djinn.errors import DjinnError, PeerError, SessionClosedError, TokenEndedError, TransportError
from djinn.ir.program import ProgramLayout
from djinn.ir.tape import Node, Tape, without_dead
from djinn.ir.value import Slot
from djinn.kinds import Backend, Connection, RemoteExecutor, SubmissionCache
from djinn.wire.messages import GENERATOR_HANDLE, Welcome
from djinn_plugins.replay.checkpointing import BYTES_PER_S, Checkpointer
from djinn_plugins.replay.checkpoints import plan
from djinn_plugins.replay.journal import MAX_NODES, Journal
from djinn_plugins.replay.losses import LostValues
from djinn_plugins.replay.metering import MeteredConnection
from djinn_plugins.replay.placement import RecoveringPlacement
from djinn_plugins.replay.reconnecting import Reconnector
from djinn_plugins.replay.renumbering import repeated
from djinn_plugins.replay.replaying import Replay, ReplayTarget
from djinn_plugins.schedule.placing import SupportsJoining, placing_of

log = logging.getLogger("djinn.recovery")

MAX_TRIES = 3
"""How often the same work is retried; if the server dies each time, the work itself is the cause."""
_LEVELS = frozenset({"live_handles", "programs_known", "results_kept", "results_kept_bytes"})
_T = TypeVar("_T")


class Recovering:
    """Submits work through another backend, and restores the session on another server when the server dies.

    A `djinn.kinds.backend.Backend`.

    Args:
        make: Opens the backend that does the work, on connections.
        meters: The first connections.
        hands: The backend on these.
        reconnector: Makes others.
        tape: The session's tape.
        released: Numbers of values that the program no longer references.
        numbers: Provides numbers for values.
        devices: Devices with their own random numbers; ``None`` for the only one.
        limit_bytes: How many bytes of tensors may be kept.
        budget_s: How many seconds of work a recovery may have to repeat.

    Concurrency:
        The caller holds the session's lock.

    Laws:
        session.recovery_exact, session.recovery_bounded
    """

    def __init__(
        self, make: Callable[[Sequence[Connection]], ReplayTarget], meters: Sequence[MeteredConnection],
        hands: ReplayTarget, reconnector: Reconnector, tape: Tape, released: deque[int], numbers: Iterator[int],
        devices: Sequence[torch.device | None], limit_bytes: int, budget_s: float,
    ) -> None:
        self.journal = Journal(limit_bytes)
        self.materializations = 0
        self.nodes_taken = 0
        self._make = make
        self._meters = meters
        self._hands = hands
        self._reconnector = reconnector
        self._tape = tape
        self._released = released
        self._numbers = numbers
        self._devices = devices
        self._dead: set[int] = set()
        self._losses = LostValues(self.journal)
        self._is_alive = True
        self._ended: DjinnError | None = None
        self._tries = 0
        self._taken_before = 0
        """Value of `nodes_taken` when a server last died; if it is larger at the next death, the work is not
        the same.
        """
        self._last_words = ""
        self._past: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._checkpointer = Checkpointer(self.journal, budget_s, devices)
        self._spent_s = 0.0
        """Processor time of this side for work that has not been measured yet."""
        self._run_ns = 0
        """How long programs had run at the last measurement."""
        self._unheard: deque[Exception] = deque()
        """Failures that occurred while only this layer waited for an answer."""
        self.placing = None if placing_of(hands.backend) is None else RecoveringPlacement(lambda: self._hands.backend)
        """What lets others say which executor runs what; ``None`` with one executor."""

    @property
    def plain(self) -> Backend:
        """The backend that does the work now."""
        return self._hands.backend

    @property
    def address(self) -> str:
        """Where operations run now."""
        return self._hands.backend.address

    @property
    def welcome(self) -> Welcome:
        """What the server said of itself that runs them now."""
        return self._hands.backend.welcome

    @property
    def executors(self) -> Sequence[RemoteExecutor]:
        """The executors that there are now."""
        return self._hands.backend.executors

    @property
    def device_count(self) -> int:
        """How many logical devices there are, whichever servers die."""
        return len(self._devices)

    def flush(self) -> None:
        """Send everything pending."""
        self._take(None)
        self._handed_over(lambda hands: hands.backend.flush())

    def fetch(self, slots: Sequence[Slot], *, whole: bool) -> list[Any]:
        """Bring values home; see `djinn.kinds.backend.Backend.fetch`.

        Raises:
            StateLostError: A value was lost with a server.
        """
        self._take(None if whole else slots)
        return self._asked(slots, lambda hands: hands.backend.fetch(slots, whole=True))

    def describe(self, slots: Sequence[Slot]) -> list[Any]:
        """Send everything pending and fetch the metadata of values.

        Raises:
            StateLostError: A value was lost with a server.
        """
        self._take(None)
        return self._asked(slots, lambda hands: hands.backend.describe(slots))

    def synchronize(self) -> None:
        """Send everything pending and wait until it has run."""
        self._take(None)
        self._asked((), lambda hands: hands.backend.synchronize())

    def upload(self, number: int, dense: torch.Tensor, device: torch.device | None = None) -> None:
        """Send a dense CPU tensor, and keep it for recovery."""
        self._maintain()
        is_whole = len(self._devices) == 1
        self.journal.add_upload(number, dense, device, is_whole=is_whole)
        if number == GENERATOR_HANDLE and is_whole:
            self._losses.restore(GENERATOR_HANDLE)
        self._handed_over(lambda hands: hands.backend.upload(number, dense, device))

    def seed(self, seed: int) -> None:
        """Seed the random generators after everything pending."""
        self._take(None)
        self.journal.add_seed(seed)
        self._losses.restore(GENERATOR_HANDLE)
        self._handed_over(lambda hands: hands.backend.seed(seed))

    def run(self, nodes: Sequence[Node], released: set[int], layout: ProgramLayout) -> None:
        """Run a piece of tape again, behind everything pending; see `djinn.kinds.backend.Backend.run`."""
        self._take(None)
        own, gone = repeated(nodes, released, self._numbers, self.journal)
        self.journal.add_nodes(own, gone, defers=False)
        if self._losses:
            own = [node for node in own if self._losses.allows(node)]
            self._handed_over(lambda hands: _add(hands, own, self._losses.present(gone)))
        else:
            self._handed_over(lambda hands: hands.backend.run(nodes, released, layout))

    def use_cache(self, open_cache: Callable[[], SubmissionCache]) -> None:
        """Drop the caches of results, and use others; after a recovery, those of the settings."""
        if self._is_alive:
            self._hands.backend.use_cache(open_cache)

    def cancel(self) -> None:
        """Cancel the submitted work, and do not repeat it in a recovery.

        While there is no server, nothing is running. Operations that a recovery must repeat are then kept.
        """
        if self._is_alive and self._ended is None:
            self.journal.cancel()
            self._hands.backend.cancel()

    def close(self) -> None:
        """Close the connections."""
        self._ended = SessionClosedError("The session has ended.", hint="Call djinn.init() to start another.")
        self._hands.backend.close()

    def stats(self) -> dict[str, int]:
        """Return the counters of all backends so far, and those of recovery."""
        now = self._hands.backend.stats()
        if not self._is_alive:
            # Its counts are included in the past ones already, and it holds no values.
            now = dict.fromkeys(now, 0)
        return {
            **{name: count + self._past[name] for name, count in now.items()},
            "materializations": self.materializations,
            **{name: self._counts[name] for name in ("recoveries", "nodes_replayed", "bytes_replayed", "replay_ms")},
            **{name: self._checkpointer.counts[name] for name in ("checkpoints", "checkpoint_bytes", "checkpoint_ms")},
            "local_fallbacks": self._reconnector.fallbacks,
            "journal_nodes": self.journal.node_count,
            "journal_bytes": self.journal.size_bytes,
            "journal_ms": round(1000 * self.journal.replay_s),
            **({} if self.placing is None else {"servers_returned": self._counts["servers_returned"]}),
        }

    def _take(self, wanted: Sequence[Slot] | None) -> None:
        """Write the tape, or the slice that ``wanted`` needs, into the journal, and pass it on; see `Tape.take`."""
        self._maintain()
        if not (self._tape.nodes or self._released or self._dead):
            return
        nodes, gone = self._tape.take(wanted, self._released, self._dead)
        self._dead = self._dead - gone
        self.nodes_taken += len(nodes)
        alive = without_dead(nodes, gone)
        if len(alive) < len(nodes):
            kept = set(map(id, alive))
            gone = gone - {slot.number for node in nodes if id(node) not in kept for slot in node.outputs}
        leaving = self.journal.add_nodes(alive, gone)
        if self._losses:
            alive = [node for node in alive if self._losses.allows(node)]
            leaving = self._losses.present(leaving)
        if self._is_alive:
            self._hands.tape.nodes.extend(alive)
            self._hands.released.extend(leaving)
        if self.journal.is_due:
            self.journal.compact()

    def _gone(self) -> set[int]:
        """Take the dead values that nothing on the tape uses."""
        gone = self._dead
        if self._tape.nodes:
            gone = gone - {slot.number for node in self._tape.nodes for slot in (*node.inputs, *node.outputs)}
        self._dead = self._dead - gone
        return gone

    def _handed_over(self, act: Callable[[ReplayTarget], None]) -> None:
        """Do something that needs no answer. Work recorded in the journal is not repeated here."""
        self._checkpointer.handed_over()
        if self._is_alive and self._ended is None:
            try:
                with self._metered():
                    act(self._hands)
                return
            except DjinnError as error:
                if not self._hands.is_broken:
                    raise
                self._died(error)
        self._recover()

    def _asked(self, slots: Sequence[Slot], ask: Callable[[ReplayTarget], _T]) -> _T:
        """Request an answer, and recover as often as necessary to get it."""
        self._let_return()
        self._checkpointer.handed_over()
        if self._unheard:
            raise self._unheard.popleft()
        while True:
            if not self._is_alive or self._ended is not None:
                self._recover()
            if self._losses:
                self._losses.check(slots)
            asked = [executor.round_trips for executor in self.executors]
            try:
                with self._metered():
                    answer = ask(self._hands)
            except DjinnError as error:
                if not self._has_lost_a_server(error):
                    self._answered(asked)
                    raise
                self._died(error)
            except Exception:
                self._answered(asked)
                raise
            else:
                self._answered(asked)
                return answer

    def _let_return(self) -> None:
        """Let a server take part again that is back."""
        returning, backend = self._reconnector.returning, self._hands.backend
        if returning.is_due and self._is_alive and isinstance(backend, SupportsJoining) and backend.may_grow:
            address = returning.look(partial(self._take_again, backend))
            if address:
                self._counts["servers_returned"] += 1
                log.warning("%s is back, and takes part in new work", address)

    def _take_again(self, backend: SupportsJoining, connection: Connection) -> None:
        if not self._settle():
            raise TransportError("Another server died meanwhile.")
        meter = MeteredConnection(connection)
        backend.add(meter)
        self._meters = [*self._meters, meter]

    @contextmanager
    def _metered(self) -> Iterator[None]:
        """Add the processor time of this side, without waiting times."""
        began = thread_time()
        try:
            yield
        finally:
            self._spent_s += thread_time() - began

    def _answered(self, asked: Sequence[int]) -> None:
        """Record an answer; entries that all servers have answered for are settled."""
        self._tries = 0
        if any(executor.round_trips == before for executor, before in zip(self.executors, asked, strict=True)):
            return
        self.journal.settled = len(self.journal.entries)
        run_ns = sum(meter.run_ns for meter in self._meters)
        self._checkpointer.measured((run_ns - self._run_ns) / 1e9 + self._spent_s)
        self._run_ns, self._spent_s = run_ns, 0.0

    def _has_lost_a_server(self, error: DjinnError) -> bool:
        """Whether an error is due to a dead server. One that needs its values may notice before the client does."""
        if isinstance(error, PeerError):
            self._settle()
        return self._hands.is_broken

    def _died(self, error: DjinnError) -> None:
        self._look_whether_final(error)
        self._last_words = error.summary
        self._is_alive = False
        if self.nodes_taken > self._taken_before:
            self._tries, self._taken_before = 0, self.nodes_taken
        for name, count in self._hands.backend.stats().items():
            if name not in _LEVELS:
                self._past[name] += count
        self._hands.backend.close()
        log.warning("%s died: %s", self.address, error.summary)

    def _look_whether_final(self, error: DjinnError) -> None:
        if isinstance(error, (*errors.ENDED_FOR_GOOD, TokenEndedError)):
            self._ended = error

    def _recover(self) -> None:
        """Connect to a server again, and restore all values.

        Raises:
            TransportError: No server came back, or each one dies of the same work.
        """
        while not self._is_alive or self._ended is not None:
            if self._ended is not None:
                raise type(self._ended)(self._ended.summary, hint=self._ended.hint)
            if self.journal.is_given_up:
                self._ended = TransportError(
                    f"What {self.address} held is lost: it would have taken more than {MAX_NODES:,} operations to make "
                    f"it again, so they were not kept. It died so: {self._last_words}",
                    hint="See the warning DJ319 before; call djinn.init() to start a new session.")
                continue
            if self._tries == MAX_TRIES:
                self._ended = TransportError(
                    f"{MAX_TRIES} times in a row a server died of the same work, at last so: {self._last_words}",
                    hint="See the server's log for the reason. What it held is lost; call djinn.init() to start a "
                         "new session.")
                continue
            self._tries += 1
            began = monotonic()
            try:
                connections = self._reconnector.connect()
            except (TokenEndedError, TransportError) as error:
                self._ended = type(error)(error.summary, hint=error.hint)
                continue
            self._begin_anew(connections, began)

    def _begin_anew(self, connections: Sequence[Connection], began: float) -> None:
        connected_s, spent_s = monotonic() - began, -thread_time()
        self.journal.compact()
        try:
            meters = list(map(MeteredConnection, connections))
            hands = self._make(meters)
            if self.placing is not None:
                self.placing.pin_again(hands.backend)
            replay = Replay(self.journal, hands)
            log.warning("going on at %s: %d operations are carried out again", hands.backend.address,
                        self.journal.node_count)
            replay.run()
        except DjinnError as error:
            self._last_words = error.summary
            log.warning("died again: %s", error.summary)
            self._look_whether_final(error)
            _close(connections)
            return
        except BaseException:
            _close(connections)
            raise
        self._hands, self._losses, self._is_alive = hands, replay.losses, True
        self._meters, self._run_ns = meters, sum(meter.run_ns for meter in meters)
        replayed_s = monotonic() - began - connected_s
        # Measured like the budget: the load of other processes on these machines does not count.
        work_s = spent_s + thread_time() + self._run_ns / 1e9
        self._counts.update(recoveries=1, nodes_replayed=replay.nodes, bytes_replayed=replay.size_bytes,
                            replay_ms=round(1000 * work_s))
        log.warning("recovered at %s: connected after %.2f s, %d operations and %s bytes again in %.2f s%s",
                    self.address, connected_s, replay.nodes, f"{replay.size_bytes:,}", replayed_s,
                    f"; {len(replay.losses)} values are lost" if replay.losses else "")

    def _maintain(self) -> None:
        """Measure how long work takes, and make a checkpoint, if either is due.

        This happens before the next piece is submitted, when the values used for the last answer have been released.
        """
        checkpointer = self._checkpointer
        if not self._is_alive or self._ended is not None or self.journal.is_given_up:
            return
        if checkpointer.is_measurement_due and not self._settle():
            return
        if not checkpointer.is_due(len(self._released) + len(self._dead)):
            return
        if self.journal.settled < len(self.journal.entries) and not self._settle():
            return
        self._forget_dead()
        checkpointer.checkpoint(self._hands)

    def _settle(self) -> bool:
        """Wait until all submitted work has run, and keep failures for the next request.

        Returns:
            Whether the work has run; if not, a server has died, which the next message detects.
        """
        known = len(self._unheard)
        for _ in range(MAX_TRIES * len(self.executors)):
            asked = [executor.round_trips for executor in self.executors]
            try:
                with self._metered():
                    self._hands.backend.synchronize()
            except Exception as error:  # noqa: BLE001  # raised by `_asked`
                if self._hands.is_broken:
                    while len(self._unheard) > known:  # that work is done again
                        self._unheard.pop()
                    return False
                self._unheard.append(error.with_traceback(None))
                self._answered(asked)
            else:
                self._answered(asked)
                return True
        return False

    def _forget_dead(self) -> None:
        while self._released:
            self._dead.add(self._released.popleft())
        self._hands.released.extend(self._losses.present(self.journal.add_nodes((), self._gone())))

    def checkpoint(self, seconds_per_node: float = 1.0) -> None:
        """Fetch values that are cheaper to fetch than to recompute. All submitted work must have been answered.

        Args:
            seconds_per_node: How long an operation takes.
        """
        journal = self.journal
        journal.compact()
        costs = [seconds_per_node * isinstance(entry, Node) for entry in journal.entries]
        found = plan(journal, costs, BYTES_PER_S)
        if found.left_bytes <= journal.limit_bytes:
            self._checkpointer.fetch(self._hands, found)


def _add(hands: ReplayTarget, nodes: Sequence[Node], gone: Sequence[int]) -> None:
    hands.tape.nodes.extend(nodes)
    hands.released.extend(gone)


def _close(connections: Sequence[Connection]) -> None:
    for connection in connections:
        connection.close()

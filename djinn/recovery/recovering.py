"""The layer that goes on when servers die."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from djinn.errors import DjinnError, ProgramTimeoutError, SessionClosedError, SessionTerminatedError, TransportError
from djinn.fleet.fleet import Fleet
from djinn.kinds import Connection
from djinn.link import Link
from djinn.model.schedule import DeviceProfile, LinkProfile
from djinn.model.value import Slot
from djinn.programs import Layout
from djinn.protocol.messages import GENERATOR_HANDLE, Welcome
from djinn.recovery.checkpoints import Candidate, plan
from djinn.recovery.entries import Generators, Snapshot
from djinn.recovery.journal import Journal
from djinn.recovery.keeping import Kept, size_of
from djinn.recovery.losses import Losses
from djinn.recovery.reconnecting import Reconnector
from djinn.recovery.repeating import repeated
from djinn.recovery.replaying import Hands, Replay
from djinn.results import ResultCache
from djinn.tape import Node, Tape, without_dead

log = logging.getLogger("djinn.recovery")

MAX_TRIES = 3
"""So often the same work is done again; if the server dies each time, the work is what kills it."""
MIN_REPLAY_S = 1.0
"""Work that would take no longer is done again rather than fetched."""
MIN_REPLAY_ENTRIES = 64
"""So little is never worth a checkpoint; what was asked first took long for other reasons."""
MAX_REPLAY_NODES = 50_000
"""Operations from which on values are fetched however little time they take."""
CHECKPOINT_SHARE = 0.05
"""Part of the time that fetching may take."""
BYTES_PER_S = 200e6
"""How fast values come home, until that has been measured."""
_LEVELS = frozenset({"live_handles", "programs_known", "results_kept", "results_kept_bytes"})
_T = TypeVar("_T")


class Recovering:
    """Hands over as a link does, and begins anew on another server when the server dies.

    It has the methods of `djinn.link.Link`.

    Args:
        make: Makes what hands over, given connections.
        connections: The first ones.
        reconnector: Makes others.
        tape: The session's tape.
        released: Numbers of values that nobody names any more.
        numbers: Gives numbers to values.
        devices: Those that have random numbers of their own; ``None`` for the only one.
        limit_bytes: How many bytes of tensors may be kept.

    Concurrency:
        The caller holds the session's lock.

    Laws:
        session.recovery_exact
    """

    def __init__(
        self, make: Callable[[Sequence[Connection]], Hands], connections: Sequence[Connection],
        reconnector: Reconnector, tape: Tape, released: deque[int], numbers: Iterator[int],
        devices: Sequence[torch.device | None], limit_bytes: int,
    ) -> None:
        self.journal = Journal(limit_bytes)
        self.materializations = 0
        self.nodes_taken = 0
        self._make = make
        self._hands = make(connections)
        self._reconnector = reconnector
        self._tape = tape
        self._released = released
        self._numbers = numbers
        self._devices = devices
        self._dead: set[int] = set()
        self._losses = Losses(self.journal)
        self._is_alive = True
        self._ended: DjinnError | None = None
        self._tries = 0
        self._taken_before = 0
        """Operations taken when a server died last; if there are more when the next dies, it is not the same work."""
        self._last_words = ""
        self._past: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._sent_at: float | None = None
        self._pinned: int | None = None
        self._busy_s = self._busy_since_checkpoint_s = 0.0
        self._bytes_per_s = BYTES_PER_S
        self._considered_at = 0
        self._is_quiet = False
        """Whether everything has been answered, and nothing was handed over since."""

    @property
    def address(self) -> str:
        """Where operations run now."""
        return self._hands.link.address

    @property
    def welcome(self) -> Welcome:
        """What the server said of itself that runs them now."""
        return self._hands.link.welcome

    @property
    def links(self) -> list[Link]:
        """The links that there are now."""
        return self._hands.link.links

    @property
    def inner(self) -> Link | Fleet:
        """What hands over to the servers that there are now."""
        return self._hands.link

    def flush(self) -> None:
        """Send everything pending."""
        self._take(None)
        self._handed_over(lambda hands: hands.link.flush())

    def fetch(self, slots: Sequence[Slot], *, whole: bool) -> list[Any]:
        """Bring values home; see `djinn.link.Link.fetch`.

        Raises:
            StateLostError: A value was lost with a server.
        """
        self._take(None if whole else slots)
        return self._asked(slots, lambda hands: hands.link.fetch(slots, whole=True))

    def describe(self, slots: Sequence[Slot]) -> list[Any]:
        """Send everything pending and bring home the metadata of values.

        Raises:
            StateLostError: A value was lost with a server.
        """
        self._take(None)
        return self._asked(slots, lambda hands: hands.link.describe(slots))

    def synchronize(self) -> None:
        """Send everything pending and wait until it has run."""
        self._take(None)
        self._asked((), lambda hands: hands.link.synchronize())

    def upload(self, number: int, dense: torch.Tensor, device: torch.device | None = None) -> None:
        """Send a dense CPU tensor, and keep it."""
        self._maintain()
        is_whole = len(self._devices) == 1
        self.journal.add_upload(number, dense, device, is_whole=is_whole)
        if number == GENERATOR_HANDLE and is_whole:
            self._losses.restore(GENERATOR_HANDLE)
        self._handed_over(lambda hands: hands.link.upload(number, dense, device))

    def seed(self, seed: int) -> None:
        """Seed the random numbers after everything pending."""
        self._take(None)
        self.journal.add_seed(seed)
        self._losses.restore(GENERATOR_HANDLE)
        self._handed_over(lambda hands: hands.link.seed(seed))

    def run(self, nodes: Sequence[Node], released: set[int], layout: Layout) -> None:
        """Run a piece of tape again, behind everything pending; see `djinn.link.Link.run`."""
        self._take(None)
        own, gone = repeated(nodes, released, self._numbers, self.journal)
        self.journal.add_nodes(own, gone, defers=False)
        if self._losses:
            own = [node for node in own if self._losses.allows(node)]
            self._handed_over(lambda hands: _add(hands, own, self._losses.present(gone)))
        else:
            self._handed_over(lambda hands: hands.link.run(nodes, released, layout))

    def pin(self, executor: int | None) -> None:
        """Let everything run on one executor from now on; ``None``: wherever the placement wants it."""
        self._pinned = executor
        self._hands.link.pin(executor)

    def learn(self, executor: int, profile: DeviceProfile, home_link: LinkProfile,
              links: Mapping[int, LinkProfile]) -> None:
        """Learn how fast an executor of those is that there are now."""
        self._hands.link.learn(executor, profile, home_link, links)

    def keep_results(self, results: ResultCache | None) -> None:
        """Let go of results that are kept, and keep others from now on; after a recovery, as the settings say."""
        if self._is_alive:
            self._hands.link.keep_results(results)

    def close(self) -> None:
        """Close the connections."""
        self._ended = SessionClosedError("The session has ended.", hint="Call djinn.init() to start another.")
        self._hands.link.close()

    def stats(self) -> dict[str, int]:
        """Count what went over all links that there ever were, and what was recovered."""
        now = self._hands.link.stats()
        if not self._is_alive:
            # What it counted is among the past already, and it holds nothing.
            now = dict.fromkeys(now, 0)
        return {
            **{name: count + self._past[name] for name, count in now.items()},
            "materializations": self.materializations,
            **{name: self._counts[name] for name in ("recoveries", "nodes_replayed", "bytes_replayed", "checkpoints",
                                                     "checkpoint_bytes")},
            "local_fallbacks": self._reconnector.fallbacks,
            "journal_nodes": self.journal.node_count,
            "journal_bytes": self.journal.size_bytes,
        }

    def _take(self, wanted: Sequence[Slot] | None) -> None:
        """Write the tape, or the slice that ``wanted`` needs, into the journal, and give it on; see `Link._take`."""
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
        """Take those of the dead values that nothing on the tape uses."""
        gone = self._dead
        if self._tape.nodes:
            gone = gone - {slot.number for node in self._tape.nodes for slot in (*node.inputs, *node.outputs)}
        self._dead = self._dead - gone
        return gone

    def _handed_over(self, act: Callable[[Hands], None]) -> None:
        """Do what needs no answer. What the journal has is not done twice."""
        if self._sent_at is None:
            self._sent_at = time.monotonic()
        if self._is_alive and self._ended is None:
            try:
                act(self._hands)
                return
            except DjinnError as error:
                if not self._hands.is_broken:
                    raise
                self._died(error)
        self._recover()

    def _asked(self, slots: Sequence[Slot], ask: Callable[[Hands], _T]) -> _T:
        """Do what is answered, as often as it takes."""
        began = time.monotonic() if self._sent_at is None else self._sent_at
        while True:
            if not self._is_alive or self._ended is not None:
                self._recover()
            if self._losses:
                self._losses.check(slots)
            asked = [link.round_trips for link in self.links]
            try:
                answer = ask(self._hands)
            except DjinnError as error:
                if not self._hands.is_broken:
                    self._answered(began, asked)
                    raise
                self._died(error)
            except Exception:
                self._answered(began, asked)
                raise
            else:
                self._answered(began, asked)
                self._is_quiet = True
                return answer

    def _answered(self, began: float, asked: Sequence[int]) -> None:
        """Learn that something was answered; what all servers have answered for is settled."""
        self._tries = 0
        if any(link.round_trips == before for link, before in zip(self.links, asked, strict=True)):
            return
        self._sent_at = None
        self.journal.settled = len(self.journal.entries)
        took_s = time.monotonic() - began
        self._busy_s += took_s
        self._busy_since_checkpoint_s += took_s

    def _died(self, error: DjinnError) -> None:
        self._look_whether_final(error)
        self._last_words = error.summary
        self._is_alive = False
        if self.nodes_taken > self._taken_before:
            self._tries, self._taken_before = 0, self.nodes_taken
        for name, count in self._hands.link.stats().items():
            if name not in _LEVELS:
                self._past[name] += count
        self._hands.link.close()
        log.warning("%s died: %s", self.address, error.summary)

    def _look_whether_final(self, error: DjinnError) -> None:
        if isinstance(error, ProgramTimeoutError | SessionTerminatedError):
            # To do the same again would end the same.
            self._ended = error

    def _recover(self) -> None:
        """Begin anew on a server, and make everything again.

        Raises:
            TransportError: No server came back, or each dies of the same work.
        """
        while not self._is_alive or self._ended is not None:
            if self._ended is not None:
                raise type(self._ended)(self._ended.summary, hint=self._ended.hint)
            if self._tries == MAX_TRIES:
                self._ended = TransportError(
                    f"{MAX_TRIES} times in a row a server died of the same work, at last so: {self._last_words}",
                    hint="See the server's log for the reason. What it held is lost; call djinn.init() to start a "
                         "new session.")
                continue
            self._tries += 1
            began = time.monotonic()
            try:
                connections = self._reconnector.connect()
            except TransportError as error:
                self._ended = TransportError(error.summary, hint=error.hint)
                continue
            self._begin_anew(connections, began)

    def _begin_anew(self, connections: Sequence[Connection], began: float) -> None:
        connected_s = time.monotonic() - began
        self.journal.compact()
        try:
            hands = self._make(connections)
            if self._pinned is not None:
                hands.link.pin(min(self._pinned, len(connections) - 1))
            replay = Replay(self.journal, hands)
            log.warning("going on at %s: %d operations are carried out again", hands.link.address,
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
        self._counts.update(recoveries=1, nodes_replayed=replay.nodes, bytes_replayed=replay.size_bytes)
        replayed_s = time.monotonic() - began - connected_s
        log.warning("recovered at %s: connected after %.2f s, %d operations and %s bytes again in %.2f s%s",
                    self.address, connected_s, replay.nodes, f"{replay.size_bytes:,}", replayed_s,
                    f"; {len(replay.losses)} values are lost" if replay.losses else "")

    def _maintain(self) -> None:
        """Fetch what would take long to compute again, if that is worth the wait.

        It happens before the next piece is handed over, when what the answer was for has been let go of.
        """
        operations = len(self.journal.entries)
        is_quiet, self._is_quiet = self._is_quiet, False
        if not is_quiet or not self._is_alive or self.journal.settled < operations:
            # A failure that nobody has heard of would be taken for one of the checkpoint.
            return
        if operations < max(MIN_REPLAY_ENTRIES, 2 * self._considered_at):
            return
        seconds_per_node = self._busy_s / max(1, self.nodes_taken)
        if operations * seconds_per_node < MIN_REPLAY_S and operations < MAX_REPLAY_NODES:
            return
        while self._released:
            self._dead.add(self._released.popleft())
        self._hands.released.extend(self._losses.present(self.journal.add_nodes((), self._gone())))
        self.checkpoint(seconds_per_node, is_forced=False)
        self._considered_at = len(self.journal.entries)

    def checkpoint(self, seconds_per_node: float = 1.0, *, is_forced: bool = True) -> None:
        """Fetch what would take longer to compute again, so that it need not be.

        Args:
            seconds_per_node: How long an operation takes.
            is_forced: Whether to do so however long it takes to fetch.
        """
        self.journal.compact()
        found = plan(self.journal, seconds_per_node, self._bytes_per_s)
        if not is_forced:
            takes_s = found.size_bytes / self._bytes_per_s
            is_urgent = found.operations > MAX_REPLAY_NODES
            if takes_s > CHECKPOINT_SHARE * self._busy_since_checkpoint_s and not is_urgent:
                return
            if found.saves < found.operations // 2:
                return
        if found.left_bytes > self.journal.limit_bytes:
            return
        self._fetch_checkpoint(found.candidates)

    def _fetch_checkpoint(self, candidates: Sequence[Candidate]) -> None:
        began = time.monotonic()
        states = [Slot(GENERATOR_HANDLE, index) for index in range(len(self._devices))]
        try:
            fetched = self._hands.link.fetch([*states, *(candidate.slot for candidate in candidates)], whole=True)
        except Exception as error:  # noqa: BLE001  # nobody asked for them: what is the matter shows when somebody does
            log.debug("no checkpoint: %s", error)
            return
        kind = self._hands.device_kind
        generators = Generators(list(zip(self._devices, fetched, strict=False)), kind)
        snapshots: list[Snapshot] = []
        for candidate, tensor in zip(candidates, fetched[len(states):], strict=True):
            if _is_as_expected(tensor, candidate):
                snapshots.append(candidate.snapshot(Kept(tensor)))
        size_bytes = sum(size_of(snapshot.kept.tensor) for snapshot in snapshots)
        took_s = max(time.monotonic() - began, 1e-6)
        if size_bytes > 2**20:
            self._bytes_per_s = (self._bytes_per_s + size_bytes / took_s) / 2
        self.journal.add_checkpoint(snapshots, generators)
        self._busy_since_checkpoint_s = 0.0
        self._counts.update(checkpoints=1, checkpoint_bytes=size_bytes)
        log.info("checkpoint: %d storages, %s bytes in %.3f s; %d operations are left to carry out again",
                 len(snapshots), f"{size_bytes:,}", took_s, self.journal.node_count)


def _is_as_expected(tensor: Any, candidate: Candidate) -> bool:
    spec = candidate.spec
    return (isinstance(tensor, torch.Tensor) and tensor.dtype == spec.dtype and tensor.size() == spec.size
            and tensor.stride() == spec.stride)


def _add(hands: Hands, nodes: Sequence[Node], gone: Sequence[int]) -> None:
    hands.tape.nodes.extend(nodes)
    hands.released.extend(gone)


def _close(connections: Sequence[Connection]) -> None:
    for connection in connections:
        connection.close()

"""The fleet: the links of a session with several executors, and the transfers between them."""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from djinn.errors import ConfigurationError
from djinn.ir.flush_policy import AdaptiveFlush
from djinn.ir.program import ProgramLayout
from djinn.ir.spec import TensorSpec
from djinn.ir.tape import Node, Tape, without_dead
from djinn.ir.value import Slot
from djinn.kinds import Connection
from djinn.kinds.cache import SubmissionCache
from djinn.session.single_backend import SingleBackend
from djinn.wire.messages import GENERATOR_HANDLE, Command, Peer, Receive, Send
from djinn_plugins.common.device_report import FIRST_REPORT, REPORT_HANDLES, device_of
from djinn_plugins.common.interrupts import deferral
from djinn_plugins.fleet.checking import no_results_kept
from djinn_plugins.fleet.directory import Directory, DirectoryEntry
from djinn_plugins.fleet.loading import loads_first
from djinn_plugins.fleet.loads import FleetLoads
from djinn_plugins.fleet.views import view_chain
from djinn_plugins.graph.views import changes_metadata, is_view, takes_storage
from djinn_plugins.schedule.placing import GrowingPlacement, Placed, Placement
from djinn_plugins.schedule.schedule import DeviceInfo, DeviceProfile, LinkProfile


class Fleet:
    """Submits tape to several executors, and tracks where values are.

    A `djinn.kinds.backend.Backend`. Every executor runs its part of the tape in program order; where an
    operation reads what another executor has, the value is sent from server to server, and the receiving one waits for
    it there. So the parts run at the same time as far as the data allows.

    Args:
        connections: One open connection per executor.
        tape: The session's tape.
        released: Numbers of values that the program no longer references.
        placement: Decides which executor runs what.
        loads: Learns how busy the executors are.
        pace: Decides when to submit.
        wrap: Wraps the connections to executors that are added later.
        is_debugging: Whether the lines of user code are kept.

    Concurrency:
        The caller holds the session's lock.
    """

    def __init__(
        self, connections: Sequence[Connection], tape: Tape, released: deque[int], placement: Placement,
        loads: FleetLoads, pace: AdaptiveFlush, wrap: Callable[[Sequence[Connection]], Sequence[Connection]],
        *, is_debugging: bool,
    ) -> None:
        self._pace = pace
        self._is_debugging = is_debugging
        self._reported: OrderedDict[tuple[str, int], None] = OrderedDict()
        self.executors = list(map(self._opened, connections))
        self.welcome = self.executors[0].welcome
        self.where = Directory(len(self.executors))
        self.materializations = 0
        self.nodes_taken = 0
        self.transfers = 0
        self.transferred_bytes = 0
        self._tape = tape
        self._released = released
        self.placement = placement
        self._loads = loads
        loads.use(self.executors)
        self._wrap = wrap
        self._dead: set[int] = set()
        self._transfers = itertools.count(1)
        self._peers: set[tuple[int, int]] = set()
        self._drawn_at = 0
        """The executor that has the shared random generator; if the user chooses devices, each executor has its own."""
        self._leaving: deque[tuple[int, int]] = deque()
        self._position = 0
        self._interrupt: BaseException | None = None

    @property
    def address(self) -> str:
        """The addresses of all executors."""
        return ", ".join(executor.address for executor in self.executors)

    @property
    def nodes_sent(self) -> int:
        """How many operations were handed over, those included that several executors carry out."""
        return sum(link.nodes_sent for link in self.executors)

    @property
    def live_handles(self) -> int:
        """How many values the executors hold, copies included."""
        return sum(link.live_handles for link in self.executors)

    def pin(self, executor: int | None) -> None:
        """Run all further work on one executor; ``None``: where the placement chooses."""
        self.placement.pin(executor)

    def learn(self, executor: int, profile: DeviceProfile, home_link: LinkProfile,
              links: Mapping[int, LinkProfile]) -> None:
        """Record the measured speed of an executor, and of the links from it."""
        self.placement.learn(executor, profile, home_link, links)

    def use(self, placement: Placement) -> None:
        """Let another placement decide."""
        self.placement = placement

    @property
    def device_count(self) -> int:
        """How many logical devices there are: one, unless the user says which executor runs what."""
        return self.placement.device_count(len(self.executors))

    def devices(self, values: Sequence[int]) -> list[DeviceInfo]:
        """Describe the executors to a scheduler; see `djinn_plugins.schedule.placing.SupportsPlacement`."""
        self._loads.refresh()
        return self.placement.devices(self.where, values)

    def use_cache(self, open_cache: Callable[[], SubmissionCache]) -> None:
        """Refuse: results of several executors are not kept.

        Raises:
            ConfigurationError: The cache would keep results.
        """
        if type(open_cache()) is not SubmissionCache:
            raise no_results_kept()

    def introduce(self) -> None:
        """Connect the servers with each other.

        Raises:
            PeerError: One cannot reach another.
            ConfigurationError: Their devices are of different kinds, or their PyTorch releases differ.
        """
        self._check_alike()
        for source, target in itertools.permutations(range(len(self.executors)), 2):
            self._introduce(source, target)
        self.synchronize()
        self._loads.refresh()

    @property
    def may_grow(self) -> bool:
        """Whether another executor can be added now: the placement for all of the session's work must decide."""
        return isinstance(self.placement, GrowingPlacement)

    def add(self, connection: Connection) -> None:
        """Let another executor take part in new work; see `djinn_plugins.schedule.placing.SupportsJoining`."""
        newest, placement = len(self.executors), self.placement
        assert isinstance(placement, GrowingPlacement)
        self.executors += map(self._opened, self._wrap([connection]))
        try:
            self._check_alike()
            for other in range(newest):
                self._introduce(other, newest)
                self._introduce(newest, other)
            self._synchronize_all()
        except BaseException:
            # The others may know its number already; the next executor with this number replaces it there.
            del self.executors[newest]
            raise
        self.where.held_bytes.append(0)
        self._loads.add(connection)
        placement.add(connection)

    def _opened(self, connection: Connection) -> SingleBackend:
        # Each part keeps the order in which it was placed.
        return SingleBackend(connection, Tape(), deque(), None, self._pace, self._is_debugging, self._reported)

    def _synchronize_all(self) -> None:
        """Wait for all executors. The first failure is raised at the end, and none is reported later."""
        failures: list[Exception] = []
        for link in self.executors:
            try:
                link.synchronize()
            except Exception as error:  # noqa: BLE001  # raised below
                failures.append(error)
        if failures:
            raise failures[0]

    def _check_alike(self) -> None:
        described = {"device": {device_of(link.welcome).kind for link in self.executors},
                     "torch": {str(link.welcome.torch) for link in self.executors}}
        for attribute, kinds in described.items():
            if len(kinds) > 1:
                raise ConfigurationError(f"The servers of one session have to be alike, their {attribute}s are "
                                         f"{' and '.join(sorted(kinds))}.", hint="Serve them alike.")

    def flush(self) -> None:
        """Send everything pending to all executors."""
        self._take(None)
        self._submit()
        self._pace.sent()

    def fetch(self, slots: Sequence[Slot], *, whole: bool) -> list[Any]:
        """Bring values home; see `djinn.kinds.backend.Backend.fetch`."""
        self._loads.revisit()
        self._take(None if whole else slots)
        return self._asked(slots, lambda executor, mine: self._loads.fetch(executor, self.executors[executor], mine))

    def describe(self, slots: Sequence[Slot]) -> list[Any]:
        """Send everything pending and fetch the metadata of values."""
        if not slots:
            # An operation without results may still fail.
            self.synchronize()
        self._take(None)
        return self._asked(slots, lambda executor, mine: self.executors[executor].describe(mine))

    def synchronize(self) -> None:
        """Send everything pending and wait until it has run everywhere."""
        self._take(None)
        self._submit()
        for executor, link in enumerate(self.executors):
            link.synchronize()
            self._loads.answered(executor, link)

    def upload(self, number: int, dense: torch.Tensor, device: torch.device | None = None) -> None:
        """Send a dense CPU tensor to the executor that will hold it."""
        size_bytes = dense.numel() * dense.element_size()
        if number == GENERATOR_HANDLE:
            self.executors[self._generator(device)].upload(number, dense)
            return
        executor = self.placement.house(size_bytes, device, self.where)
        spec = TensorSpec(dense.size(), dense.stride(), 0, dense.dtype, dense.device)
        self.where.add(number, executor, spec)
        self.executors[executor].upload(number, dense)

    def seed(self, seed: int) -> None:
        """Seed the random generators after everything pending."""
        self._take(None)
        for executor, link in enumerate(self.executors):
            if not self.placement.shares_generator or executor == self._drawn_at:
                link.seed(seed)

    def run(self, nodes: Sequence[Node], released: set[int], layout: ProgramLayout) -> None:
        """Run a piece of tape again, behind everything pending; see `djinn.kinds.backend.Backend.run`."""
        self._take(None)
        self._distribute(self.placement.place(nodes, released, self.where), set(released))

    def cancel(self) -> None:
        """Cancel the submitted work on every executor."""
        for link in self.executors:
            link.cancel()

    def close(self) -> None:
        """Close the connections."""
        with ExitStack() as closing:
            for link in self.executors:
                closing.callback(link.close)

    def stats(self) -> dict[str, int]:
        """Count what went over the links."""
        every = [link.stats() for link in self.executors]
        counted = {name: sum(counts[name] for counts in every) for name in every[0]}
        return {**counted, "materializations": self.materializations, "transfers": self.transfers,
                "bytes_transferred": self.transferred_bytes}

    def _asked(self, slots: Sequence[Slot], ask: Callable[[int, list[Slot]], list[Any]]) -> list[Any]:
        """Ask every executor for its values. All commands are submitted first: an executor may wait for another.

        If one has all values, its commands travel with the question, which it can then answer early.
        """
        groups: dict[int, list[int]] = {}
        for position, slot in enumerate(slots):
            groups.setdefault(self._home_of(slot), []).append(position)
        self._submit(but=next(iter(groups)) if len(groups) == 1 else None)
        made: list[Any] = [None] * len(slots)
        for executor, positions in groups.items():
            answers = ask(executor, [slots[position] for position in positions])
            for position, answer in zip(positions, answers, strict=True):
                made[position] = answer
        return made

    def _home_of(self, slot: Slot) -> int:
        if slot.number == GENERATOR_HANDLE:
            # The slot of a generator contains the device's index in place of a storage.
            return self._drawn_at if self.placement.shares_generator else slot.storage
        if slot.number in REPORT_HANDLES:
            return slot.storage - FIRST_REPORT
        return self.where.home_of(slot.number) or 0

    def _generator(self, device: torch.device | None) -> int:
        if self.placement.shares_generator:
            return self._drawn_at
        return 0 if device is None else device.index or 0

    def _submit(self, but: int | None = None) -> None:
        for executor, link in enumerate(self.executors):
            if executor != but:
                self._submit_to(link)
        if but is not None and self._interrupt is not None:
            self._submit_to(self.executors[but])
        self._raise_interrupt()

    def _submit_to(self, link: SingleBackend) -> None:
        """Submit what an executor has to do; keep an interrupt until the others have what refers to it."""
        try:
            link.submit()
        except BaseException as error:
            deferred = deferral()
            if deferred is None or deferred.error is not error:
                raise
            self._interrupt = error

    def _raise_interrupt(self) -> None:
        interrupt, self._interrupt = self._interrupt, None
        if interrupt is not None:
            raise interrupt

    def _take(self, wanted: Sequence[Slot] | None) -> None:
        """Distribute the tape, or the slice that ``wanted`` needs; see `djinn.ir.tape.Tape.take`."""
        if not (self._tape.nodes or self._released or self._dead):
            return
        nodes, gone = self._tape.take(wanted, self._released, self._dead)
        self.nodes_taken += len(nodes)
        loads, rest = loads_first(without_dead(nodes, gone))
        try:
            if loads:
                # What reads stored weights is scheduled where they are.
                self._distribute(self.placement.place(loads, gone, self.where), set())
                nodes = rest
            placed = self.placement.place(rest, gone, self.where)
        except BaseException:
            # For example, the schedule breaks a rule. Nothing has run, and nothing is lost.
            self._tape.nodes[:0] = nodes
            self.nodes_taken -= len(nodes)
            raise
        self._dead -= gone
        self._distribute(placed, gone)

    def _distribute(self, placed: Placed, gone: set[int]) -> None:
        """Give each executor its part, completely even if an interrupt arrives.

        Args:
            placed: What to run, and where.
            gone: Values that are no longer used after these operations.
        """
        self._leaving = _last_uses(placed, gone)
        for self._position, (node, executor) in enumerate(placed):
            if self._position and placed[self._position - 1][0] is node:
                self._put_again(node, executor)
                continue
            if takes_storage(node.signature.template.operator):
                self._rehouse(node.inputs[0].number, node.inputs[1].number)
            self._put(node, self._allowed(node, executor))
        self._position = len(placed)
        self._let_go()
        for link in self.executors:
            link.settle()
        self._raise_interrupt()

    def _let_go(self) -> None:
        """Free values whose last use is before the node that is being distributed."""
        while self._leaving and self._leaving[0][0] < self._position:
            number = self._leaving.popleft()[1]
            for executor in self.where.drop(number):
                self.executors[executor].released.append(number)

    def _allowed(self, node: Node, executor: int) -> int:
        """Return where a node must run, given the chosen executor: storages that it views have a home.

        Storages that it writes move to where it runs. Those of a value that takes another's storage have just moved.
        """
        signature = node.signature
        moves = () if takes_storage(signature.template.operator) else signature.writes
        bound = [node.inputs[index] for index in {*signature.writes, *signature.aliases}
                 if index >= 0 and index not in moves]
        homes = {home for slot in bound if (home := self.where.home_of(slot.number)) is not None}
        return executor if not homes or executor in homes else min(homes)

    def _rehouse(self, number: int, source: int) -> None:
        """Move a value to the home of the storage that it is about to share."""
        held, other = self.where.find(number), self.where.find(source)
        if held is None or other is None or held.storage == other.storage:
            return
        before, home = self.where.homes[held.storage], self.where.homes[other.storage]
        if before != home:
            if home not in held.copies:
                self._move(number, before, home)
            self.executors[before].released.append(number)
        self.where.rehouse(number, other.storage)

    def _put(self, node: Node, executor: int) -> None:
        signature = node.signature
        if signature.is_random and self.placement.shares_generator and executor != self._drawn_at:
            self._move(GENERATOR_HANDLE, self._drawn_at, executor)
            self._drawn_at = executor
        written = [node.inputs[index] for index in signature.writes]
        for slot in written:
            self._rehome(slot, executor)
        for slot in node.inputs:
            self._bring(slot, executor)
        self.executors[executor].tape.nodes.append(node)
        for slot in written:
            self._forget_copies(slot)
            if changes_metadata(signature.template.operator):
                self.where.forget_views(slot.number)
        view = node if is_view(signature) else None
        specs = signature.results or (None,) * len(node.outputs)
        aliases = signature.aliases or (-1,) * len(node.outputs)
        for slot, spec, alias in zip(node.outputs, specs, aliases, strict=True):
            self.where.add(slot.number, executor, spec, view, node.inputs[alias].number if alias >= 0 else None)

    def _put_again(self, node: Node, executor: int) -> None:
        """Let another executor run a node, too, so that its results need not be sent there."""
        for slot in node.inputs:
            self._bring(slot, executor)
        self._repeat(node, executor)

    def _bring(self, slot: Slot, executor: int) -> None:
        """Make a value available on the executor that is about to read it."""
        held = self.where.find(slot.number)
        if held is None or self.where.is_at(slot.number, executor):
            return
        home = self.where.homes[held.storage]
        self._let_go()
        # Repeating a view costs nothing where its base is. If the base is no larger than the view, move the base.
        nodes, base = view_chain(slot.number, executor, self.where)
        if nodes and not self.where.is_at(base, executor):
            if self._size_of(base) > held.size_bytes:
                nodes, base = [], slot.number
            self._move(base, home, executor)
        elif not nodes:
            self._move(slot.number, home, executor)
        for node in nodes:
            self._repeat(node, executor)

    def _size_of(self, number: int) -> int:
        held: DirectoryEntry | None = self.where.find(number)
        return 0 if held is None else held.size_bytes

    def _repeat(self, node: Node, executor: int) -> None:
        """Make the results of a node on another executor as well."""
        link = self.executors[executor]
        link.tape.nodes.append(node)
        for slot in node.outputs:
            if slot.number in self.where:
                self.where.copied(slot.number, executor)
            else:
                link.released.append(slot.number)

    def _rehome(self, slot: Slot, executor: int) -> None:
        """Move a storage to another home. Its values share memory there as before."""
        held = self.where.find(slot.number)
        if held is None or (home := self.where.homes[held.storage]) == executor:
            return
        self._let_go()
        family = tuple(number for number, _ in self.where.members_of(held.storage))
        self._send(Send(slot.number, executor, next(self._transfers), family), home, executor)
        self.executors[home].released.extend(family)
        self.executors[executor].live_handles += self.where.rehome(held.storage, executor)

    def _forget_copies(self, slot: Slot) -> None:
        """Drop the copies of a storage that has been written."""
        written = self.where.find(slot.number)
        if written is None:
            return
        for number, held in list(self.where.members_of(written.storage)):
            for executor in sorted(held.copies):
                self.where.drop_copy(number, executor)
                self.executors[executor].released.append(number)

    def _move(self, number: int, source: int, target: int) -> None:
        """Send a copy of a value from one server to another."""
        self._send(Send(number, target, next(self._transfers)), source, target)
        if number != GENERATOR_HANDLE:
            self.transferred_bytes += self._size_of(number)
            self.where.copied(number, target)
            self.executors[target].live_handles += 1

    def _send(self, send: Send, source: int, target: int) -> None:
        """Send a transfer from one server to another, after everything that both have to do so far."""
        # This ends the current programs. Values whose last use is in them are freed with them.
        self._let_go()
        self.executors[source].settle()
        self.executors[target].settle()
        self.executors[source].command(send)
        # Deadlock freedom: a receiver only ever waits for data that is already in flight, also where submitting has to
        # wait. Submitting early also overlaps the transfer with compute.
        self._submit_to(self.executors[source])
        sender = self.executors[source].welcome.session
        self.executors[target].command(Receive(send.handle, send.transfer, sender, send.family))
        self.transfers += 1

    def _introduce(self, source: int, target: int) -> None:
        welcome = self.executors[target].welcome
        command: Command = Peer(target, self.executors[target].address, welcome.mailbox)
        self.executors[source].command(command)


def _last_uses(placed: Sequence[tuple[Node, int]], gone: set[int]) -> deque[tuple[int, int]]:
    """Return position and number of each value in ``gone``, ordered by the position of its last use."""
    last = dict.fromkeys(gone, -1)
    for position, (node, _) in enumerate(placed):
        for slot in (*node.inputs, *node.outputs):
            if slot.number in last:
                last[slot.number] = position
    return deque(sorted((position, number) for number, position in last.items()))

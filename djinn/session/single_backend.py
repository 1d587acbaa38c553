"""The backend of a session with one executor: the batches on its connection, and their answers."""

from __future__ import annotations

import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from djinn.errors import DjinnError, OperationCancelledError, ScheduleError, SessionClosedError, TransportError
from djinn.ir.flush_policy import AdaptiveFlush
from djinn.ir.program import ProgramLayout
from djinn.ir.tape import Node, Tape, without_dead
from djinn.ir.value import Slot
from djinn.kinds import Connection
from djinn.kinds.backend import Arrange
from djinn.kinds.cache import SubmissionCache
from djinn.kinds.transport import SupportsCancellation
from djinn.record.tensor import user_frame
from djinn.session.programs import ProgramTable
from djinn.wire.failures import WARNINGS, to_exception
from djinn.wire.messages import (
    Batch,
    Command,
    Copy,
    Failure,
    Free,
    Plain,
    Poisoned,
    Result,
    Seed,
    TensorHeader,
    Upload,
    Warned,
    from_wire,
)
from djinn.wire.tensors import copied, header_of

MAX_HELD_UPLOAD_BYTES = 64 * 1024
"""Uploads wait for the next message until their total size exceeds this."""
MAX_FAILURES = 1000
"""Most failures and origins remembered; the latest are kept."""


class SingleBackend:
    """Turns tape into batches, and keeps account of handles and failures; see `djinn.kinds.backend.Backend`.

    Args:
        connection: An open connection.
        tape: The tape that it takes nodes from.
        released: Numbers of values that the program no longer refers to.
        arrange: Asked once per new program for the order of its nodes; ``None`` means program order.
        pace: When to hand over; told when it happens.
        is_debugging: Whether the users' lines are kept.
        reported: Failures that the session has heard of, by the server's session and their identity there; shared by
            backends whose servers pass failures on to each other.
        cache: Asked before a segment is submitted.

    Concurrency:
        The caller holds the session's lock.
    """

    def __init__(
        self, connection: Connection, tape: Tape, released: deque[int], arrange: Arrange | None, pace: AdaptiveFlush,
        is_debugging: bool, reported: OrderedDict[Any, None] | None = None, cache: SubmissionCache | None = None,
    ) -> None:
        self.address = connection.address
        self.welcome = connection.welcome
        self.tape = tape
        self.released = released
        self.connection = connection
        self._programs = ProgramTable(arrange)
        self._pace = pace
        self._reported = OrderedDict[Any, None]() if reported is None else reported
        self._cache = SubmissionCache() if cache is None else cache
        self._is_answered = True
        self._dead: set[int] = set()
        self._commands: list[Command] = []
        self._tensors: list[torch.Tensor] = []
        self._held_bytes = 0
        self._failures: OrderedDict[int, Failure] = OrderedDict()
        self._unreported: list[Failure] = []
        self._origins: OrderedDict[tuple[int, int], str] | None = OrderedDict() if is_debugging else None
        self._broken: DjinnError | None = None
        self.nodes_taken = 0
        self.nodes_sent = 0
        self.materializations = 0
        self.flushes = 0
        self.round_trips = 0
        self.live_handles = 0

    @property
    def executors(self) -> Sequence[SingleBackend]:
        """This backend, which is its only executor."""
        return (self,)

    @property
    def device_count(self) -> int:
        """Return 1."""
        return 1

    @property
    def is_broken(self) -> bool:
        """Whether nothing more can be sent or received."""
        return self._broken is not None

    def wrap_connection(self, wrap: Callable[[Connection], Connection]) -> Callable[[], None]:
        """Let everything pass through another connection; returns a function that undoes that."""
        plain, self.connection = self.connection, wrap(self.connection)

        def undo() -> None:
            self.connection = plain

        return undo

    def flush(self) -> None:
        """Send everything pending."""
        self._take(None)
        self.submit()
        self._pace.sent()

    def settle(self) -> None:
        """Convert everything pending to commands, which are sent with the next message."""
        self._take(None)

    def command(self, command: Command) -> None:
        """Add a command after those already waiting."""
        self._commands.append(command)

    def fetch(self, slots: Sequence[Slot], *, whole: bool) -> list[Any]:
        """Fetch values.

        Args:
            slots: The values.
            whole: Whether to send the whole tape, or only the operations that the values need.
        """
        self._take(None if whole else slots)
        cached = self._cache.fetched(slots)
        missing = [slot for slot, value in zip(slots, cached, strict=True) if value is None]
        # Even if nothing is missing: failures since the last answer are raised at the next wait.
        values = self._fetch_values(missing) if missing or self._commands or not self._is_answered else []
        for slot, value in zip(missing, values, strict=True):
            self._cache.keep_fetched(slot, value)
        rest = iter(values)
        return [next(rest) if value is None else value for value in cached]

    def _fetch_values(self, slots: Sequence[Slot]) -> list[Any]:
        items, tensors = self._request(Batch([], fetch=tuple(slot.number for slot in slots), synchronize=not slots))
        data = iter(tensors)
        return [next(data) if isinstance(item, TensorHeader) else from_wire(item.value) for item in items]

    def describe(self, slots: Sequence[Slot]) -> list[Any]:
        """Send everything pending and fetch the metadata of values."""
        self._take(None)
        items, _ = self._request(Batch([], describe=tuple(slot.number for slot in slots), synchronize=True))
        return [from_wire(item.value) if isinstance(item, Plain) else item for item in items]

    def synchronize(self) -> None:
        """Send everything pending and wait until it has run."""
        self._take(None)
        self._request(Batch([], synchronize=True))

    def upload(self, number: int, dense: torch.Tensor, device: torch.device | None = None) -> None:
        """Send a dense CPU tensor; small ones are batched. There is only one device, so ``device`` is ignored."""
        self._held_bytes += dense.nbytes
        is_held = self._held_bytes <= MAX_HELD_UPLOAD_BYTES
        self._commands.append(Upload(number, header_of(dense)))
        self._tensors.append(copied(dense) if is_held else dense)
        self.live_handles += number != 0
        self._cache.uploaded(number, dense)
        if not is_held:
            self.submit()

    def seed(self, seed: int) -> None:
        """Seed the random generators after everything pending."""
        self._take(None)
        self._commands.append(Seed(seed))

    def run(self, nodes: Sequence[Node], released: set[int], layout: ProgramLayout) -> None:
        """Run a piece of tape again, after everything pending.

        Args:
            nodes: The piece; its slots contain the current numbers.
            released: Numbers of results that are released at once.
            layout: The result of `djinn.session.programs.lay_out` for them.
        """
        self._take(None)
        self._cache.ran(nodes)
        self._add(nodes, released, layout)

    def use_cache(self, open_cache: Callable[[], SubmissionCache]) -> None:
        """Drop the cache of results, and use another."""
        self._take(None)
        freed = self._cache.release_all()
        self._commands += [Free(tuple(freed))] if freed else []
        self.live_handles -= len(freed)
        self._cache = open_cache()

    def cancel(self) -> None:
        """Cancel the submitted work."""
        # As if it had failed: it has to be computed again.
        self._cache.answered(failed=True)
        if isinstance(self.connection, SupportsCancellation) and self._broken is None:
            self.connection.cancel()

    def close(self) -> None:
        """Close the connection."""
        self._broken = SessionClosedError("The session has ended.", hint="Call djinn.init() to start another.")
        self.connection.close()

    def stats(self) -> dict[str, int]:
        """Count the traffic of the link."""
        return {
            "nodes_executed": self.nodes_sent,
            "materializations": self.materializations,
            "flushes": self.flushes,
            "round_trips": self.round_trips + getattr(self.connection, "round_trips", 0),
            "bytes_sent": self.connection.bytes_sent,
            **{key: getattr(self.connection, key, 0) for key in ("bytes_not_sent", "reconnections", "answered_early")},
            "bytes_received": self.connection.bytes_received,
            "programs_sent": self._programs.defined,
            "programs_known": len(self._programs),
            "live_handles": self.live_handles,
            **self._cache.stats(),
        }

    def _take(self, wanted: Sequence[Slot] | None) -> None:
        """Convert the tape, or the slice that ``wanted`` needs, to commands."""
        if not (self.tape.nodes or self.released or self._dead):
            return
        nodes, gone = self.tape.take(wanted, self.released, self._dead)
        self.nodes_taken += len(nodes)
        alive = without_dead(nodes, gone)
        self._dead -= gone
        copies, layout = self._cache.find(alive, gone) if alive else (None, None)
        held = self._cache.release(sorted(gone - {slot.number for node in nodes for slot in node.outputs}))
        if copies is not None:
            alive = []
            self._commands.append(Copy(tuple(copies)))
            self.live_handles += len(copies)
        if alive:
            try:
                self._add(alive, gone, layout, held)
            except ScheduleError:
                # Nothing has run, and nothing is lost.
                self.tape.nodes[:0] = nodes
                self.nodes_taken -= len(nodes)
                self._dead |= gone
                raise
        elif held:
            self._commands.append(Free(tuple(held)))
        self.live_handles -= len(held)

    def _add(
        self, nodes: Sequence[Node], released: set[int], layout: ProgramLayout | None = None, held: Sequence[int] = ()
    ) -> None:
        commands, ordered, layout = self._programs.commands(nodes, released, layout, held)
        self._commands += commands
        self.nodes_sent += len(nodes)
        self.live_handles += len(layout.outputs)
        self._remember_origins(commands, ordered)

    def submit(self) -> None:
        """Send the waiting commands."""
        commands, tensors = self._outgoing()
        if not commands:
            return
        self.flushes += 1
        self._is_answered = False
        self._guarded(lambda: self.connection.submit(Batch(commands, phase=self._programs.new_phase()), tensors))

    def _request(self, asked: Batch) -> tuple[Sequence[Any], list[torch.Tensor]]:
        commands, tensors = self._outgoing()
        batch = Batch(commands, asked.fetch, asked.describe, asked.synchronize, phase=self._programs.new_phase())
        self.flushes += bool(commands)
        self.round_trips += 1
        self._pace.waited()
        self._is_answered = False
        result, data = self._guarded(lambda: self.connection.request(batch, tensors))
        self._is_answered = True
        self._cache.answered(failed=bool(result.failures))
        self._learn(result)
        _warn(result.warnings)
        self._raise_failure(result)
        return result.items, data

    def _outgoing(self) -> tuple[list[Command], list[torch.Tensor]]:
        commands, tensors = self._commands, self._tensors
        self._commands, self._tensors, self._held_bytes = [], [], 0
        return commands, tensors

    def _guarded(self, action: Callable[[], Any]) -> Any:
        if self._broken is not None:
            raise type(self._broken)(self._broken.summary, hint=self._broken.hint)
        try:
            return action()
        except DjinnError as error:
            # A copy, because the error's traceback refers to tensors of its callers.
            self._broken = type(error)(error.summary, hint=error.hint)
            raise

    def _learn(self, result: Result) -> None:
        for failure in result.failures:
            self._failures[failure.identity] = failure
            origin = (failure.source or self.welcome.session, failure.source_identity or failure.identity)
            # The program knows that it was interrupted; a request for a value that was not computed raises anyway.
            is_told = origin in self._reported or failure.kind == OperationCancelledError.__name__
            self._reported[origin] = None
            self._unreported += () if is_told else (failure,)
        for known in (self._failures, self._reported):
            while len(known) > MAX_FAILURES:
                known.popitem(last=False)

    def _raise_failure(self, result: Result) -> None:
        """Raise the earliest failure that has not been reported yet, or the failure that poisoned a requested value.

        No local variable may hold the error: its traceback refers to this frame, and so to every tensor of its callers.
        """
        failed = [item.failure for item in result.items if isinstance(item, Poisoned)]
        if self._unreported:
            failures, self._unreported = self._unreported, []
            raise self._exception(*failures)
        if failed:
            known = self._failures.get(failed[0])
            if known is None:
                raise TransportError(f"{self.address} could not compute a value and no longer knows why.")
            raise self._exception(known)

    def _exception(self, failure: Failure, *others: Failure) -> BaseException:
        origin = "" if self._origins is None else self._origins.get((failure.run, failure.step), "")
        error = to_exception(failure, origin)
        if others:
            error.add_note(f"djinn: {len(others)} more operations failed after it, the next: {others[0].message}")
        return error

    def _remember_origins(self, commands: Sequence[Command], nodes: Sequence[Node]) -> None:
        if self._origins is None:
            return
        program = commands[-1].program  # type: ignore[union-attr]  # the last command is the run
        for step, node in enumerate(nodes):
            self._origins[program, step] = node.origin
        while len(self._origins) > 100 * MAX_FAILURES:
            self._origins.popitem(last=False)


def _warn(given: Sequence[Warned]) -> None:
    """Give warnings for the user's line, as an operation there would."""
    for warned in given:
        frame = user_frame()
        warnings.warn_explicit(warned.text, WARNINGS.get(warned.category, UserWarning), frame.f_code.co_filename,
                               frame.f_lineno, frame.f_globals.get("__name__"),
                               frame.f_globals.setdefault("__warningregistry__", {}))

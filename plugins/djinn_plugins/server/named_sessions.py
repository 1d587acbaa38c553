"""Named sessions of a worker: values stay when their client leaves, for the next client that opens that name.

While a client has the session open, the values lie in the memory of its session, under handles that clients cannot
name; the client's own handles may come and go. When it leaves, that memory stays, with nothing else in it. The next
client's session takes the values over between two of its batches, when no program runs.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

import attrs
import torch

from djinn.errors import LimitError, OutOfMemoryError, RefusedError
from djinn_plugins.common.kinds.memory import SessionMemory
from djinn_plugins.common.operators.named_values import (
    MAX_NAME,
    KeptTensor,
    KeptValue,
    NamedReply,
    NamedRequest,
    NamedSession,
)
from djinn_plugins.executor.service import SessionService
from djinn_plugins.server.limits import Allowances, SessionAllowance
from djinn_plugins.server.log_lines import printable
from djinn_plugins.server.tenant_use import Amount
from djinn_plugins.server.tenants import written
from djinn_plugins.transport.resumable_channel import ResumableChannel

__all__ = ("NamedSessions", "SessionNames")

MAX_VALUES = 1024
"""Names of values in one session."""
MAX_STRUCTURE_BYTES = 2**22
"""Of all values of one session together."""
MAX_ENDED = 64
"""Sessions that have ended and are remembered, so that a client learns why a value is not there."""
ENDING_S = 0.05
_KICKED = "the server's operator has ended it"
_LEASE = "its lease was over"
_FAILED = "An operation that should have written it has failed."
_handles = itertools.count(-1, -1)
"""Handles of kept values; those of clients are not negative."""
_log = logging.getLogger("djinn.server")


@attrs.define(eq=False)
class _Kept:
    """A value: its handles, in the order of its tensors."""

    structure: bytes
    handles: tuple[int, ...]
    problem: str = ""


@attrs.define(eq=False)
class _Named:
    """A named session.

    Attributes:
        memory: The memory that the values lie in; ``None`` if it is that of the session that has it open.
        session: Name of the session that has it open, or had it last.
        left_at: When that one left.
        is_ended: Whether the operator has ended it while it was open.
        began_s: When it began, in seconds since 1970.
    """

    name: str
    lease_s: float
    holder: SessionNames | None
    session: str
    memory: SessionMemory | None = None
    values: dict[str, _Kept] = attrs.field(factory=dict)
    left_at: float = 0.0
    is_ended: bool = False
    began_s: int = attrs.field(factory=lambda: int(time.time()))

    @property
    def handles(self) -> list[int]:
        """Return the handles of all values."""
        return [handle for kept in list(self.values.values()) for handle in kept.handles]

    def listed(self, now: float) -> NamedSession:
        """Describe it for a list."""
        holder, memory = self.holder, self.memory
        return NamedSession(
            self.name, "" if holder is None else holder.channel.peer,
            self.lease_s if holder is not None else max(0.0, self.left_at + self.lease_s - now), len(self.values),
            memory.values.held_bytes if memory is not None else 0 if holder is None else holder.service.held_bytes)


class NamedSessions:
    """The named sessions of a worker, all of one tenant.

    Args:
        lease_s: The longest lease; 0 if there are no named sessions.
        limit: How many there may be; 0 for no limit.
        allowances: Count the values of sessions that no client has open, too.
        clock: Returns the time.
        in_others: Returns those in the other workers of the tenant.

    Concurrency:
        Any thread.
    """

    def __init__(self, lease_s: float, limit: int, allowances: Allowances,
                 clock: Callable[[], float] = time.monotonic,
                 in_others: Callable[[], tuple[NamedSession, ...]] = tuple) -> None:
        self._in_others = in_others
        self._lease_s = lease_s
        self._limit = limit
        self._allowances = allowances
        self.clock = clock
        self._lock = threading.Lock()
        self._named: dict[str, _Named] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()

    def listed(self) -> tuple[NamedSession, ...]:
        """List them."""
        now = self.clock()
        with self._lock:
            return tuple(named.listed(now) for named in self._named.values())

    def listed_of_all(self) -> tuple[NamedSession, ...]:
        """List them, and those in the other workers of the tenant."""
        return self.listed() + self._in_others()

    def began(self) -> tuple[tuple[str, int], ...]:
        """List their names, and when each of them began, in seconds since 1970."""
        with self._lock:
            return tuple((named.name, named.began_s) for named in self._named.values())

    def rename(self, name: str, holder: str) -> None:
        """Give a session a name with its time, because another server of the cluster has a later one.

        A client that has it open keeps it open, and finds it by the new name later.
        """
        with self._lock:
            named = self._named.pop(name, None)
            if named is None:
                return
            named.name = f"{name[:MAX_NAME - 21]}~{written(named.began_s)}"
            self._named[named.name] = named
            self._note_ended(name, f"it is {named.name!r} now, because {holder} has a later one")
        _log.warning("the named session %s is now %s: %s has a later one", printable(name), printable(named.name),
                     holder)

    def closed(self) -> list[tuple[str, float, NamedSession, int]]:
        """List those that no client has open: the session that had it, how long ago, and how many tensors it keeps."""
        now = self.clock()
        with self._lock:
            return [(named.session, now - named.left_at, named.listed(now), len(named.handles))
                    for named in self._named.values() if named.holder is None]

    def claim(self, asked: NamedRequest, claimant: SessionNames) -> NamedReply | _Named:
        """Give a session to a client, or say why not."""
        with self._lock:
            gone = self._taken_out(lambda named: named.left_at + named.lease_s <= self.clock(), _LEASE)
            answer = self._claimed(asked, claimant)
            holder = answer.holder if isinstance(answer, _Named) else None
        self._dropped(gone)
        if isinstance(answer, _Named) and holder is not None and holder is not claimant:
            if holder.channel.is_connected:
                return NamedReply(
                    f"The session {asked.name!r} is open in another process, at {holder.channel.peer}.",
                    "End that process, or let it call djinn.shutdown(); or choose another name.", RefusedError.code)
            # Its client has no connection, so it can learn nothing. The batches that it has sent are executed first.
            holder.channel.finish()
            return NamedReply(wait_s=ENDING_S)
        return answer

    def _claimed(self, asked: NamedRequest, claimant: SessionNames) -> NamedReply | _Named:
        """Find or add a session; the caller holds the lock."""
        found = self._named.get(asked.name)
        if not self._lease_s:
            return NamedReply("This server keeps no named sessions.",
                              "Its operator allows them with djinn serve --named-lease-s.", RefusedError.code)
        if found is None and asked.is_known:
            why = self._ended.get(asked.name, "")
            return NamedReply(f"There is no session {asked.name!r}{': ' if why else ''}{why}.",
                              "`djinn sessions --connect URL` lists those that there are.", RefusedError.code)
        use = self._allowances.use
        use.put(Amount.NAMES, len(self._named) + (found is None))
        if found is None and self._limit and len(self._named) + use.others(Amount.NAMES) >= self._limit:
            use.put(Amount.NAMES, len(self._named))
            return NamedReply(f"There are {self._limit} named sessions already, which is the limit.",
                              "Open one of them, and drop its values: djinn.kept.clear().", LimitError.code)
        if found is None:
            found = self._named[asked.name] = _Named(asked.name, 0.0, claimant, claimant.session)
        elif found.holder is None:
            found.holder, found.session = claimant, claimant.session
        if found.holder is claimant:
            found.lease_s = min(asked.lease_s or self._lease_s, self._lease_s)
        return found

    def why_new(self, name: str) -> str:
        """Return how an earlier session of that name ended; empty if none is known."""
        return self._ended.get(name, "")

    def left(self, named: _Named, memory: SessionMemory) -> None:
        """Note that the session that had a named session open has ended; kept values lie in a memory."""
        with self._lock:
            if named.memory is None:
                named.memory = memory
                self._allowances.change_handles(0, len(named.handles), checks=False)
            named.holder, named.left_at = None, self.clock()
            gone = self._taken_out(lambda each: each is named and (named.is_ended or not named.values),
                                   _KICKED if named.is_ended else "")
        self._dropped(gone)

    def arrived(self, named: _Named, count: int) -> None:
        """Note that a session has taken the values over, which have so many handles."""
        with self._lock:
            named.memory = None
            self._allowances.change_handles(count, 0, checks=False)

    def expire(self) -> None:
        """Drop the sessions whose lease is over."""
        now = self.clock()
        with self._lock:
            gone = self._taken_out(lambda named: named.left_at + named.lease_s <= now, _LEASE)
        self._dropped(gone)

    def end(self, session: str) -> None:
        """Drop the named session that a session has open, or had; all if the name is empty.

        One that is open is dropped when the session that has it open ends.
        """
        with self._lock:
            for named in self._named.values():
                named.is_ended |= session in ("", named.session)
            gone = self._taken_out(lambda named: named.is_ended, _KICKED)
        self._dropped(gone)

    def _taken_out(self, is_meant: Callable[[_Named], bool], why: str) -> list[_Named]:
        """Take sessions out that no client has open; the caller holds the lock."""
        gone = [named for named in self._named.values() if named.holder is None and is_meant(named)]
        for named in gone:
            del self._named[named.name]
            self._allowances.use.put(Amount.NAMES, len(self._named))
            self._allowances.change_handles(len(named.handles), 0, checks=False)
            if why:
                after = f", {named.lease_s:g} s after its client had left" if why is _LEASE else ""
                self._note_ended(named.name, why + after)
                _log.info("the named session %s has ended: %s", printable(named.name), why)
        return gone

    def _note_ended(self, name: str, why: str) -> None:
        self._ended[name] = why
        self._ended.move_to_end(name)
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def _dropped(self, gone: Collection[_Named]) -> None:
        for named in gone:
            memory = named.memory
            if memory is not None:
                with memory.lock:
                    memory.values.clear()
                    memory.release()
                memory.close()


class SessionNames:
    """The named sessions, as one session uses them; see `djinn_plugins.common.operators.named_values.NamedValues`.

    Args:
        sessions: All of them.
        session: Name of this session.
        channel: Its connection.
        service: Has its values.
        allowance: Limits them.

    Attributes:
        session, channel, service: As above.
        named: The session that it has open.

    Concurrency:
        The session's thread; other threads read attributes.
    """

    def __init__(self, sessions: NamedSessions, session: str, channel: ResumableChannel, service: SessionService,
                 allowance: SessionAllowance) -> None:
        self.session = session
        self.channel = channel
        self.service = service
        self.named: _Named | None = None
        self._sessions = sessions
        self._allowance = allowance

    @property
    def name(self) -> str:
        """The name that the session has open; empty if it has none."""
        return "" if self.named is None else self.named.name

    def answer(self, request: NamedRequest) -> NamedReply:
        """Open a session, list all, or drop a value."""
        named = self.named
        if request.drops:
            return self._drop(request.drops)
        if not request.name:
            return NamedReply(sessions=self._sessions.listed_of_all())
        if named is None:
            claimed = self._sessions.claim(request, self)
            if isinstance(claimed, NamedReply):
                return claimed
            named = self.named = claimed
        if named.name != request.name:
            return NamedReply(f"This session has the name {named.name!r} already.", "Call djinn.init again.")
        if named.memory is not None:
            # The values come when no program runs.
            return NamedReply(wait_s=ENDING_S / 10)
        return NamedReply(lease_s=named.lease_s, values=self._described(named),
                          note="" if named.values else self._sessions.why_new(named.name))

    def keep(self, name: str, structure: bytes, values: Sequence[torch.Tensor]) -> NamedReply:
        """Keep values, in place of earlier ones of that name."""
        named, table = self.named, self.service.memory.values
        if named is None or named.memory is not None:
            return _NO_NAME
        others = [kept for known, kept in named.values.items() if known != name]
        size_bytes = len(structure) + sum(len(kept.structure) for kept in others)
        if not 0 < len(name) <= MAX_NAME or len(others) >= MAX_VALUES or size_bytes > MAX_STRUCTURE_BYTES:
            return NamedReply(f"A session keeps at most {MAX_VALUES} values, with names of 1 to {MAX_NAME} characters, "
                              f"and {MAX_STRUCTURE_BYTES} bytes about their structure.", code=LimitError.code)
        if any(value.layout is not torch.strided or value.is_conj() or value.is_neg() for value in values):
            return NamedReply("Only dense tensors are kept.", "Convert it with .to_dense(), .resolve_conj() or "
                                                              ".resolve_neg().")
        try:
            self._allowance.admit_values(len(table), len(values))
        except LimitError as error:
            return NamedReply(error.summary, error.hint, error.code)
        handles = tuple(next(_handles) for _ in values)
        for handle, value in zip(handles, values, strict=True):
            table.put(handle, value)
        before, named.values[name] = named.values.get(name), _Kept(structure, handles)
        self._free(before)
        return NamedReply()

    def take(self, name: str, handles: Sequence[int]) -> NamedReply:
        """Give the tensors of a kept value handles of the client."""
        named, table = self.named, self.service.memory.values
        if named is None or named.memory is not None:
            return _NO_NAME
        kept = named.values.get(name)
        if kept is None or kept.problem or len(handles) != len(kept.handles) or any(handle <= 0 for handle in handles):
            return NamedReply(f"The value {name[:MAX_NAME]!r} is not kept in that form.")
        try:
            self._allowance.admit_values(len(table), len(handles))
        except LimitError as error:
            return NamedReply(error.summary, error.hint, error.code)
        for source, handle in zip(kept.handles, handles, strict=True):
            table.put(handle, table[source])
        return NamedReply()

    def settle(self) -> None:
        """Take over what an earlier client has kept. No program runs."""
        named = self.named
        if named is None or named.memory is None:
            return
        handles = named.handles
        lost = moved(handles, named.memory, self.service.memory)
        for kept in named.values.values():
            kept.problem = kept.problem or next((lost[handle] for handle in kept.handles if handle in lost), "")
            if kept.problem:
                self._free(kept)
                kept.handles = ()
        self._sessions.arrived(named, len(handles))

    def kept(self) -> frozenset[int]:
        """Return the handles of the values that stay when the session ends."""
        named = self.named
        return frozenset() if named is None or named.memory is not None or named.is_ended else frozenset(named.handles)

    def left(self) -> None:
        """Note that the session has ended, and that nothing else is in its memory."""
        if self.named is not None:
            self._sessions.left(self.named, self.service.memory)

    def _drop(self, name: str) -> NamedReply:
        if self.named is None or self.named.memory is not None:
            return _NO_NAME
        self._free(self.named.values.pop(name, None))
        return NamedReply()

    def _free(self, kept: _Kept | None) -> None:
        if kept is not None:
            self.service.memory.values.drop(kept.handles)

    def _described(self, named: _Named) -> tuple[KeptValue, ...]:
        table, storages = self.service.memory.values, dict[int, int]()

        def described(handle: int) -> KeptTensor:
            value = table[handle]
            storage = storages.setdefault(value.untyped_storage()._cdata, len(storages))
            return KeptTensor(storage, str(value.dtype).removeprefix("torch."), tuple(value.size()), value.stride(),
                              value.storage_offset())

        return tuple(
            KeptValue(name, kept.structure, tuple(map(described, kept.handles)), kept.problem)
            if all(isinstance(table.get(handle), torch.Tensor) for handle in kept.handles)
            else KeptValue(name, problem=_FAILED)
            for name, kept in named.values.items())


_NO_NAME = NamedReply("This session has no name.", "Give it one: djinn.init(name=...).")


def moved(handles: Sequence[int], source: SessionMemory, target: SessionMemory) -> dict[int, str]:
    """Move values from the memory of a session that has ended to that of another, and close the former.

    Returns:
        Why values are lost.
    """
    lost: dict[int, str] = {}
    together: dict[int, list[int]] = {}
    with target.lock, source.lock:
        for handle in handles:
            value = source.values.get(handle)
            if isinstance(value, torch.Tensor):
                together.setdefault(value.untyped_storage()._cdata, []).append(handle)
            else:
                lost[handle] = _FAILED
        for group in together.values():
            try:
                source.use(group)
            except OutOfMemoryError as error:
                lost.update(dict.fromkeys(group, error.summary))
                continue
            values = [source.values[handle] for handle in group]
            source.values.drop(group)
            for handle, value in zip(group, values, strict=True):
                target.values.put(handle, value)
            source.release()
        source.values.clear()
        source.release()
    source.close()
    return lost

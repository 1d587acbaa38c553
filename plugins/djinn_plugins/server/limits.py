"""A tenant's resource limits on a server."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping

from djinn.errors import LimitError
from djinn.wire.messages import Batch, Define, Forget
from djinn_plugins.server.tenant_limits import Limited, Limits
from djinn_plugins.server.tenant_use import Alone, Amount, OthersUse

__all__ = ("Allowances", "SessionAllowance")

WAIT_S = 30.0
"""How long a session's tensors wait while tensors of the tenant's other sessions are being processed."""
LOOK_S = 0.02
"""How often to look whether other workers have taken their tensors in."""
_ASK = "Ask the server's operator for more."


class Allowances:
    """Tracks what a tenant's sessions use, and enforces the limits.

    Args:
        limits: The initial limits.
        reject: Called with each limit that refuses a request.
        use: What the tenant's other workers use.

    Attributes:
        limits: The current limits; may be replaced while sessions run.
        reject, use: As given.

    Concurrency:
        Any thread.
    """

    def __init__(self, limits: Limits, reject: Callable[[Limited], None] = lambda limited: None,
                 use: OthersUse | None = None) -> None:
        self.limits = limits
        self.reject = reject
        self.use = use or Alone()
        self._changed = threading.Condition()
        self._sessions = 0
        self._handles = 0
        self._inflight_bytes = 0

    def open(self) -> SessionAllowance:
        """Begin a session.

        Raises:
            LimitError: The maximum number of sessions is reached.
        """
        with self._changed:
            limit = self.limits.sessions
            # Written first: of several workers that begin a session at once, each sees the others'.
            self.use.put(Amount.SESSIONS, self._sessions + 1)
            if limit and (present := self._sessions + self.use.others(Amount.SESSIONS)) >= limit:
                self.use.put(Amount.SESSIONS, self._sessions)
                self.reject("sessions")
                raise LimitError(f"There are {present} sessions already; the limit is {limit}.",
                                 hint=f"End one of them with djinn.shutdown(). {_ASK}")
            self._sessions += 1
        return SessionAllowance(self)

    def close_session(self, handles: int, inflight_bytes: int) -> None:
        """Remove a session, and release its values and bytes."""
        with self._changed:
            self._sessions -= 1
            self._handles -= handles
            self._inflight_bytes -= inflight_bytes
            for amount, value in ((Amount.SESSIONS, self._sessions), (Amount.HANDLES, self._handles),
                                  (Amount.INFLIGHT_BYTES, self._inflight_bytes)):
                self.use.put(amount, value)
            self._changed.notify_all()

    def change_handles(self, before: int, now: int, *, checks: bool) -> None:
        """Update a session's number of values.

        Raises:
            LimitError: There would be too many, and ``checks`` is true.
        """
        with self._changed:
            limit, wanted = self.limits.handles, self._handles - before + now
            self.use.put(Amount.HANDLES, wanted)
            if checks and limit and (together := wanted + self.use.others(Amount.HANDLES)) > limit:
                self.use.put(Amount.HANDLES, self._handles)
                self.reject("handles")
                raise LimitError(f"There would be {together} values; the limit for all sessions is {limit}.",
                                 hint=f"Let go of tensors that are not needed any more. {_ASK}")
            self._handles = wanted

    def most_handles(self, held: int) -> int:
        """Return how many values a session that holds some may hold."""
        with self._changed:
            others = self._handles - held + self.use.others(Amount.HANDLES)
            return self.limits.handles - others if self.limits.handles else sys.maxsize

    def hold_bytes(self, length: int) -> None:
        """Reserve in-flight bytes, waiting until they fit.

        Raises:
            LimitError: They exceed the limit, or the wait took too long.
        """
        with self._changed:
            limit = self.limits.inflight_bytes
            if limit and length > limit:
                self.reject("inflight_bytes")
                raise LimitError(f"A message brings {length} bytes; the limit is {limit} at a time.",
                                 hint=f"Move smaller tensors. {_ASK}")
            until = time.monotonic() + WAIT_S
            while (held := self._held_beside(length)) and limit and held + length > limit:
                self.use.put(Amount.INFLIGHT_BYTES, self._inflight_bytes)
                left_s = until - time.monotonic()
                # Nothing tells when bytes of another worker have been taken in.
                self._changed.wait(min(left_s, LOOK_S) if held > self._inflight_bytes else left_s)
                if left_s <= 0:
                    self.reject("inflight_bytes")
                    raise LimitError(
                        f"A message brings {length} bytes, {held} are being taken in for other "
                        f"sessions, and the limit is {limit} at a time.", hint=f"Use fewer sessions at once. {_ASK}")
            self._inflight_bytes += length

    def _held_beside(self, length: int) -> int:
        """Publish the bytes held with these added, and return those held without them."""
        self.use.put(Amount.INFLIGHT_BYTES, self._inflight_bytes + length)
        return self._inflight_bytes + self.use.others(Amount.INFLIGHT_BYTES)

    def release_bytes(self, length: int) -> None:
        """Release in-flight bytes."""
        with self._changed:
            self._inflight_bytes -= length
            self.use.put(Amount.INFLIGHT_BYTES, self._inflight_bytes)
            self._changed.notify_all()


class SessionAllowance:
    """One session's part of a tenant's allowance; see `djinn_plugins.executor.turns.Allowance`.

    Concurrency:
        The session's thread.
    """

    def __init__(self, allowances: Allowances) -> None:
        self._allowances = allowances
        self._handles = 0
        self._inflight_bytes = 0
        self._programs: set[int] = set()

    def admit_programs(self, batch: Batch) -> None:
        """Admit a message, checking the number of programs that the session then has.

        Raises:
            LimitError: There would be too many.
        """
        for command in batch.commands:
            if type(command) is Define:
                self._programs.add(command.program)
            elif type(command) is Forget:
                self._programs.difference_update(command.programs)
        limit = self._allowances.limits.programs
        if limit and len(self._programs) > limit:
            self._allowances.reject("programs")
            raise LimitError(f"The session would have {len(self._programs)} programs; the limit is {limit}.",
                             hint=f"A client has to forget programs that it does not use any more. {_ASK}")

    def steps_beyond(self, steps: int) -> Mapping[int, Exception]:
        """Return which steps of a program are too many; see `djinn_plugins.executor.turns.Allowance.steps_beyond`."""
        limit = self._allowances.limits.nodes
        if not limit or steps <= limit:
            return {}
        self._allowances.reject("nodes")
        return dict.fromkeys(range(limit, steps), LimitError(
            f"The program has {steps} steps; the limit is {limit}.",
            hint=f"Ask for values more often, or set flush_every to less than that. {_ASK}"))

    def most_values(self) -> int:
        """Return how many values the session may hold; see `djinn_plugins.executor.turns.Allowance.most_values`."""
        return self._allowances.most_handles(self._handles)

    def admit_values(self, held: int, more: int) -> None:
        """Admit new values; see `djinn_plugins.executor.turns.Allowance.admit_values`."""
        self._allowances.change_handles(self._handles, held + more, checks=True)
        self._handles = held + more

    def admit_body(self, length: int) -> None:
        """Admit the tensors of a message.

        See `djinn_plugins.common.kinds.transport.SupportsReceiveLimit.admit_body`.
        """
        self._allowances.hold_bytes(length)
        self._inflight_bytes += length

    def settle(self, held: int) -> None:
        """Record that a message was executed, and how many values the session holds now."""
        if held != self._handles:
            self._allowances.change_handles(self._handles, held, checks=False)
            self._handles = held
        if self._inflight_bytes:
            length, self._inflight_bytes = self._inflight_bytes, 0
            self._allowances.release_bytes(length)

    def close(self) -> None:
        """Release everything that the session used."""
        self._allowances.close_session(self._handles, self._inflight_bytes)
        self._handles = self._inflight_bytes = 0

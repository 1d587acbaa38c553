"""What a session reports with its answers: failures, and how long programs ran."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from djinn.wire.messages import Failure, Poisoned
from djinn_plugins.common.failures import name_of, text_of
from djinn_plugins.common.kinds.executor import Executor, SupportsSettling
from djinn_plugins.executor.pauses import worked_ns
from djinn_plugins.executor.timings import Timings

MAX_FAILURES = 1000
"""Most failures remembered between two answers; later ones are merged into the last."""
_T = TypeVar("_T")


class Failures:
    """The failures of one session.

    Args:
        explain: Returns the error to report in place of another one.

    Attributes:
        count: How many failures were recorded so far.

    Concurrency:
        One thread at a time.
    """

    def __init__(self, explain: Callable[[BaseException], BaseException] = lambda error: error) -> None:
        self._explain = explain
        self._pending: list[Failure] = []
        self._known: OrderedDict[int, Failure] = OrderedDict()
        self._adopted: dict[tuple[str, int], int] = {}
        self.count = 0

    def attempt(self, action: Callable[[], Any]) -> Any:
        """Call a function, and return its result, or the poison that stands for its failure."""
        try:
            return action()
        except Exception as error:  # noqa: BLE001  # becomes a failure that the client raises
            # Any exception from an executor must reach the client as a failure; it must not end the whole session.
            return self.add(error)

    def add(self, error: BaseException, *, operator: str = "", run: int = -1, step: int = -1) -> Poisoned:
        """Record a failure, and return the poison that stands for it."""
        error = self._explain(error)
        self.count += 1
        return self._add(Failure(self.count, name_of(error), text_of(error), operator, run, step))

    def adopt(self, failure: Failure) -> Poisoned:
        """Record a failure of another session once, and return the poison that stands for it here."""
        origin = failure.source, failure.source_identity
        known = self._adopted.get(origin)
        if known is not None and known in self._known:
            return Poisoned(known)
        self.count += 1
        made = self._add(msgspec.structs.replace(failure, identity=self.count))
        self._adopted[origin] = made.failure
        return made

    def told_to_others(self, poison: Poisoned, session: str) -> Failure:
        """Return a failure in the form sent to another session.

        Args:
            poison: The poison that stands for it here.
            session: Name of this session.
        """
        known = self._known.get(poison.failure)
        if known is None:
            known = Failure(poison.failure, RuntimeError.__name__, "The value could not be computed; its server no "
                                                                   "longer knows why.")
        return self.of_others(known, session)

    @staticmethod
    def of_others(failure: Failure, session: str) -> Failure:
        """Return a failure with its source; if it has none yet, the source is this session."""
        return failure if failure.source else msgspec.structs.replace(
            failure, source=session, source_identity=failure.identity)

    @property
    def pending(self) -> tuple[Failure, ...]:
        """Failures not yet reported to the client."""
        return tuple(self._pending)

    def take(self) -> tuple[Failure, ...]:
        """Return the failures since the last call."""
        taken, self._pending = self._pending, []
        return tuple(taken)

    def _add(self, failure: Failure) -> Poisoned:
        if len(self._pending) < MAX_FAILURES:
            self._pending.append(failure)
            self._known[failure.identity] = failure
            while len(self._known) > MAX_FAILURES:
                _, gone = self._known.popitem(last=False)
                self._adopted.pop((gone.source, gone.source_identity), None)
        return Poisoned(self._pending[-1].identity)


class RunTime:
    """Measures how long programs run, if the client requests it.

    An asynchronous device may also be working between two programs. For such a device, the measurement spans the time
    from the start of the first program until the device has finished.

    Args:
        executor: Runs them.
        attempt: Calls a function and records its failure for the client.

    Attributes:
        is_wanted: Whether the client has requested it.
        timings: When each program ran, if the client has requested that.

    Concurrency:
        One thread at a time.
    """

    def __init__(self, executor: Executor, attempt: Callable[[Callable[[], None]], Any]) -> None:
        self._settle = executor.settle if isinstance(executor, SupportsSettling) else None
        self._attempt = attempt
        self.is_wanted = False
        self.timings: Timings | None = None
        self._first_ns = 0
        self._ns = 0

    def of(self, run: Callable[[], _T]) -> _T:
        """Run a program."""
        begin_ns = worked_ns()
        self._first_ns = self._first_ns or begin_ns
        try:
            return run() if self.timings is None else self.timings.of(run)
        finally:
            self._ns += worked_ns() - begin_ns

    def settle(self) -> None:
        """Wait until an asynchronous device has finished."""
        if self._settle is not None:
            self._attempt(self._settle)

    def take(self) -> int:
        """Return the nanoseconds since the last call; 0 if the client has not requested them."""
        taken, since_ns, self._ns, self._first_ns = self._ns, self._first_ns, 0, 0
        if not self.is_wanted:
            return 0
        if self._settle is None or not since_ns:
            return taken
        self._attempt(self._settle)
        return worked_ns() - since_ns

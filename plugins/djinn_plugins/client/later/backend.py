"""A backend whose messages also ask for the values of `djinn.later`, and bring them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import torch

from djinn.errors import SessionClosedError, TransportError
from djinn.ir.tape import Tape
from djinn.ir.value import Slot
from djinn.kinds import Backend, Connection, OpenBackend
from djinn.kinds.backend_wrapper import BackendWrapper, unwrapped
from djinn.kinds.connection_wrapper import ConnectionWrapper
from djinn.session.single_backend import SingleBackend
from djinn.wire.messages import Batch, Poisoned, Result, TensorHeader
from djinn_plugins.client.later.outstanding import OutstandingValue, OutstandingValues
from djinn_plugins.client.later.waiting import fetch_outstanding
from djinn_plugins.common.kinds.transport import SupportsLaterValues

__all__ = ("LaterBackend", "LaterConnection", "open_later", "wrap_connection")

_log = logging.getLogger("djinn.later")
_T = TypeVar("_T")


class LaterConnection(ConnectionWrapper):
    """Adds requests for outstanding values to batches, and takes the values when they have arrived.

    Args:
        plain: The wrapped connection.
        outstanding: The values.
    """

    def __init__(self, plain: Connection, outstanding: OutstandingValues) -> None:
        super().__init__(plain)
        self._outstanding = outstanding
        self._is_waiting = False

    def submit(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> None:
        """Send a batch that wants no answer."""
        self._sent(lambda: self.plain.submit(self._asking(batch), tensors))

    def request(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> tuple[Result, list[torch.Tensor]]:
        """Send a batch and wait for its answer."""
        return self._sent(lambda: self.plain.request(self._asking(batch), tensors))

    def ask(self) -> None:
        """Ask for the wanted values; everything recorded has been sent."""
        batch = self._asking(Batch())
        if batch.later:
            self._sent(lambda: self.plain.submit(batch, ()))

    def take_arrived(self) -> None:
        """Take the values that have arrived."""
        self._sent(lambda: None)

    def _asking(self, batch: Batch) -> Batch:
        outstanding = self._outstanding
        chosen = outstanding.choose() if outstanding.wanted and outstanding.is_asking else ()
        if not chosen:
            return batch
        self._is_waiting = True
        return msgspec.structs.replace(batch, later=tuple([value.slot.number for value in chosen]))

    def _sent(self, send: Callable[[], _T]) -> _T:
        try:
            sent = send()
            if self._is_waiting:
                self._take()
            return sent
        except BaseException:
            self._outstanding.ask_again()
            raise

    def _take(self) -> None:
        assert isinstance(self.plain, SupportsLaterValues)
        for handles, result, tensors in self.plain.later_values() or ():
            data = iter(tensors)
            for handle, item in zip(handles, [None] * len(handles) if result is None else result.items, strict=True):
                tensor = next(data) if isinstance(item, TensorHeader) else None
                value = self._outstanding.take(handle)
                if value is None:
                    continue
                if item is None:
                    self._outstanding.wanted.append(value)
                elif isinstance(item, Poisoned):
                    self._outstanding.refuse(value)
                else:
                    self._arrived(value, tensor)
        self._is_waiting = self._outstanding.has_asked

    def _arrived(self, value: OutstandingValue, tensor: torch.Tensor | None) -> None:
        if tensor is None or tensor.dtype != value.spec.dtype or tensor.shape != value.spec.size:
            raise TransportError(f"{self.address} sent something else than the tensor that was expected.")
        self._outstanding.fetched += 1
        value.arrived(tensor)


class LaterBackend(BackendWrapper):
    """Fetches the outstanding values when the session ends, and raises failures that only a log has heard of.

    Args:
        plain: The backend that does the work.
        outstanding: The session's values.

    Concurrency:
        The caller holds the session's lock.

    Laws:
        session.later_exact
    """

    def __init__(self, plain: Backend, outstanding: OutstandingValues) -> None:
        super().__init__(plain)
        self._outstanding = outstanding

    def fetch(self, slots: Sequence[Slot], *, whole: bool) -> list[Any]:
        """Fetch values."""
        self._raise_unheard()
        return self.plain.fetch(slots, whole=whole)

    def describe(self, slots: Sequence[Slot]) -> list[Any]:
        """Send everything pending and fetch the metadata of values."""
        self._raise_unheard()
        return self.plain.describe(slots)

    def synchronize(self) -> None:
        """Send everything pending and wait until it has run."""
        self._raise_unheard()
        self.plain.synchronize()

    def stats(self) -> Mapping[str, int]:
        """Return the counters, and the number of values that came without a wait."""
        return {**self.plain.stats(), "fetched_later": self._outstanding.fetched}

    def close(self) -> None:
        """Fetch the outstanding values, and close the connections."""
        try:
            self._fetch_all()
        finally:
            ended = SessionClosedError("The session has ended before the value arrived.")
            for value in tuple(self._outstanding):
                self._outstanding.drop(value)
                value.failed(ended)
            self.plain.close()

    def _raise_unheard(self) -> None:
        if self._outstanding.unheard is not None:
            failure, self._outstanding.unheard = self._outstanding.unheard, None
            raise failure

    def _fetch_all(self) -> None:
        fetch_outstanding(self.plain, self._outstanding, tuple(self._outstanding), whole=True)
        if self._outstanding.unheard is not None:
            _log.warning("an operation failed, and the session ends before anybody could hear of it: %s",
                         self._outstanding.unheard)


def wrap_connection(outstanding: OutstandingValues, plain: Connection) -> Connection:
    """Wrap a connection that can bring values while the client continues."""
    if not isinstance(plain, SupportsLaterValues) or plain.later_values() is None:
        return plain
    outstanding.carrier = LaterConnection(plain, outstanding)
    return outstanding.carrier


def open_later(opens: OpenBackend, outstanding: OutstandingValues, connections: Sequence[Connection], tape: Tape,
               released: deque[int]) -> Backend:
    """Open a backend, and wrap it."""
    outstanding.has_layer, outstanding.tape = True, tape
    plain = opens(connections, tape, released)
    # Recovery numbers values anew, and needs to see all requests.
    outstanding.is_asking = outstanding.carrier is not None and isinstance(unwrapped(plain), SingleBackend)
    return LaterBackend(plain, outstanding)

"""`djinn.later`: a tensor's value that comes when it comes."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import torch

from djinn.errors import ConfigurationError
from djinn.ir.spec import TensorSpec
from djinn.ir.value import Slot
from djinn.record.tensor import LazyTensor
from djinn.session import runtime
from djinn_plugins.client.later.outstanding import OutstandingValues, outstanding_of
from djinn_plugins.client.later.waiting import fetch_outstanding

if TYPE_CHECKING:
    from djinn.session.session import Session

__all__ = ("LaterValue", "later")

LOOK_S = 0.001
LONGEST_LOOK_S = 0.02
"""How often `LaterValue.result` looks, at first and at last, whether a value has arrived in time."""


class LaterValue:
    """A tensor's value, as it was when `later` was called.

    It arrives while the program continues. Using it as a number, or formatting it, waits for it if it is not here yet:
    ``f"{value:.4f}"``, ``float(value)``, ``value < 1``.

    Attributes:
        slot: Its name in its session; only of a tensor that is elsewhere.
        spec: Its metadata; likewise.

    Concurrency:
        Any thread.
    """

    __slots__ = ("__weakref__", "_error", "_outstanding", "_session", "_tensor", "slot", "spec")

    def __init__(self, tensor: torch.Tensor, session: Session | None = None,
                 outstanding: OutstandingValues | None = None) -> None:
        if isinstance(tensor, LazyTensor):
            self.slot: Slot = tensor._value.slot
            self.spec: TensorSpec = tensor._value.spec
        self._tensor = tensor
        self._session = session
        """The session that computes the value; ``None`` once the value is here."""
        self._outstanding = outstanding
        self._error: BaseException | None = None

    @property
    def is_settled(self) -> bool:
        """Whether the value is known to be here, or never to come; does not look."""
        return self._session is None

    @property
    def session(self) -> Session | None:
        """The session that computes the value; ``None`` once it is settled."""
        return self._session

    @property
    def error(self) -> BaseException | None:
        """Why there is no value, if that is known."""
        return self._error

    def ready(self) -> bool:
        """Whether the value is here, or will never be. Never waits."""
        if self._session is not None:
            look(self._session, flushes=True)
        return self._session is None

    def result(self, timeout_s: float | None = None) -> torch.Tensor:
        """Wait for the value.

        Args:
            timeout_s: How long to wait; ``None`` for as long as it takes.

        Returns:
            A CPU tensor; the same one each time.

        Raises:
            TimeoutError: The value has not arrived in time.
            TransportError: The connection is lost.
            SessionClosedError: The session ended before the value arrived.
            Exception: The exception of the operation that should have computed the value.
        """
        if timeout_s is not None and not self._arrives_within(timeout_s):
            raise TimeoutError(f"The value has not arrived within {timeout_s:g} s.")
        session, outstanding = self._session, self._outstanding
        if session is not None and outstanding is not None:
            [tensor] = session.materialize([self._tensor])
            with session.lock:
                if self._session is not None:
                    outstanding.drop(self)
                    self.arrived(tensor)
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._tensor

    def arrived(self, tensor: torch.Tensor) -> None:
        """Take the value; called by what fetches it."""
        self._tensor, self._session, self._outstanding = tensor, None, None

    def failed(self, error: BaseException) -> None:
        """Take the reason why there is no value; called by what fetches it."""
        self._error, self._tensor = error, torch.empty(0)
        self._session = self._outstanding = None

    def _arrives_within(self, timeout_s: float) -> bool:
        until, pause_s = monotonic() + timeout_s, LOOK_S
        while not self.ready():
            outstanding = self._outstanding
            if outstanding is None or any(value is self for value in outstanding.refused):
                # It cannot come without a wait.
                return True
            left_s = until - monotonic()
            if left_s <= 0:
                return False
            sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, LONGEST_LOOK_S)
        return True

    def _number(self) -> Any:
        return self.result().item()

    def __format__(self, spec: str) -> str:
        return format(self.result(), spec)

    def __str__(self) -> str:
        tensor = self.result()
        return str(tensor.item() if tensor.dim() == 0 else tensor)

    def __repr__(self) -> str:
        if self._session is not None:
            return "<LaterValue: not here yet>"
        return f"<LaterValue: {self._error!r}>" if self._error is not None else f"<LaterValue: {self}>"

    def __float__(self) -> float:
        return float(self.result())

    def __int__(self) -> int:
        return int(self.result())

    def __bool__(self) -> bool:
        return bool(self.result())

    def __round__(self, digits: int | None = None) -> Any:
        return round(self._number(), digits) if digits is not None else round(self._number())

    __hash__ = None  # type: ignore[assignment]  # values compare by what they will be

    def __eq__(self, other: object) -> Any:
        return self._number() == _number_of(other)

    def __lt__(self, other: Any) -> bool:
        return bool(self._number() < _number_of(other))

    def __le__(self, other: Any) -> bool:
        return bool(self._number() <= _number_of(other))

    def __gt__(self, other: Any) -> bool:
        return bool(self._number() > _number_of(other))

    def __ge__(self, other: Any) -> bool:
        return bool(self._number() >= _number_of(other))


def later(tensor: torch.Tensor) -> LaterValue:
    """Fetch a tensor's value without waiting for it.

    The value is that of the moment of the call: later writes into the tensor do not show.

    Args:
        tensor: A tensor on any device.

    Returns:
        The value, which arrives while the program continues.

    Raises:
        ConfigurationError: The plugin ``djinn-later`` is switched off.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"djinn.later takes a tensor, not {type(tensor).__name__}.")
    with torch.no_grad():
        if not isinstance(tensor, LazyTensor):
            return LaterValue(tensor.detach().to("cpu", copy=True))
        session = runtime.current()
        session.check_owner(tensor)
        outstanding = outstanding_of(session)
        if outstanding is None:
            raise ConfigurationError("The plugin djinn-later is switched off.",
                                     hint="Switch it on, or read values with .item().")
        copy = tensor.detach()
        value = LaterValue((copy.resolve_conj() if copy.is_complex() else copy).clone(), session, outstanding)
        outstanding.wanted.append(value)
    return value


def look(session: Session, *, flushes: bool) -> None:
    """Take the values that have arrived in a session; does nothing while another thread uses it.

    Args:
        session: The session.
        flushes: Whether to send everything pending, so that all values will arrive.
    """
    outstanding = outstanding_of(session)
    if outstanding is None or session.closed or getattr(session.lock, "is_elsewhere", False):
        return
    with session.lock:
        if session.closed:
            return
        if flushes and outstanding.wanted:
            session.backend.flush()
            outstanding.ask()
        outstanding.take_arrived()


def wait_for(session: Session, values: Sequence[LaterValue]) -> None:
    """Send everything pending, and block until values arrive; keep failures for the program's next wait."""
    outstanding = outstanding_of(session)
    if outstanding is not None:
        with session.lock:
            left = [value for value in values if value.session is session]
            fetch_outstanding(session.backend, outstanding, left, whole=True)


def fail(session: Session, values: Sequence[LaterValue], error: Exception) -> None:
    """Let values of a session fail that cannot be fetched."""
    outstanding = outstanding_of(session)
    if outstanding is not None:
        with session.lock:
            for value in values:
                if value.session is session:
                    outstanding.drop(value)
                    value.failed(error.with_traceback(None))


def wait_for_refused(session: Session, *, whole: bool) -> None:
    """Wait for the values of a session that cannot arrive while the program continues; not while it uses the session.

    Args:
        session: The session.
        whole: Whether to send everything pending; without that, only values that have been computed are waited for.
    """
    outstanding = outstanding_of(session)
    if outstanding is None or not outstanding.refused or getattr(session.lock, "is_elsewhere", False):
        return
    with session.lock:
        if session.closed:
            return
        pending = set() if whole else {slot.number for node in tuple(session.tape.nodes) for slot in node.outputs}
        values = [value for value in outstanding.refused if value.slot.number not in pending]
        fetch_outstanding(session.backend, outstanding, values, whole=whole)


def _number_of(other: object) -> Any:
    return other._number() if isinstance(other, LaterValue) else other

"""What a directory asks of the servers that it lists: to drain, and to rename sessions."""

from __future__ import annotations

import anyio
import attrs
from anyio.abc import ByteSendStream

from djinn.errors import ConfigurationError, TransportError
from djinn_plugins.cluster.messages import DirectoryProblem, Draining, DrainOrder, RenameOrder, encoded

__all__ = ("ServerOrders",)

TIMEOUT_S = 5.0
"""How long a server may take to answer."""


@attrs.define(eq=False)
class _Order:
    answered: anyio.Event = attrs.field(factory=anyio.Event)
    answer: Draining | DirectoryProblem | None = None
    """``None`` if the server has left."""


class ServerOrders:
    """Asks one server over the connection by which it reports its load.

    Args:
        address: The server's address.
        stream: The connection, to which only this object writes.

    Concurrency:
        Tasks of one event loop.
    """

    def __init__(self, address: str, stream: ByteSendStream) -> None:
        self._address = address
        self._stream = stream
        self._sending = anyio.Lock()
        self._draining = anyio.Lock()
        self._order: _Order | None = None

    async def send(self, order: DrainOrder | RenameOrder) -> None:
        """Send an order; a server answers only to one that asks it to drain.

        Raises:
            OSError, BrokenResourceError, ClosedResourceError: It has left.
        """
        async with self._sending:
            with anyio.fail_after(TIMEOUT_S):
                await self._stream.send(encoded(order))

    async def drain(self) -> str:
        """Ask the server to drain, and return the outcome.

        Raises:
            ConfigurationError: The server cannot do that.
            TransportError: It does not answer.
        """
        async with self._draining:
            self._order = order = _Order()
            try:
                with anyio.fail_after(TIMEOUT_S):
                    await self.send(DrainOrder())
                    await order.answered.wait()
            except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
                raise TransportError(f"{self._address} has not answered within {TIMEOUT_S:g} s.",
                                     hint="Drain it at its own page, or with SIGTERM.") from None
            finally:
                self._order = None
        if isinstance(order.answer, DirectoryProblem):
            raise ConfigurationError(f"{self._address} does not drain: {order.answer.summary}", hint=order.answer.hint)
        what = "has left" if order.answer is None else "takes no new sessions, and ends after the last one"
        return f"{self._address} {what}."

    def answered(self, answer: Draining | DirectoryProblem | None) -> None:
        """Take in the server's answer; ``None`` when it has left."""
        if self._order is not None:
            self._order.answer = answer
            self._order.answered.set()

"""The desk: where workers request turns on a device. It adds a clock and connections to the arbiter.

It uses threads. On busy processors, turns that pass through the gateway's event loop take up to 1.4 times as long.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence

import attrs

from djinn_plugins.server.control import Ask, GiveBack, Grant, RevokeDevice, TurnRequest
from djinn_plugins.server.control_channel import TURN_REQUESTS, Control
from djinn_plugins.server.kinds.admission import TurnOrder
from djinn_plugins.server.turn_queue import GrantedTurn, TurnQueue, TurnSettings

__all__ = ("LeaseClient", "LeaseManager")

LOOK_S = 0.02
"""How often to check whether a worker that does not give its turn back is stopped."""
SEND_TIMEOUT_S = 0.001
"""How long sending may wait. It waits only if a worker has left hundreds of messages unread, while all others wait."""
_log = logging.getLogger("djinn.server")


class LeaseClient:
    """A worker that takes turns.

    Args:
        key: Its name among the workers.
        tenant: Its tenant, which may have several workers.
        device: Position of the device that it uses.
        sock: The channel for its turns; owned by this object.
        is_stopped: Whether its process is stopped.
    """

    def __init__(self, key: str, tenant: str, device: int, sock: socket.socket, is_stopped: Callable[[], bool]) -> None:
        self.key = key
        self.tenant = tenant
        self.device = device
        self._control = Control(sock, send_timeout_s=SEND_TIMEOUT_S, messages=TURN_REQUESTS)
        self.is_stopped = is_stopped

    def tell(self, message: Grant | RevokeDevice) -> None:
        """Send it a message. Never raises; a worker that does not read its messages gets no more turns."""
        try:
            self._control.send(message)
        except OSError as error:
            _log.info("%s: the worker takes no turns any more: %s", self.tenant, error)
            self.close()

    def receive(self) -> TurnRequest | None:
        """Wait for a message; ``None`` when there are no more."""
        received = self._control.receive()
        return received[0] if received is not None and isinstance(received[0], (Ask, GiveBack)) else None

    def close(self) -> None:
        """Take no more turns. Never raises."""
        self._control.close()


@attrs.define(eq=False)
class _Counter:
    """One device."""

    arbiter: TurnQueue
    customers: dict[str, LeaseClient] = attrs.field(factory=dict)


class LeaseManager:
    """Gives workers turns on devices.

    Args:
        devices: Settings and order of the turns on each device.

    Concurrency:
        Any thread.
    """

    def __init__(self, devices: Sequence[tuple[TurnSettings, TurnOrder]]) -> None:
        self._counters = [_Counter(TurnQueue(settings, order)) for settings, order in devices]
        self._changed = threading.Condition(threading.Lock())
        self._planned_s = float("inf")
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def join(self, customer: LeaseClient, weight: float) -> None:
        """Add a worker."""
        with self._changed:
            counter = self._counters[customer.device]
            counter.customers[customer.key] = customer
            counter.arbiter.join(customer.key, weight, customer.tenant)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="djinn-turns", daemon=True)
                self._thread.start()
        threading.Thread(target=self._attend, args=(customer,), name="djinn-turn", daemon=True).start()

    def leave(self, customer: LeaseClient) -> None:
        """Remove a worker that is dead or ending, and end its turn."""
        with self._changed:
            counter = self._counters[customer.device]
            if counter.customers.get(customer.key) is customer:
                del counter.customers[customer.key]
                counter.arbiter.leave(customer.key, time.monotonic())
                self._carry_out(counter)
        customer.close()

    def reweigh(self, customer: LeaseClient, weight: float) -> None:
        """Change the weight of a worker's tenant."""
        with self._changed:
            self._counters[customer.device].arbiter.reweigh(customer.key, weight, time.monotonic())

    def ask(self, customer: LeaseClient) -> None:
        """Request a turn for a worker."""
        with self._changed:
            counter = self._counters[customer.device]
            if counter.customers.get(customer.key) is customer:
                counter.arbiter.ask(customer.key, time.monotonic())
                self._carry_out(counter)

    def give_back(self, customer: LeaseClient, turn: int, *, wants_more: bool) -> None:
        """Give a worker's turn back."""
        with self._changed:
            counter = self._counters[customer.device]
            if counter.customers.get(customer.key) is customer:
                counter.arbiter.give_back(customer.key, turn, time.monotonic(), wants_more=wants_more)
                self._carry_out(counter)

    def waiting(self) -> int:
        """Return the number of workers that wait for turns."""
        with self._changed:
            return sum(len(counter.arbiter.waiting()) for counter in self._counters)

    def close(self) -> None:
        """Stop. Current turns are not recalled."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _attend(self, customer: LeaseClient) -> None:
        """Handle a worker's messages until it leaves."""
        while (message := customer.receive()) is not None:
            if isinstance(message, Ask):
                self.ask(customer)
            else:
                self.give_back(customer, message.turn, wants_more=message.wants_more)
        self.leave(customer)

    def _carry_out(self, counter: _Counter) -> None:
        # Under the lock, because a worker must receive its orders in the right sequence.
        for order in counter.arbiter.take():
            customer = counter.customers.get(order.key)
            if customer is not None:
                customer.tell(Grant(order.turn) if isinstance(order, GrantedTurn)
                              else RevokeDevice(order.turn, order.left_s))
        if counter.arbiter.next_tick_s() < self._planned_s:
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while not self._is_closed:
                now = time.monotonic()
                self._planned_s = min(map(self._look, self._counters, [now] * len(self._counters)))
                self._changed.wait(None if self._planned_s == float("inf") else max(0.0, self._planned_s - now))

    def _look(self, counter: _Counter, now: float) -> float:
        """Carry out the actions that are due on one device; return the time of the next check."""
        arbiter = counter.arbiter
        if arbiter.next_tick_s() <= now:
            arbiter.tick(now)
        late = arbiter.late(now)
        for key in late:
            customer = counter.customers.get(key)
            if customer is not None and customer.is_stopped():
                _log.warning("%s: the worker stands still and loses its turn", customer.tenant)
                arbiter.give_away(key, now)
        self._carry_out(counter)
        return min(arbiter.next_tick_s(), now + LOOK_S) if late else arbiter.next_tick_s()

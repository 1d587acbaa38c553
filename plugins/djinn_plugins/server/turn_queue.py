"""Turns on a device: grants and recalls them. This module uses no clock and no sockets.

Workers take turns. An order, which an admission policy provides, says which of the waiting tenants is next, however
many workers a tenant has; among the workers of one tenant, the one that has used the device least is next. No step is
interrupted, so a turn that others wait for is *recalled*, and charged until it is given back. A turn that no other
worker waits for continues. A slot may be reserved for a moment for a tenant that has just left it and would be next
(Iyer and Druschel, "Anticipatory Scheduling", SOSP 2001).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from typing import TypeAlias

import attrs

from djinn_plugins.server.kinds.admission import TurnOrder

__all__ = ("GrantedTurn", "RecalledTurn", "TurnNotice", "TurnQueue", "TurnSettings")


@attrs.frozen
class TurnSettings:
    """Settings of the turns on a device.

    Attributes:
        places: Maximum number of concurrent turns.
        quantum_s: How long a turn may last while others wait; it is not recalled earlier.
        patience_s: How long after that others wait for a turn that is not given back. Then its place is given away, so
            that an operation that never ends does not block the device for all.
        linger_s: How long a place is reserved for a tenant that would be next if it wanted more; never longer than its
            last turn.
    """

    places: int = 1
    quantum_s: float = 0.005
    patience_s: float = 0.5
    linger_s: float = 0.0005


@attrs.frozen
class GrantedTurn:
    """A worker may use the device until this turn is recalled."""

    key: str
    turn: int


@attrs.frozen
class RecalledTurn:
    """Others are waiting: the turn must be given back when there is nothing to run, or after the given time."""

    key: str
    turn: int
    left_s: float


TurnNotice: TypeAlias = GrantedTurn | RecalledTurn


class _State(enum.Enum):
    IDLE = enum.auto()
    WAITING = enum.auto()
    HOLDING = enum.auto()
    LINGERING = enum.auto()


_ACTIVE = (_State.HOLDING, _State.LINGERING)


@attrs.define(eq=False)
class _Flow:
    """The state of one worker."""

    key: str
    tenant: str
    state: _State = _State.IDLE
    arrival: int = 0
    """Order of arrival in the queue; breaks ties between equal ranks."""
    turn: int = 0
    granted_s: float = 0.0
    until_s: float = math.inf
    """When a recalled turn has to be over, or when the reservation of the place ends."""
    is_hurried: bool = False
    """Whether it was notified that the time is over."""
    is_overdue: bool = False
    """Whether its place was given away."""
    used_s: float = 0.0
    """Virtual time among the workers of its tenant: how long it had the device while others waited."""


class TurnQueue:
    """Gives turns on one device.

    The caller passes on the workers' requests, calls `tick` at `next_tick_s`, and carries out the orders that `take`
    returns.

    Args:
        settings: Settings of the turns.
        order: Says which tenant is next.

    Attributes:
        settings: As given.

    Concurrency:
        One thread at a time. Times are of any one clock that does not go back.
    """

    def __init__(self, settings: TurnSettings, order: TurnOrder) -> None:
        self.settings = settings
        self._order = order
        self._flows: dict[str, _Flow] = {}
        self._virtual_s: dict[str, float] = {}
        """For each tenant: virtual time of its worker that had a turn last, which the others do not lag behind."""
        self._is_wanted = False
        """Whether any worker is waiting."""
        self._since_s = 0.0
        """The time up to which the running turns have been charged."""
        self._count = 0
        self._orders: list[TurnNotice] = []

    def join(self, key: str, weight: float, tenant: str | None = None) -> None:
        """Add a worker of a tenant; by default, the tenant has this one only, and the same key."""
        tenant = key if tenant is None else tenant
        is_first = all(flow.tenant != tenant for flow in self._flows.values())
        self._flows[key] = _Flow(key, tenant)
        if is_first:
            self._order.join(tenant, weight)

    def leave(self, key: str, now: float) -> None:
        """Remove a worker that died or is ending, and end its turn."""
        flow = self._flows.get(key)
        if flow is not None:
            self._catch_up(now)
            self._end(flow)
            del self._flows[key]
            if all(other.tenant != flow.tenant for other in self._flows.values()):
                self._virtual_s.pop(flow.tenant, None)
                self._order.leave(flow.tenant)
            self._go_on(now)

    def reweigh(self, key: str, weight: float, now: float) -> None:
        """Change the weight of a worker's tenant."""
        flow = self._flows.get(key)
        if flow is not None:
            self._catch_up(now)
            self._order.reweigh(flow.tenant, weight)

    def ask(self, key: str, now: float) -> None:
        """Request a turn for a worker. Ignored if it already has one or waits for one."""
        flow = self._flows.get(key)
        if flow is None or flow.state not in (_State.IDLE, _State.LINGERING):
            return
        self._catch_up(now)
        self._end(flow)
        self._queue(flow)
        self._go_on(now, newcomer=flow)

    def give_back(self, key: str, turn: int, now: float, *, wants_more: bool) -> None:
        """End a worker's turn. Ignored if the turn was already given back or never granted."""
        flow = self._flows.get(key)
        if flow is None or flow.state is not _State.HOLDING or flow.turn != turn:
            return
        self._catch_up(now)
        lasted_s, was_overdue = now - flow.granted_s, flow.is_overdue
        self._end(flow)
        if wants_more:
            self._queue(flow)
        else:
            first = self._first()
            linger_s = min(self.settings.linger_s, lasted_s)
            if (first is not None and linger_s > 0 and not was_overdue
                    and self._order.rank(flow.tenant) < self._order.rank(first.tenant)):
                flow.state, flow.until_s = _State.LINGERING, now + linger_s
        self._go_on(now)

    def give_away(self, key: str, now: float) -> None:
        """Give away the place of a worker that is stopped. Its tenant is still charged."""
        flow = self._flows.get(key)
        if flow is not None and flow.state is _State.HOLDING:
            self._catch_up(now)
            flow.is_overdue = True
            self._go_on(now)

    def tick(self, now: float) -> None:
        """Carry out the actions that are due."""
        self._catch_up(now)
        for flow in self._flows.values():
            if flow.until_s > now:
                continue
            if flow.state is _State.LINGERING:
                self._end(flow)
            elif flow.state is _State.HOLDING and not flow.is_hurried:
                flow.is_hurried = True
                self._orders.append(RecalledTurn(flow.key, flow.turn, 0.0))
            if flow.state is _State.HOLDING and flow.until_s + self.settings.patience_s <= now:
                flow.is_overdue = True
        self._go_on(now)

    def next_tick_s(self) -> float:
        """Return when `tick` is due; infinite if nothing is scheduled."""
        return min((flow.until_s + (self.settings.patience_s if flow.is_hurried else 0.0)
                    for flow in self._flows.values() if not flow.is_overdue), default=math.inf)

    def take(self) -> list[TurnNotice]:
        """Return the new orders to workers, in sequence. Each is returned once."""
        orders, self._orders = self._orders, []
        return orders

    def late(self, now: float) -> list[str]:
        """List the workers whose turns are overdue and whose places have not been given away."""
        return [flow.key for flow in self._with(_State.HOLDING) if flow.until_s <= now and not flow.is_overdue]

    def holders(self) -> list[str]:
        """List the workers that have turns."""
        return [flow.key for flow in self._with(_State.HOLDING)]

    def waiting(self) -> list[str]:
        """List the waiting workers, the next one first."""
        return [flow.key for flow in self._in_order()]

    def _with(self, state: _State) -> Iterator[_Flow]:
        return (flow for flow in self._flows.values() if flow.state is state)

    def _first(self) -> _Flow | None:
        return next(iter(self._in_order()), None)

    def _in_order(self) -> list[_Flow]:
        """Return the waiting workers: by tenant, and within a tenant by the time that they have used."""
        waiting = sorted(self._with(_State.WAITING), key=lambda flow: flow.arrival)
        first = {flow.tenant: flow.arrival for flow in reversed(waiting)}
        return sorted(waiting, key=lambda flow: (self._order.rank(flow.tenant), first[flow.tenant], flow.used_s))

    def _queue(self, flow: _Flow) -> None:
        self._count += 1
        # While a worker of the tenant waits or runs, the tenant keeps its place in the order.
        if all(other.tenant != flow.tenant or other.state is _State.IDLE for other in self._flows.values()):
            self._order.request(flow.tenant)
        flow.state, flow.arrival = _State.WAITING, self._count
        flow.used_s = max(flow.used_s, self._virtual_s.get(flow.tenant, 0.0))

    def _catch_up(self, now: float) -> None:
        """Charge the running turns."""
        active = [flow for flow in self._flows.values() if flow.state in _ACTIVE]
        passed_s = max(0.0, now - self._since_s)
        if self._is_wanted:
            for flow in active:
                flow.used_s += passed_s
        if active:
            self._order.charge([flow.tenant for flow in active], passed_s, contended=self._is_wanted)
        self._since_s = max(now, self._since_s)

    def _end(self, flow: _Flow) -> None:
        """End a worker's turn, or the reservation of its place."""
        if flow.state in _ACTIVE:
            self._order.finish(flow.tenant)
        flow.state, flow.until_s, flow.is_hurried, flow.is_overdue = _State.IDLE, math.inf, False, False

    def _grant(self, flow: _Flow, now: float) -> None:
        self._count += 1
        self._order.grant(flow.tenant)
        self._virtual_s[flow.tenant] = max(self._virtual_s.get(flow.tenant, 0.0), flow.used_s)
        flow.state, flow.turn = _State.HOLDING, self._count
        flow.granted_s = now
        self._orders.append(GrantedTurn(flow.key, flow.turn))

    def _go_on(self, now: float, newcomer: _Flow | None = None) -> None:
        """Fill free places, and recall as many turns as there are workers still waiting."""
        taken = [flow for flow in self._flows.values() if flow.state in _ACTIVE and not flow.is_overdue]
        while len(taken) < self.settings.places and (first := self._first()) is not None:
            self._grant(first, now)
            taken.append(first)
        wanting = sum(1 for _ in self._with(_State.WAITING))
        self._is_wanted = wanting > 0
        if all(flow.state is _State.IDLE for flow in self._flows.values()):
            self._order.idle()
        for flow in taken if not wanting else ():
            if flow.state is _State.HOLDING and not flow.is_hurried:
                flow.until_s = math.inf
        # Start with those whose turns matter least.
        for flow in sorted(taken, key=lambda flow: -self._order.rank(flow.tenant))[:wanting]:
            if flow.state is _State.HOLDING:
                is_behind = newcomer is not None and newcomer.state is _State.WAITING and (
                    newcomer.used_s < flow.used_s if newcomer.tenant == flow.tenant
                    else self._order.rank(newcomer.tenant) < self._order.rank(flow.tenant))
                self._recall(flow, now, now if is_behind else max(now, flow.granted_s + self.settings.quantum_s))

    def _recall(self, flow: _Flow, now: float, until_s: float) -> None:
        if until_s < flow.until_s and not flow.is_hurried:
            flow.until_s, flow.is_hurried = until_s, until_s <= now
            self._orders.append(RecalledTurn(flow.key, flow.turn, until_s - now))

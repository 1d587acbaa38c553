"""Laws of admission policies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
from hypothesis import given
from hypothesis import strategies as st

from djinn.errors import LimitError
from djinn_conformance.assertions import expect, expect_equal
from djinn_conformance.laws import law
from djinn_conformance.subjects import Subject
from djinn_plugins.server.kinds.admission import AdmissionFactory, ServerLoad, TurnOrder
from djinn_plugins.server.options import ServeOptions
from djinn_plugins.server.tenants import Tenant
from djinn_plugins.server.turn_queue import GrantedTurn, TurnNotice, TurnQueue, TurnSettings

_TENANTS = ("ann", "bob", "cid")
_SETTINGS = TurnSettings(places=1, quantum_s=0.005, patience_s=0.5, linger_s=0.0005)
_ACTIONS = ("ask", "ask", "ask", "give back", "want more", "reweigh", "join", "leave", "give away", "tick")


@attrs.frozen
class Event:
    """Something that happens to a device.

    Attributes:
        after_s: The time since the event before.
        action: What happens, one of `_ACTIONS`.
        tenant: To whom.
        weight: The tenant's weight.
    """

    after_s: float
    action: str
    tenant: str
    weight: float


_EVENTS = st.lists(st.builds(
    Event, st.sampled_from([0.0, 0.0001, 0.002, 0.01, 1.0]), st.sampled_from(_ACTIONS), st.sampled_from(_TENANTS),
    st.sampled_from([0.5, 1.0, 3.0])), max_size=40)


class Device:
    """A device whose tenants do what events say, and nothing that a server would not let them do."""

    def __init__(self, order: TurnOrder) -> None:
        self.order = order
        self._queue = TurnQueue(_SETTINGS, order)
        self._turns: dict[str, int] = {}
        self._now = 0.0
        self._present = set(_TENANTS)
        for tenant in _TENANTS:
            self._queue.join(tenant, 1.0)

    def happens(self, event: Event) -> list[TurnNotice]:
        """Let something happen, and return what the queue decides."""
        self._now += event.after_s
        queue, tenant, now = self._queue, event.tenant, self._now
        if event.action == "join" and tenant not in self._present:
            self._present.add(tenant)
            queue.join(tenant, event.weight)
        elif event.action == "leave":
            self._present.discard(tenant)
            queue.leave(tenant, now)
        elif event.action == "reweigh":
            queue.reweigh(tenant, event.weight, now)
        elif event.action == "ask":
            queue.ask(tenant, now)
        elif event.action in ("give back", "want more"):
            queue.give_back(tenant, self._turns.get(tenant, -1), now, wants_more=event.action == "want more")
        elif event.action == "give away":
            queue.give_away(tenant, now)
        else:
            queue.tick(now)
        notices = queue.take()
        self._turns.update({notice.key: notice.turn for notice in notices if isinstance(notice, GrantedTurn)})
        return notices

    def decisions(self) -> tuple[list[str], list[str], list[float]]:
        """Return who has turns, who waits, the next one first, and all ranks."""
        return self._queue.holders(), self._queue.waiting(), [self.order.rank(tenant) for tenant in _TENANTS]


def _order(plugin: AdmissionFactory, device: str = "cpu") -> TurnOrder:
    return plugin.open(ServeOptions()).order_of(device)


def _followed(device: Device, events: Sequence[Event]) -> Iterator[Any]:
    for event in events:
        yield device.happens(event), device.decisions()


@law("admission.ranks_are_numbers")
@given(events=_EVENTS)
def test_ranks_are_numbers(subject: Subject, plugin: AdmissionFactory, events: list[Event]) -> None:
    """Let tenants join, wait, run and leave."""
    device = Device(_order(plugin))
    for event in events:
        try:
            device.happens(event)
            ranks = [device.order.rank(tenant) for tenant in _TENANTS]
        except Exception as error:
            raise AssertionError(f"{event}: got {type(error).__name__}: {error}, should be no exception "
                                 f"[{subject}]") from error
        expect(all(map(math.isfinite, ranks)), "ranks", got=ranks,
               wanted="finite numbers", where=f"{subject}: {event}")


@law("admission.rank_changes_nothing")
@given(events=_EVENTS, asked=st.lists(st.sampled_from(_TENANTS), min_size=1, max_size=4))
def test_rank_changes_nothing(subject: Subject, plugin: AdmissionFactory, events: list[Event], asked: list[str]
                              ) -> None:
    """Ask one of two devices for ranks after each event."""
    plain, examined = Device(_order(plugin)), Device(_order(plugin))
    for event in events:
        for tenant in asked:
            examined.order.rank(tenant)
        expect_equal(examined.happens(event), plain.happens(event), "what is decided", f"{subject}: {event}")
        expect_equal([examined.order.rank(tenant) for tenant in _TENANTS],
                     [plain.order.rank(tenant) for tenant in _TENANTS], "ranks", f"{subject}: {event}")


@law("admission.same_history_same_order")
@given(events=_EVENTS)
def test_same_history_same_order(subject: Subject, plugin: AdmissionFactory, events: list[Event]) -> None:
    """Let the same happen to two devices, one after the other."""
    first = list(_followed(Device(_order(plugin)), events))
    expect_equal(list(_followed(Device(_order(plugin)), events)), first, "what is decided", str(subject))


@law("admission.devices_are_independent")
@given(events=_EVENTS, elsewhere=_EVENTS)
def test_devices_are_independent(subject: Subject, plugin: AdmissionFactory, events: list[Event],
                                 elsewhere: list[Event]) -> None:
    """Let something else happen on another device of the same server, between any two events."""
    alone = list(_followed(Device(_order(plugin, "cuda:0")), events))
    policy = plugin.open(ServeOptions())
    device, other = Device(policy.order_of("cuda:0")), Device(policy.order_of("cuda:1"))
    together = []
    for index, event in enumerate(events):
        if index < len(elsewhere):
            other.happens(elsewhere[index])
        together.append((device.happens(event), device.decisions()))
    expect_equal(together, alone, "what is decided", str(subject))


@law("admission.answers_or_refuses")
@given(name=st.sampled_from(["", *_TENANTS]), counts=st.tuples(*[st.integers(0, 10_000)] * 4))
def test_answers_or_refuses(subject: Subject, plugin: AdmissionFactory, name: str, counts: tuple[int, ...]) -> None:
    """Ask for sessions on servers with little and much to do."""
    policy: Any = plugin.open(ServeOptions())
    load = ServerLoad(min(counts[0], counts[1]), counts[1], counts[2], min(counts[2], counts[3]))
    try:
        answer = policy.admit(Tenant(name), load)
    except LimitError as error:
        expect(error.retry_after_s > 0, "retry_after_s", got=error.retry_after_s,
               wanted="a time above 0", where=str(subject))
    except Exception as error:
        raise AssertionError(f"admit: got {type(error).__name__}: {error}, should be LimitError [{subject}: "
                             f"{load}]") from error
    else:
        expect(answer is None, "the answer", got=answer, wanted="None", where=str(subject))
    expect(policy.admit(Tenant(name), ServerLoad()) is None, "the answer of an idle server", got="something",
           wanted="None", where=str(subject))

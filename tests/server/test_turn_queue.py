"""The arbiter of turns: shares, bounds and liveness under whatever tenants do, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from djinn_plugins.server.fair_admission.fair_queue import StartTimeFairOrder
from djinn_plugins.server.turn_queue import GrantedTurn, RecalledTurn, TurnQueue, TurnSettings

MS = 1e-3
ONE = TurnSettings(places=1, quantum_s=5 * MS, patience_s=0.5, linger_s=0.5 * MS)


def granted(arbiter: TurnQueue) -> list[tuple[str, int]]:
    return [(order.key, order.turn) for order in arbiter.take() if isinstance(order, GrantedTurn)]


def saturate(weights: dict[str, float], lengths: dict[str, float], turns: int, places: int = 1,
             tenants: dict[str, str] | None = None) -> dict[str, float]:
    """Let workers want the device all the time, and return what each has had; by default, one of each tenant."""
    arbiter, now, ends = TurnQueue(TurnSettings(places), StartTimeFairOrder()), 0.0, dict[str, tuple[float, int]]()
    used = dict.fromkeys(weights, 0.0)
    for key, weight in weights.items():
        arbiter.join(key, weight, tenants and tenants[key])
        arbiter.ask(key, now)
    for _ in range(turns):
        for key, turn in granted(arbiter):
            ends[key] = now + lengths[key], turn
        key, (end, turn) = min(ends.items(), key=lambda item: item[1])
        del ends[key]
        now = end
        used[key] += lengths[key]
        arbiter.give_back(key, turn, now, wants_more=True)
    return used


@pytest.mark.parametrize("lengths", [(5, 5, 5), (1, 5, 20), (20, 5, 1)])
def test_device_time_goes_by_weight_however_long_turns_are(lengths: tuple[int, ...]) -> None:
    weights = {"a": 1.0, "b": 2.0, "c": 4.0}
    used = saturate(weights, {key: length * MS for key, length in zip(weights, lengths, strict=True)}, 4000)
    total = sum(used.values())
    for key, weight in weights.items():
        assert used[key] / total == pytest.approx(weight / 7, rel=0.02)


def test_two_places_are_both_used() -> None:
    used = saturate({"a": 1.0, "b": 1.0, "c": 1.0}, dict.fromkeys("abc", 5 * MS), 3000, places=2)
    for share in used.values():
        assert share == pytest.approx(5.0, rel=0.02)


@pytest.mark.parametrize("places", [1, 2])
def test_a_tenant_with_many_workers_gets_no_more_and_its_workers_share_that(places: int) -> None:
    tenants = {"a": "a", "b1": "b", "b2": "b", "b3": "b", "c": "c"}
    used = saturate(dict.fromkeys(tenants, 1.0), dict(zip(tenants, (5 * MS, MS, 5 * MS, 20 * MS, 5 * MS), strict=True)),
                    4000, places, tenants)
    total = sum(used.values())
    for key, share in {"a": 1 / 3, "b1": 1 / 9, "b2": 1 / 9, "b3": 1 / 9, "c": 1 / 3}.items():
        assert used[key] / total == pytest.approx(share, rel=0.03), key


def test_workers_of_a_tenant_that_relieve_each_other_get_no_more() -> None:
    arbiter, now, order = TurnQueue(ONE, StartTimeFairOrder()), 0.0, list[str]()
    for key, tenant in (("a1", "a"), ("a2", "a"), ("b", "b")):
        arbiter.join(key, 1.0, tenant)
    arbiter.ask("a1", now)
    arbiter.ask("b", now)
    for _ in range(8):
        (key,) = arbiter.holders()
        order.append(key[0])
        now += 0.25
        if key != "b":
            arbiter.ask("a2" if key == "a1" else "a1", now)
        arbiter.give_back(key, arbiter._flows[key].turn, now, wants_more=key == "b")
    assert order == ["a", "b"] * 4


def test_a_worker_that_joins_its_tenant_has_no_credit_and_the_tenant_keeps_its_position() -> None:
    arbiter = TurnQueue(ONE, StartTimeFairOrder())
    for key, tenant in (("a1", "a"), ("b", "b")):
        arbiter.join(key, 1.0, tenant)
        arbiter.ask(key, 0.0)
    ((_, turn),) = granted(arbiter)
    arbiter.give_back("a1", turn, 1.0, wants_more=True)
    arbiter.join("a2", 1.0, "a")
    arbiter.ask("a2", 1.0)
    now, order = 1.0, list[str]()
    while len(order) < 16:
        now += 0.25
        (key,) = arbiter.holders()
        order.append(key)
        arbiter.give_back(key, arbiter._flows[key].turn, now, wants_more=True)
    # The second that a1 has had is its tenant's, and b has as much first. Within the tenant, a2 has as much before a1.
    assert order == ["b"] * 4 + ["a2", "b"] * 4 + ["a1", "b", "a2", "b"], order


def test_who_is_alone_keeps_the_turn_and_whoever_comes_has_it_at_once() -> None:
    arbiter = TurnQueue(ONE, StartTimeFairOrder())
    for key in ("a", "b"):
        arbiter.join(key, 1.0)
    arbiter.ask("a", 0.0)
    ((_, turn),) = granted(arbiter)
    arbiter.tick(100.0)
    assert arbiter.take() == []
    assert arbiter.next_tick_s() == float("inf")
    arbiter.ask("b", 100.0)
    assert arbiter.take() == [RecalledTurn("a", turn, 0.0)]
    arbiter.give_back("a", turn, 100.002, wants_more=True)
    assert [key for key, _ in granted(arbiter)] == ["b"]
    # A hundred seconds that nobody else wanted are no debt: they take turns from here on.
    now, order = 100.002, []
    for _ in range(6):
        now += 5 * MS
        (key,) = arbiter.holders()
        arbiter.give_back(key, arbiter._flows[key].turn, now, wants_more=True)
        order += [key for key, _ in granted(arbiter)]
    assert order == ["a", "b"] * 3


def test_a_turn_lasts_a_quantum_and_ends_early_for_who_has_had_less() -> None:
    arbiter = TurnQueue(ONE, StartTimeFairOrder())
    for key in ("a", "b", "c"):
        arbiter.join(key, 1.0)
    arbiter.ask("a", 0.0)
    arbiter.ask("b", 0.0)
    ((_, first), ) = [(order.key, order.turn) for order in arbiter.take() if isinstance(order, GrantedTurn)]
    arbiter.give_back("a", first, 5 * MS, wants_more=True)
    orders = arbiter.take()
    assert orders == [GrantedTurn("b", orders[0].turn), RecalledTurn("b", orders[0].turn, 5 * MS)]
    arbiter.ask("c", 7 * MS)
    assert arbiter.take() == [RecalledTurn("b", orders[0].turn, 0.0)], "c begins where b began, and b is ahead of that"


def test_a_turn_that_is_not_given_back_is_charged_and_does_not_keep_others_waiting_for_ever() -> None:
    arbiter = TurnQueue(ONE, StartTimeFairOrder())
    for key in ("a", "b"):
        arbiter.join(key, 1.0)
    arbiter.ask("a", 0.0)
    arbiter.ask("b", 0.0)
    orders = arbiter.take()
    assert arbiter.next_tick_s() == pytest.approx(5 * MS)
    arbiter.tick(5 * MS)
    assert arbiter.take() == [RecalledTurn("a", orders[0].turn, 0.0)]
    assert arbiter.late(5 * MS) == ["a"]
    arbiter.tick(5 * MS + 0.5)
    assert [key for key, _ in granted(arbiter)] == ["b"]
    arbiter.ask("a", 0.6)
    assert arbiter.take() == [], "it has a turn"
    arbiter.give_back("a", orders[0].turn, 2.0, wants_more=True)
    assert [order for order in arbiter.take() if isinstance(order, GrantedTurn)] == []
    # It has had two seconds less what nobody wanted; b has that ahead of it.
    now = 2.0
    while arbiter.holders() == ["b"]:
        now += 5 * MS
        arbiter.give_back("b", arbiter._flows["b"].turn, now, wants_more=True)
        arbiter.take()
    assert now - 2.0 == pytest.approx(0.505, abs=0.02)


def test_a_worker_that_dies_loses_its_turn_at_once_and_its_tenant_keeps_its_debt() -> None:
    arbiter = TurnQueue(ONE, StartTimeFairOrder())
    for key in ("a", "b"):
        arbiter.join(key, 1.0)
    arbiter.ask("a", 0.0)
    arbiter.ask("b", 0.0)
    arbiter.take()
    arbiter.leave("a", 0.3)
    assert [key for key, _ in granted(arbiter)] == ["b"]
    arbiter.join("a", 1.0)
    arbiter.ask("a", 0.3)
    arbiter.take()
    arbiter.give_back("b", arbiter._flows["b"].turn, 0.31, wants_more=True)
    assert [key for key, _ in granted(arbiter)] == ["b"], "a has had 0.3 s"


def test_a_place_is_kept_for_a_moment_for_who_would_be_next() -> None:
    """So that whoever waits for each answer before it asks again has as much as its weight says."""
    arbiter, now = TurnQueue(ONE, StartTimeFairOrder()), 0.0
    used = dict.fromkeys("ab", 0.0)
    for key, weight in (("a", 1.0), ("b", 4.0)):
        arbiter.join(key, weight)
        arbiter.ask(key, now)
    back: dict[str, float] = {}
    turns = dict(granted(arbiter))
    for _ in range(4000):
        while not turns:
            key, now = min(back.items(), key=lambda item: item[1])
            del back[key]
            arbiter.ask(key, now)
            turns |= dict(granted(arbiter))
        (key,) = turns
        end = now + 10 * MS
        for other in [other for other, at in back.items() if at < end]:
            arbiter.ask(other, back.pop(other))
        now = end
        used[key] += 10 * MS
        arbiter.give_back(key, turns.pop(key), now, wants_more=False)
        back[key] = now + 0.3 * MS
        turns |= dict(granted(arbiter))
    assert used["b"] / used["a"] == pytest.approx(4, rel=0.1)
    # Who does not come back in that moment does not keep the device from others.
    arbiter = TurnQueue(ONE, StartTimeFairOrder())
    for key, weight in (("a", 1.0), ("b", 4.0)):
        arbiter.join(key, weight)
    arbiter.ask("b", 0.0)
    arbiter.ask("a", 0.0)
    ((_, turn),) = granted(arbiter)
    arbiter.give_back("b", turn, 5 * MS, wants_more=False)
    ((key, turn),) = granted(arbiter)
    assert key == "a"
    arbiter.ask("b", 6 * MS)
    arbiter.give_back("a", turn, 10 * MS, wants_more=True)
    ((key, turn),) = granted(arbiter)
    arbiter.give_back("b", turn, 15 * MS, wants_more=False)
    assert granted(arbiter) == []
    assert arbiter.next_tick_s() == pytest.approx(15.5 * MS)
    arbiter.tick(15.5 * MS)
    assert [key for key, _ in granted(arbiter)] == ["a"]


names = st.sampled_from("abcd")
weights = st.sampled_from((0.5, 1.0, 2.0, 4.0))


class Tenants(RuleBasedStateMachine):
    """Four tenants that ask, work, give back or do not, die, come again and change their weights.

    What each has had while others waited is measured here, apart from the arbiter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.turns: dict[str, tuple[int, float]] = {}
        """Turns by tenant, and what the tenant had had when they began."""
        self.waiting: set[str] = set()
        self.recalled: dict[str, float] = {}
        self.pairs: dict[tuple[str, str], tuple[float, float, float]] = {}
        """Who want the device without a break, since when, and what they had had by then."""
        self.used = dict.fromkeys("abcd", 0.0)
        self.lengths: dict[str, list[tuple[float, float]]] = {key: [] for key in "abcd"}
        """When turns ended, and what they took."""

    @initialize(places=st.integers(1, 3), weights=st.tuples(weights, weights, weights, weights), asking=st.booleans())
    def begin(self, places: int, weights: tuple[float, ...], asking: bool) -> None:
        self.settings = TurnSettings(places, 5 * MS, 50 * MS, 0.5 * MS)
        self.arbiter = TurnQueue(self.settings, StartTimeFairOrder())
        self.weights = dict(zip("abcd", weights, strict=True))
        for key, weight in self.weights.items():
            self.arbiter.join(key, weight)
            if asking:
                self.ask(key)

    @rule(key=names)
    def ask(self, key: str) -> None:
        if key not in self.turns and key not in self.waiting:
            self.waiting.add(key)
            self.pair(key)
            self.arbiter.ask(key, self.now)
            self.heed()

    @rule(key=names, more=st.booleans())
    def give_back(self, key: str, more: bool) -> None:
        if key in self.turns:
            turn, before = self.turns.pop(key)
            self.recalled.pop(key, None)
            self.lengths[key].append((self.now, self.used[key] - before))
            if more:
                self.waiting.add(key)
            else:
                self.unpair(key)
            self.arbiter.give_back(key, turn, self.now, wants_more=more)
            self.heed()

    @rule(key=names)
    def die(self, key: str) -> None:
        self.waiting.discard(key)
        if key in self.turns:
            # Dying pays no debts.
            self.lengths[key].append((self.now, self.used[key] - self.turns[key][1]))
        for held in (self.turns, self.recalled):
            held.pop(key, None)
        self.unpair(key)
        self.arbiter.leave(key, self.now)
        self.heed()
        self.nobody_waits_while_there_is_a_place()
        self.arbiter.join(key, self.weights[key])

    @rule(key=names, weight=weights)
    def reweigh(self, key: str, weight: float) -> None:
        self.unpair(key)
        self.arbiter.reweigh(key, weight, self.now)
        self.weights[key] = weight
        if key in self.turns:
            self.turns[key] = self.turns[key][0], self.used[key]
        if key in self.turns or key in self.waiting:
            self.pair(key)

    @rule(step_ms=st.sampled_from((0.1, 1.0, 4.0, 20.0, 100.0)))
    def work(self, step_ms: float) -> None:
        """Let time pass, with ticks when they are due; nobody gives anything back."""
        until = self.now + step_ms * MS
        while (due := self.arbiter.next_tick_s()) <= until:
            self.pass_time(max(due, self.now))
            self.arbiter.tick(self.now)
            self.heed()
            assert self.arbiter.next_tick_s() > self.now, "what was due is done"
        self.pass_time(until)

    @rule(overrun_ms=st.tuples(*[st.sampled_from((0.0, 0.3, 2.0, 7.0))] * 4), who=st.sets(names, min_size=2),
          more=st.booleans())
    def saturate(self, overrun_ms: tuple[float, ...], who: set[str], more: bool) -> None:
        """Several want the device for a while, and give turns back when asked to, some of them late.

        They want more at once, or a moment later, until they want nothing.
        """
        late = dict(zip("abcd", overrun_ms, strict=True))
        for key in set("abcd") - who:
            self.give_back(key, more=False)
        for _ in range(30):
            for key in sorted(who):
                self.ask(key)
            ends = {key: self.recalled[key] + late[key] * MS for key in self.turns if key in self.recalled}
            self.work(max(0.05, (min(ends.values(), default=self.now) - self.now) / MS))
            for key, end in ends.items():
                if end <= self.now and key in self.turns:
                    self.give_back(key, more=more)
                    self.shares_are_within_the_bound()

    @precondition(lambda self: self.waiting)
    @rule()
    def nobody_waits_for_ever(self) -> None:
        """Even if nobody gives anything back, places are given away after a while, to the ones who are next."""
        before = set(self.waiting)
        self.work(1000.0)
        assert not before & self.waiting

    def pass_time(self, now: float) -> None:
        if self.waiting:
            for key in self.turns:
                self.used[key] += now - self.now
        self.now = now

    def heed(self) -> None:
        for order in self.arbiter.take():
            if isinstance(order, GrantedTurn):
                assert order.key in self.waiting, "turns are given to who has asked"
                self.waiting.remove(order.key)
                self.turns[order.key] = order.turn, self.used[order.key]
            else:
                assert self.turns[order.key][0] == order.turn
                assert self.waiting, "nobody else wants it"
                self.recalled[order.key] = min(self.recalled.get(order.key, 1e9), self.now + order.left_s)

    def pair(self, key: str) -> None:
        """From here on two tenants want the device without a break."""
        for other in {*self.turns, *self.waiting} - {key}:
            one, two = sorted((key, other))
            self.pairs[one, two] = self.now, self.used[one], self.used[two]

    def unpair(self, key: str) -> None:
        for pair in [pair for pair in self.pairs if key in pair]:
            del self.pairs[pair]

    def longest(self, key: str, since: float) -> float:
        """The longest turn of a tenant that ended since then, the one before, which it still owes, or what goes on."""
        before = [length for ended, length in self.lengths[key] if ended < since][-1:]
        going_on = self.used[key] - self.turns[key][1] if key in self.turns else 0.0
        return max((*before, going_on, *(length for ended, length in self.lengths[key] if ended >= since)))

    def going_on(self, key: str) -> float:
        return (self.used[key] - self.turns[key][1]) / self.weights[key] if key in self.turns else 0.0

    @invariant()
    def shares_are_within_the_bound(self) -> None:
        """By what SFQ promises for one place: the longest turns of both. Of several places a tenant has at most one,
        however much it weighs.
        """
        if self.settings.places > 1:
            return
        for (one, two), (since, before, before_two) in self.pairs.items():
            had = (self.used[one] - before) / self.weights[one]
            had_two = (self.used[two] - before_two) / self.weights[two]
            bound = self.longest(one, since) / self.weights[one] + self.longest(two, since) / self.weights[two]
            bound += self.going_on(one) + self.going_on(two) + 1e-9
            assert abs(had - had_two) <= bound, (one, two, had, had_two, bound)

    @invariant()
    def there_are_as_many_turns_as_there_may_be(self) -> None:
        late = {key for key, until in self.recalled.items() if self.now >= until + self.settings.patience_s}
        assert len(set(self.turns) - late) <= self.settings.places

    @invariant()
    def nobody_waits_while_there_is_a_place(self) -> None:
        """But for the moment that one is kept. Those who have what others wait for were told."""
        if self.waiting and len(self.turns) < self.settings.places:
            assert self.arbiter.next_tick_s() <= self.now + self.settings.linger_s + 1e-9
        elif self.waiting:
            assert self.recalled


TestTenants: Any = Tenants.TestCase
TestTenants.settings = hypothesis_settings(max_examples=30, stateful_step_count=12, deadline=None)

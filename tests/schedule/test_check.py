"""The rules of schedules: each is broken on purpose and named; what follows them reads what program order reads."""

from __future__ import annotations

import random

import attrs
import pytest
from support.planning import graphs as made

from djinn.errors import ScheduleError
from djinn_plugins.graph.graph import RecordedGraph
from djinn_plugins.schedule.check import RULES, check_schedule
from djinn_plugins.schedule.completion import complete
from djinn_plugins.schedule.latency.scheduler import LatencyScheduler
from djinn_plugins.schedule.problem import Problem
from djinn_plugins.schedule.schedule import DeviceInfo, ExecutionSchedule, Transfer
from djinn_plugins.schedule.throughput.scheduler import ThroughputScheduler

DEVICES = (DeviceInfo("a", holds=frozenset({"x"})), DeviceInfo("b"), DeviceInfo("c"))
CHAIN = RecordedGraph((
    made.node("make", ["x"], ["v"]), made.node("view", ["v"], ["w"]), made.node("read", ["w"], ["r"]),
    made.node("write", ["v", "r"], [], writes=("v",)), made.node("late", ["w"], ["l"])), {"w": "v"})
GOOD = ExecutionSchedule(
    ("make", "view", "read", "write", "late"),
    {"make": "a", "view": "a", "read": "b", "write": "a", "late": "b"},
    (Transfer("v", "a", "b", "make"), Transfer("r", "b", "a", "read"), Transfer("w", "a", "b", "write")),
    "test", replicas={"view": ("b",)}, budgets={"a": 100})


def rule_broken(schedule: ExecutionSchedule, graph: RecordedGraph = CHAIN, devices=DEVICES) -> str:
    with pytest.raises(ScheduleError) as caught:
        check_schedule(schedule, graph, devices)
    return caught.value.summary.split("rule '")[1].split("'")[0]


def test_a_good_schedule_is_accepted() -> None:
    check_schedule(GOOD, CHAIN, DEVICES)


def without(name: str) -> tuple[Transfer, ...]:
    return tuple(transfer for transfer in GOOD.transfers if transfer.value != name)


@pytest.mark.parametrize(("rule", "change"), [
    ("complete", {"order": GOOD.order[:-1]}),
    ("complete", {"order": (*GOOD.order[:-1], "make")}),
    ("complete", {"replicas": {"view": ("b",), "dream": ("b",)}}),
    ("devices", {"devices": {**GOOD.devices, "read": "z"}}),
    ("devices", {"transfers": (*GOOD.transfers, Transfer("x", "a", "a"))}),
    ("devices", {"transfers": (*GOOD.transfers, Transfer("x", "a", "z"))}),
    ("devices", {"placements": {"y": "z"}}),
    ("devices", {"replicas": {"view": ("a",)}}),
    ("order", {"order": ("view", "make", "read", "write", "late")}),
    ("order", {"order": ("make", "view", "read", "late", "write")}),
    ("placements", {"placements": {"x": "a"}}),
    ("placements", {"placements": {"v": "a"}}),
    ("replicas", {"replicas": {"view": ("b",), "write": ("b",)}}),
    ("replicas", {"replicas": {"view": ("b",), "late": ("a",)}}),
    ("home", {"devices": {**GOOD.devices, "view": "b"}, "replicas": {}}),
    ("home", {"devices": {**GOOD.devices, "write": "b"}, "transfers": GOOD.transfers[::2]}),
    ("transfers", {"transfers": without("v")}),
    ("transfers", {"transfers": without("r")}),
    ("transfers", {"transfers": without("w")}),
    ("needless", {"transfers": (*GOOD.transfers, GOOD.transfers[0])}),
    ("needless", {"transfers": (*GOOD.transfers, Transfer("x", "a", "c"))}),
    ("transfers", {"transfers": (*GOOD.transfers, Transfer("x", "b", "c"))}),
    ("transfers", {"transfers": (*GOOD.transfers, Transfer("v", "a", "c"))}),
    ("transfers", {"transfers": (*GOOD.transfers, Transfer("v", "a", "c", "view"))}),
    ("needless", {"transfers": (*without("w"), Transfer("w", "a", "b", "view"))}),
    ("transfers", {"transfers": (*GOOD.transfers, Transfer("r", "b", "c", "nobody"))}),
    ("transfers", {"devices": {**GOOD.devices, "late": "c"}}),
    ("budgets", {"budgets": {"a": 101}}),
])
def test_broken_rules_are_named(rule: str, change: dict) -> None:
    devices = (attrs.evolve(DEVICES[0], memory_bytes=100), *DEVICES[1:])
    check_schedule(GOOD, CHAIN, devices)
    assert rule_broken(attrs.evolve(GOOD, **change), devices=devices) == rule
    assert rule in RULES


def test_all_rules_are_tested() -> None:
    assert {entry[0] for entry in test_broken_rules_are_named.pytestmark[0].args[1]} == set(RULES)


def test_what_is_written_elsewhere_is_written_back() -> None:
    graph = RecordedGraph((made.node("w", ["x", "y"], [], writes=("x", "y")), made.node("r", ["y"], ["v"])))
    devices = (DeviceInfo("a", holds=frozenset({"x"})), DeviceInfo("b", holds=frozenset({"y"})))
    good = ExecutionSchedule(("w", "r"), {"w": "a", "r": "b"}, (Transfer("y", "b", "a"), Transfer("y", "a", "b", "w")))
    check_schedule(good, graph, devices)
    assert rule_broken(attrs.evolve(good, transfers=good.transfers[:1]), graph, devices) == "home"
    assert rule_broken(attrs.evolve(good, transfers=good.transfers[1:]), graph, devices) == "transfers"


def test_chains_and_copies_count() -> None:
    graph = RecordedGraph((made.node("r", ["x", "y"], ["v"]), made.node("s", ["x"], ["u"])))
    devices = (DeviceInfo("a", holds=frozenset({"x", "y"})), DeviceInfo("b", copies=frozenset({"y"})), DeviceInfo("c"))
    chain = (Transfer("x", "b", "c"), Transfer("x", "a", "b"))
    check_schedule(ExecutionSchedule(("r", "s"), {"r": "b", "s": "c"}, chain), graph, devices)
    assert rule_broken(ExecutionSchedule(("r", "s"), {"r": "b", "s": "c"}, chain[:1]), graph, devices) == "transfers"
    useless = (*chain, Transfer("y", "a", "b"))
    assert rule_broken(ExecutionSchedule(("r", "s"), {"r": "b", "s": "c"}, useless), graph, devices) == "needless"


def test_copies_are_no_good_once_the_storage_is_written() -> None:
    graph = RecordedGraph((made.node("w", ["x"], [], writes=("x",)), made.node("r", ["x"], ["v"])))
    devices = (DeviceInfo("a", holds=frozenset({"x"})), DeviceInfo("b", copies=frozenset({"x"})))
    assert rule_broken(ExecutionSchedule(("w", "r"), {"w": "a", "r": "b"}), graph, devices) == "transfers"
    check_schedule(ExecutionSchedule(("w", "r"), {"w": "a", "r": "b"}, (Transfer("x", "a", "b", "w"),)), graph, devices)


@pytest.mark.parametrize("seed", range(60))
def test_what_passes_reads_what_program_order_reads(seed: int) -> None:
    rng = random.Random(seed)
    graph, outside = made.tangled(rng, rng.randint(1, 40))
    devices = made.scattered(rng, outside, rng.randint(1, 4))
    wanted = made.contents_read(graph, devices, None)
    problem = Problem(graph, devices)
    placement = [rng.randrange(len(devices)) for _ in problem.nodes]
    for schedule in (complete(problem, placement, scheduler="random"), LatencyScheduler().schedule(graph, devices),
                     ThroughputScheduler().schedule(graph, devices)):
        check_schedule(schedule, graph, devices)
        read = made.contents_read(graph, devices, schedule)
        for name in schedule.order:
            for place in (schedule.devices[name], *schedule.replicas.get(name, ())):
                assert read[name, place] == wanted[name, ""], (schedule.scheduler, name, place)


@pytest.mark.parametrize("seed", range(40))
def test_no_transfer_can_be_left_out_and_none_added(seed: int) -> None:
    rng = random.Random(seed)
    graph, outside = made.tangled(rng, rng.randint(5, 30))
    devices = made.scattered(rng, outside, 3)
    problem = Problem(graph, devices)
    schedule = complete(problem, [rng.randrange(3) for _ in problem.nodes])
    for transfer in schedule.transfers:
        left = tuple(other for other in schedule.transfers if other is not transfer)
        assert rule_broken(attrs.evolve(schedule, transfers=left), graph, devices) in {"transfers", "home"}
    for value in outside:
        for device in devices:
            extra = Transfer(value, "d0" if device.id != "d0" else "d1", device.id)
            if extra not in schedule.transfers:
                added = attrs.evolve(schedule, transfers=(*schedule.transfers, extra))
                assert rule_broken(added, graph, devices) in {"transfers", "needless"}
    for name, places in schedule.replicas.items():
        left = {other: at for other, at in schedule.replicas.items() if other != name}
        assert places
        assert rule_broken(attrs.evolve(schedule, replicas=left), graph, devices) in {"transfers", "replicas"}

"""Laws of schedulers."""

from __future__ import annotations

import time

from hypothesis import example, given
from hypothesis import strategies as st

from djinn.errors import ScheduleError
from djinn_conformance.assertions import expect, expect_equal, violated
from djinn_conformance.graphs import EMPTY, chain, deep_graph, expect_unchanged, graphs, show, snapshot
from djinn_conformance.laws import law
from djinn_conformance.subjects import Subject
from djinn_plugins.graph.graph import RecordedGraph
from djinn_plugins.schedule.check import check_schedule
from djinn_plugins.schedule.kinds import GraphScheduler
from djinn_plugins.schedule.memory import peak_bytes
from djinn_plugins.schedule.problem import Problem
from djinn_plugins.schedule.schedule import DeviceInfo, DeviceProfile, ExecutionSchedule, LinkProfile, Rate

_MEMORY = st.one_of(st.none(), st.integers(1, 2**40))
_NAMES = st.lists(st.sampled_from(["cpu", "cuda:0", "cuda:1", "worker-3"]), min_size=1, max_size=4, unique=True)
_DEVICES = _NAMES.flatmap(lambda names: st.tuples(*(st.builds(DeviceInfo, st.just(name), _MEMORY) for name in names)))
_LIMIT_S = 10.0
_CHAIN = chain(6)
"""Cannot be spread over devices without transfers; few draws are graphs of that kind on several devices."""


@st.composite
def _fleets(draw: st.DrawFn) -> tuple[RecordedGraph, tuple[DeviceInfo, ...]]:
    """Draw a graph, and different devices that hold some of the values that it needs, and copies of some."""
    graph, names = draw(graphs()), draw(_NAMES)
    made = {value for node in graph for value in node.outputs}
    outside = sorted({value for node in graph for value in node.inputs} - made)
    holder = {value: draw(st.sampled_from([*names, ""])) for value in outside}
    copied = {value: draw(st.sampled_from([*names, "", ""])) for value in outside}
    # Views from outside have the location of their storage.
    held = {value: holder[graph.storages.get(value, value)] if graph.storages.get(value, value) in holder
            else holder[value] for value in outside}
    links = st.builds(LinkProfile, st.sampled_from([1e-6, 2e-5, 1e-3]), st.sampled_from([1e8, 1e10]))
    rates = st.builds(Rate, st.sampled_from([1e9, 5e10]), st.just(1e10))
    return graph, tuple(DeviceInfo(
        name, holds=frozenset(value for value in outside if held[value] == name),
        copies=frozenset(value for value in outside if copied[value] == name),
        profile=DeviceProfile(rate=draw(rates)), load=draw(st.sampled_from([0.0, 0.5])),
        links={other: draw(links) for other in names if other != name}) for name in names)


def _expect_rules(
    subject: Subject, schedule: ExecutionSchedule, graph: RecordedGraph, devices: tuple[DeviceInfo, ...],
    rules: tuple[str, ...],
) -> bool:
    """Apply the kernel's own check for these rules; return whether all other rules are kept too."""
    try:
        check_schedule(schedule, graph, devices)
    except ScheduleError as error:
        if any(f"rule '{rule}'" in str(error) for rule in rules):
            violated("schedule", got=str(error), wanted="one that keeps this rule",
                     where=f"{subject}: {show(graph)} on {devices}")
        return False
    return True


@law("scheduler.complete", effort=0.4)
@given(graph=graphs(), devices=_DEVICES)
def test_complete(
    subject: Subject, plugin: GraphScheduler, graph: RecordedGraph, devices: tuple[DeviceInfo, ...],
) -> None:
    """Look for nodes that are missing, duplicated, or made up."""
    schedule = plugin.schedule(graph, devices)
    known = sorted(node.id for node in graph.nodes())
    where = f"{subject}: {show(graph)}"
    expect_equal(sorted(schedule.order), known, "ordered nodes", where)
    expect_equal(sorted(schedule.devices), known, "nodes with a device", where)


@law("scheduler.order_valid", effort=0.4)
@given(graph=graphs(), devices=_DEVICES)
@example(graph=_CHAIN, devices=(DeviceInfo("cpu"), DeviceInfo("cuda:0")))
def test_order_valid(
    subject: Subject, plugin: GraphScheduler, graph: RecordedGraph, devices: tuple[DeviceInfo, ...]
) -> None:
    """Look for edges that point backwards, and for values that cross devices without a transfer."""
    schedule = plugin.schedule(graph, devices)
    position = {node: index for index, node in enumerate(schedule.order)}
    for edge in graph.edges():
        if edge.source in position and edge.target in position:
            expect(position[edge.source] < position[edge.target], "order",
                   got=f"{edge.target} before {edge.source}", wanted=f"the reverse, for {edge.kind} {edge.value!r}",
                   where=f"{subject}: {show(graph)}")
    _expect_rules(subject, schedule, graph, devices, ("order", "transfers"))


@law("scheduler.devices_known", effort=0.4)
@given(graph=graphs(), devices=_DEVICES)
def test_devices_known(
    subject: Subject, plugin: GraphScheduler, graph: RecordedGraph, devices: tuple[DeviceInfo, ...]
) -> None:
    """Offer one device, then several."""
    for offered in (devices[:1], devices):
        schedule = plugin.schedule(graph, offered)
        names, where = {device.id for device in offered}, f"{subject}: {show(graph)}"
        expect(set(schedule.devices.values()) <= names, "devices", got=set(schedule.devices.values()),
               wanted=f"some of {sorted(names)}", where=where)
        for transfer in schedule.transfers:
            expect({transfer.source, transfer.target} <= names and transfer.source != transfer.target, "transfer",
                   got=transfer, wanted=f"two different ones of {sorted(names)}", where=where)


@law("scheduler.homes_kept", effort=0.4)
@given(fleet=_fleets())
def test_homes_kept(
    subject: Subject, plugin: GraphScheduler, fleet: tuple[RecordedGraph, tuple[DeviceInfo, ...]]
) -> None:
    """Let several devices hold storages that the graph reads, writes, and views."""
    graph, devices = fleet
    _expect_rules(subject, plugin.schedule(graph, devices), graph, devices,
                  ("placements", "replicas", "home", "transfers"))


@law("scheduler.transfers_minimal", effort=0.4)
@given(fleet=_fleets())
def test_transfers_minimal(
    subject: Subject, plugin: GraphScheduler, fleet: tuple[RecordedGraph, tuple[DeviceInfo, ...]]
) -> None:
    """Look for transfers that no node needs, or to where the value already is."""
    graph, devices = fleet
    _expect_rules(subject, plugin.schedule(graph, devices), graph, devices, ("needless",))


@law("scheduler.memory_kept", effort=0.4)
@given(graph=graphs(), names=_NAMES, share=st.floats(0.0, 1.0))
@example(graph=_CHAIN, names=["cpu", "cuda:0"], share=0.0)
def test_memory_kept(
    subject: Subject, plugin: GraphScheduler, graph: RecordedGraph, names: list[str], share: float
) -> None:
    """Give the first device room for everything, and less to the others."""
    whole = sum(Problem(graph, (DeviceInfo("any"),)).size)
    devices = tuple(DeviceInfo(name, int(whole * (1.0 if name == names[0] else share))) for name in names)
    schedule = plugin.schedule(graph, devices)
    if _expect_rules(subject, schedule, graph, devices, ("budgets",)):
        for device, most in zip(devices, peak_bytes(Problem(graph, devices), schedule).values(), strict=True):
            expect(device.memory_bytes is not None and most <= device.memory_bytes, f"bytes on {device.id}", got=most,
                   wanted=f"at most {device.memory_bytes}", where=f"{subject}: {show(graph)}")


@law("scheduler.deterministic", effort=0.4)
@given(graph=graphs(), devices=_DEVICES)
def test_deterministic(
    subject: Subject, plugin: GraphScheduler, graph: RecordedGraph, devices: tuple[DeviceInfo, ...]
) -> None:
    """Schedule twice, with another graph in between."""
    first = plugin.schedule(graph, devices)
    plugin.schedule(EMPTY, devices)
    expect_equal(plugin.schedule(graph, devices), first, "second schedule", f"{subject}: {show(graph)}")


@law("scheduler.graph_unchanged", effort=0.4)
@given(graph=graphs(), devices=_DEVICES)
def test_graph_unchanged(
    subject: Subject, plugin: GraphScheduler, graph: RecordedGraph, devices: tuple[DeviceInfo, ...]
) -> None:
    """Compare the graph with a copy made before."""
    before = snapshot(graph)
    plugin.schedule(graph, devices)
    expect_unchanged(graph, before, f"{subject}: {show(graph)}")


@law("scheduler.empty_graph")
@given(devices=_DEVICES)
def test_empty_graph(subject: Subject, plugin: GraphScheduler, devices: tuple[DeviceInfo, ...]) -> None:
    """Schedule nothing."""
    schedule = plugin.schedule(EMPTY, devices)
    expect_equal((tuple(schedule.order), dict(schedule.devices), tuple(schedule.transfers)), ((), {}, ()),
                 "order, devices and transfers", f"{subject}: no nodes on {devices}")


@law("scheduler.deep_graph")
def test_deep_graph(subject: Subject, plugin: GraphScheduler) -> None:
    """Schedule a long chain."""
    graph, devices = deep_graph(), (DeviceInfo("cpu"), DeviceInfo("cuda:0"))
    graph.edges()
    # Other processes may be busy.
    started = time.process_time()
    schedule = plugin.schedule(graph, devices)
    took_s = time.process_time() - started
    expect(took_s < _LIMIT_S, "processor time", got=f"{took_s:.1f} s", wanted=f"less than {_LIMIT_S} s",
           where=f"{subject}: a chain of {len(graph)} nodes")
    expect_equal(len(schedule.order), len(graph), "number of ordered nodes", f"{subject}: a chain")

"""Graphs, devices and a second opinion on what schedules do, for tests of planning."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from djinn.ir.spec import SpecTable, TensorSpec
from djinn_plugins.graph.graph import Graph, GraphNode, RecordedGraph
from djinn_plugins.graph.metadata import DataLineage, SemanticMetadata
from djinn_plugins.schedule.schedule import DeviceInfo, DeviceProfile, ExecutionSchedule, LinkProfile, Rate

SPECS = SpecTable()
_META = torch.device("meta")


def spec(size_bytes: int) -> TensorSpec:
    return SPECS.intern(torch.Size([max(1, size_bytes // 4)]), (1,), 0, torch.float32, _META)


def node(name: str, inputs: Sequence[str] = (), outputs: Sequence[str] = (), sizes: Mapping[str, int] = {},
         **fields: Any) -> GraphNode:
    return GraphNode(name, "test::op", tuple(inputs), tuple(outputs), tuple(spec(sizes.get(o, 4)) for o in outputs),
                     input_specs=tuple(spec(sizes.get(i, 4)) for i in inputs), **fields)


def meaning(**fields: Any) -> dict[str, Any]:
    lineage = DataLineage(sources=("x",), last_use="somebody")
    return {"meaning": SemanticMetadata("test::op", **{"data_lineage": lineage, **fields})}


def layered(rng: random.Random, count: int, width: int) -> RecordedGraph:
    """Layers of nodes; each reads some of the layer before, and now and then an older one."""
    nodes: list[GraphNode] = []
    layers: list[list[str]] = []
    sizes: dict[str, int] = {}
    while len(nodes) < count:
        layer = []
        for _ in range(min(rng.randint(1, width), count - len(nodes))):
            name = f"n{len(nodes)}"
            pool = layers[-1] + (rng.choice(layers) if rng.random() < 0.3 else []) if layers else [f"x{len(nodes)}"]
            inputs = list(dict.fromkeys(rng.choice(pool) for _ in range(rng.randint(1, 3))))
            out = f"v{len(nodes)}"
            sizes[out] = int(10 ** rng.uniform(2, 6))
            flops = int(10 ** rng.uniform(3, 7.5))
            nodes.append(node(name, inputs, [out], sizes, metadata=meaning(flops=flops)))
            layer.append(out)
        layers.append(layer)
    return RecordedGraph(tuple(nodes))


def tangled(rng: random.Random, count: int) -> tuple[RecordedGraph, list[str]]:
    """Views, writes, random draws, several results, in any order; and the values from outside."""
    storages: dict[str, str] = {}
    outside = [f"x{index}" for index in range(rng.randint(1, 5))]
    values, root = list(outside), {name: name for name in outside}
    sizes = {name: rng.choice([400, 4_000, 400_000]) for name in outside}
    nodes = []
    for index in range(count):
        kind = rng.choice(["make", "make", "make", "view", "view", "write", "draw", "make two"])
        inputs = [rng.choice(values[-6:] if rng.random() < 0.6 else values) for _ in range(rng.randint(1, 3))]
        outputs, writes = [f"v{index}"], ()
        if kind == "view":
            inputs = inputs[:1]
            storages[outputs[0]] = root[outputs[0]] = root[inputs[0]]
            sizes[outputs[0]] = max(4, sizes[inputs[0]] // rng.choice([1, 2, 3]))
        elif kind == "write":
            outputs, writes = [], tuple(dict.fromkeys(inputs)) if rng.random() < 0.2 else tuple(inputs[:1])
        else:
            outputs += [f"u{index}"] if kind == "make two" else []
            for output in outputs:
                root[output], sizes[output] = output, rng.choice([400, 4_000, 400_000])
        values += outputs
        nodes.append(node(f"n{index}", inputs, outputs, sizes, writes=writes, is_random=kind == "draw",
                          metadata=meaning(can_recompute=rng.random() < 0.3, flops=1000, priority=rng.choice([0, 0, 5]))
                          if rng.random() < 0.7 else {}))
    return RecordedGraph(tuple(nodes), storages), outside


def scattered(rng: random.Random, outside: Sequence[str], count: int, memory_bytes: int | None = None
              ) -> list[DeviceInfo]:
    """Devices of several speeds that hold some of the values, and have copies of some."""
    names = [f"d{index}" for index in range(count)]
    holds: dict[str, set[str]] = {name: set() for name in names}
    copies: dict[str, set[str]] = {name: set() for name in names}
    for value in outside:
        if rng.random() < 0.6:
            holds[rng.choice(names)].add(value)
        if rng.random() < 0.3:
            copies[rng.choice(names)].add(value)
    same = LinkProfile(2e-5, 1e10)
    is_uniform = rng.random() < 0.5
    return [DeviceInfo(
        name, memory_bytes, holds=frozenset(holds[name]), copies=frozenset(copies[name]),
        profile=DeviceProfile(rate=Rate(rng.choice([1e9, 5e10]), 1e10)), load=rng.choice([0.0, 0.5]),
        links={other: same if is_uniform else LinkProfile(rng.choice([1e-6, 2e-5, 1e-3]), rng.choice([1e8, 1e10]))
               for other in names if other != name}) for name in names]


def contents_read(graph: Graph, devices: Sequence[DeviceInfo], schedule: ExecutionSchedule | None
                  ) -> dict[tuple[str, str], int]:
    """Run a graph on made-up contents; say what each node reads, by node and device.

    Without a schedule it runs in program order in one place.
    """
    order = [n.id for n in graph.nodes()] if schedule is None else schedule.order
    nodes = {n.id: n for n in graph.nodes()}
    made = {value for n in nodes.values() for value in n.outputs}

    def storage(value: str) -> str:
        return graph.storages.get(value, value)

    home: dict[str, str] = {}
    at_home: dict[str, int] = {}
    elsewhere: dict[tuple[str, str], int] = {}
    if schedule is not None:
        for device in devices:
            home.update({storage(value): device.id for value in device.holds if storage(value) not in home})
        home.update({storage(value): place for value, place in schedule.placements.items()})
        elsewhere.update({(value, device.id): hash(storage(value)) for device in devices for value in device.copies
                          if home.get(storage(value)) != device.id})
    due = list(schedule.transfers) if schedule is not None else []
    done: set[str] = {""}
    exists: set[str] = set()
    read: dict[tuple[str, str], int] = {}

    def content(value: str, place: str) -> int | None:
        if schedule is None or home.get(storage(value)) == place:
            return at_home.get(storage(value), hash(storage(value))) if value in exists or value not in made else None
        return elsewhere.get((value, place))

    def carry() -> None:
        moved = True
        while moved:
            moved = False
            for transfer in list(due):
                found = content(transfer.value, transfer.source) if transfer.after in done else None
                if found is not None:
                    due.remove(transfer)
                    moved = True
                    if home.get(storage(transfer.value)) == transfer.target:
                        at_home[storage(transfer.value)] = found
                    else:
                        elsewhere[transfer.value, transfer.target] = found

    carry()
    for name in order:
        current = nodes[name]
        places = [""] if schedule is None else [schedule.devices[name], *schedule.replicas.get(name, ())]
        for index, place in enumerate(places):
            seen = tuple(content(value, place) for value in current.inputs)
            read[name, place] = hash(seen)
            for number, value in enumerate(current.outputs):
                is_view = storage(value) != value
                fresh = hash((name, number, seen))
                if index == 0:
                    exists.add(value)
                    if not is_view:
                        home[value], at_home[value] = place, fresh
                else:
                    base = content(current.inputs[0], place) if is_view else fresh
                    assert base is not None
                    elsewhere[value, place] = base
            for value in current.writes:
                changed = hash((name, "writes", content(value, place), seen))
                if schedule is None or home[storage(value)] == place:
                    at_home[storage(value)] = changed
                else:
                    elsewhere[value, place] = changed
        done.add(name)
        carry()
    assert not due
    return read


def seconds(current: GraphNode, device: DeviceInfo) -> float:
    known = current.metadata["meaning"]
    return device.profile.seconds(known.flops, known.bytes_read + known.bytes_written, known.memory_pattern) / (
        1.0 - device.load)


def layered_devices(rng: random.Random, graph: Graph, count: int, *, is_uniform: bool = True) -> list[DeviceInfo]:
    """Devices of several speeds that hold whatever comes from outside."""
    made = {value for n in graph.nodes() for value in n.outputs}
    outside = sorted({value for n in graph.nodes() for value in n.inputs} - made)
    names = [f"d{index}" for index in range(count)]
    holds: dict[str, set[str]] = {name: set() for name in names}
    for value in outside:
        holds[rng.choice(names)].add(value)
    latency_s, bytes_per_s = 10 ** rng.uniform(-6, -3.5), 10 ** rng.uniform(9, 10.5)

    def link() -> LinkProfile:
        return LinkProfile(latency_s, bytes_per_s * (1 if is_uniform else rng.uniform(0.7, 1.3)))

    return [DeviceInfo(name, holds=frozenset(holds[name]),
                       profile=DeviceProfile(rate=Rate(rng.uniform(2e10, 1e11), 1e10)),
                       links={other: link() for other in names if other != name}) for name in names]

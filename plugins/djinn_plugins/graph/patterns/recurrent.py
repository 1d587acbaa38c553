"""Recurrent layers: as one operation, as cells, or decomposed into two products and gates per step."""

from __future__ import annotations

from collections.abc import Iterator

from djinn_plugins.graph.kinds import PatternMatch
from djinn_plugins.graph.patterns.index import Index
from djinn_plugins.graph.patterns.operators import (
    ACTIVATIONS,
    ARITHMETIC,
    PARTS,
    RECURRENT_CELLS,
    RECURRENT_LAYERS,
    SAME,
)

_GATES = frozenset({"sigmoid", "tanh", "relu", "hardsigmoid"})
_PARTED = SAME | PARTS
_INSIDE = SAME | PARTS | ACTIVATIONS | ARITHMETIC
_MAX_CELL = 40
_FEW_GATES = 2


def find_recurrences(index: Index) -> list[PatternMatch]:
    """Find every recurrent layer and direction, with all its steps."""
    found: list[tuple[int, PatternMatch]] = []
    cells: dict[str, list[int]] = {}
    for position, name in enumerate(index.names):
        if name in RECURRENT_LAYERS:
            kind = RECURRENT_LAYERS[name] or _kind_by_gates(index, position)
            found.append((position, _match(index, [position], kind, None, {position: "layer"})))
        elif name in RECURRENT_CELLS:
            cells.setdefault(f"{RECURRENT_CELLS[name]} {_weights_of_cell(index, position)}", []).append(position)
    for key, steps in cells.items():
        roles = dict.fromkeys(steps, "cell")
        found.append((steps[0], _match(index, steps, key.partition(" ")[0], len(steps), roles)))
    found += _taken_apart(index)
    return [match for _, match in sorted(found, key=lambda item: item[0])]


def _weights_of_cell(index: Index, position: int) -> str:
    """Return the value that all steps of a layer share; fused cells take products of their weights."""
    roots = []
    for value in index.nodes[position].inputs:
        if index.is_weight(value):
            roots.append(index.weight_root(value))
        else:
            made = index.source(*index.upstream(value, position))
            linear = index.linear(made) if made >= 0 else None
            roots += [index.weight_root(linear[1])] if linear else []
    return " ".join(sorted(set(roots)))


def _kind_by_gates(index: Index, position: int) -> str:
    """Determine the kind of layer from the number of gates in its weights."""
    inputs = index.nodes[position].inputs
    sizes = [size for value in inputs[1:3] if (size := index.size(value)) and len(size) == 2]
    if len(sizes) < 2 or not sizes[1][1]:  # of the input and of the state
        return "recurrent"
    return {1: "rnn", 3: "gru", 4: "lstm"}.get(sizes[1][0] // sizes[1][1], "recurrent")


def _taken_apart(index: Index) -> Iterator[tuple[int, PatternMatch]]:
    """Find sums of two products that gates read, and group those that share weights."""
    layers: dict[frozenset[str], list[tuple[int, int, int]]] = {}
    for position, name in enumerate(index.names):
        if name == "add" and len(index.nodes[position].inputs) == 2:  # of the input and of the state
            pair = _pair(index, position)
            if pair is not None and _is_gated(index, position):
                linears = [index.linear(product) for product in pair]
                weights = frozenset(index.weight_root(linear[1]) for linear in linears if linear)
                if len(weights) == 2:
                    layers.setdefault(weights, []).append((position, *pair))
    claimed: set[int] = set()
    for sums in layers.values():
        match = _layer(index, sums, claimed)
        if match is not None:
            yield sums[0][0], match


def _pair(index: Index, position: int) -> tuple[int, int] | None:
    """Return the two products that a sum adds, if their inputs differ."""
    made = [index.source(*index.upstream(value, position, _PARTED)) for value in index.nodes[position].inputs]
    linears = [index.linear(product) if product >= 0 else None for product in made]
    if linears[0] is None or linears[1] is None or made[0] == made[1]:
        return None
    roots = {index.upstream(linear[0], product, _PARTED)[0]
             for linear, product in zip(linears, made, strict=True) if linear is not None}
    return (made[0], made[1]) if len(roots) == 2 else None


def _is_gated(index: Index, position: int) -> bool:
    """Whether gates read a sum, or parts of it."""
    pending, steps = [position], 0
    while pending and steps < 12:
        steps += 1
        for reader in index.uses(pending.pop()):
            if index.names[reader] in _GATES:
                return True
            if index.names[reader] in _PARTED:
                pending.append(reader)
    return False


def _layer(index: Index, sums: list[tuple[int, int, int]], claimed: set[int]) -> PatternMatch | None:
    """Collect the steps of a layer; a false candidate has neither several gates nor a second step."""
    nodes: set[int] = set()
    states: set[int] = set()
    for position, *products in sums:
        nodes.update(_cell(index, position))
        for product in products:
            nodes.update(index.wrapped(product))
            states.add(product)
    names = [index.names[position] for position in nodes]
    if names.count("sigmoid") >= _FEW_GATES and "tanh" in names:
        kind = "lstm" if names.count("tanh") >= 2 * (names.count("sigmoid") // 3) else "gru"
    elif len(sums) > 1 and len({position for _, *products in sums for position in products}) > _FEW_GATES:
        kind = "rnn"
    else:
        return None
    nodes -= claimed
    claimed |= nodes
    per_step = {"lstm": 1, "gru": 2, "rnn": 1}[kind]
    # A cell may add the products for each of its gates separately.
    steps = max(1, len(sums) // per_step) if kind != "lstm" or len(sums) < 4 else _steps(sums)
    roles = dict.fromkeys(states & nodes, "product")
    roles |= {p: "gate" for p in nodes if index.names[p] in _GATES}
    return _match(index, sorted(nodes), kind, steps, roles)


def _steps(sums: list[tuple[int, int, int]]) -> int:
    return max(len({products[place] for _, *products in sums}) for place in range(2))


def _cell(index: Index, start: int) -> set[int]:
    """Go forward from the sum of a step to the next state."""
    reached, pending = {start}, [start]
    while pending and len(reached) < _MAX_CELL:
        for reader in index.uses(pending.pop()):
            if reader in reached or index.names[reader] not in _INSIDE:
                continue
            if reader - start > _MAX_CELL:
                continue  # part of another step
            reached.add(reader)
            pending.append(reader)
    return reached


def _match(
    index: Index, positions: list[int], kind: str, steps: int | None, roles: dict[int, str]
) -> PatternMatch:
    first = index.nodes[positions[0]]
    form = "composite" if steps is None else "decomposed"
    return index.match("recurrent", positions, roles=roles, values={"input": first.inputs[0]} if first.inputs else {},
                       metadata={"kind": kind, "steps": steps, "form": form},
                       confidence=1.0 if steps is None else 0.9)

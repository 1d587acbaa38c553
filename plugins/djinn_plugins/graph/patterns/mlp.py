"""Multi-layer perceptrons: products with weights, with only elementwise functions between them."""

from __future__ import annotations

import attrs

from djinn_plugins.graph.kinds import PatternMatch
from djinn_plugins.graph.patterns.index import Index
from djinn_plugins.graph.patterns.moe import find_routings
from djinn_plugins.graph.patterns.operators import ACTIVATIONS, ARITHMETIC, DROPOUTS, FACTORIES, PARTS, SAME

_MAX_NODES = 48
"""Maximum elementwise nodes between two products: a decomposed activation has about ten."""
_FORMULAS = (("erf", "gelu"), ("glu", "glu"), ("silu", "silu"), ("gelu", "gelu"), ("relu", "relu"))
_RESPONSES = frozenset({"linalg_vector_norm", "norm"})
"""Norms of whole channels, by which some perceptrons scale their own; their mean is then part of the match."""
_PASSED = SAME | PARTS | ACTIVATIONS | ARITHMETIC | _RESPONSES | frozenset({"mean"})


@attrs.frozen
class Perceptron:
    """Two or more consecutive products, by position."""

    inner: tuple[int, ...]
    """The first products: one, or the gate and the other."""
    between: tuple[int, ...]
    """The nodes between them, in program order."""
    outer: tuple[int, ...]
    """The products after them, in order; the last one produces the result."""
    is_gated: bool
    activation: str
    gate: int
    """The one of `inner` that the activation is applied to."""


def find_perceptrons(index: Index) -> dict[int, Perceptron]:
    """Find all perceptrons, by the position of their last product."""
    found: dict[int, Perceptron] = {}
    inner_of: dict[int, int] = {}
    for position in range(len(index.nodes)):
        if index.linear(position) is None or index.is_gradient(position):
            continue
        made = _before(index, position)
        if made is None or any(inner in inner_of for inner in made.inner):
            continue
        earlier = found.pop(made.inner[0], None) if len(made.inner) == 1 else None
        if earlier is not None:
            made = attrs.evolve(earlier, between=(*earlier.between, *made.between),
                                outer=(*earlier.outer, position))
        found[position] = made
        for inner in made.inner:
            inner_of[inner] = position
    return found


def _before(index: Index, outer: int) -> Perceptron | None:
    """Go back from a product through elementwise functions to the products that feed them."""
    linear = index.linear(outer)
    assert linear is not None
    pending, seen = [(linear[0], outer)], set[int]()
    inner: list[int] = []
    between: list[int] = []
    bends = False
    while pending:
        value, before = pending.pop()
        position = index.source(value, before)
        if position < 0 or position in seen:
            continue
        seen.add(position)
        name, inputs = index.names[position], index.nodes[position].inputs
        if name in _PASSED:
            between.append(position)
            bends = bends or name in ACTIVATIONS
            if len(between) > _MAX_NODES:
                return None
            pending += [(operand, position) for operand in (inputs[:1] if name in DROPOUTS else inputs)]
        elif index.linear(position) is not None:
            inner.append(position)
            if len(inner) > 2:  # a gate and the product that it gates
                return None
        elif name not in FACTORIES:
            return None
    if not bends or not inner:
        return None
    return _joined(index, outer, sorted(inner), sorted(between))


def _joined(index: Index, outer: int, inner: list[int], between: list[int]) -> Perceptron | None:
    """Determine whether and how the preceding products belong together."""
    given = [index.linear(position) for position in inner]
    if len({index.root(linear[0], position) for linear, position in zip(given, inner, strict=True) if linear}) != 1:
        return None
    bending = [position for position in between if index.names[position] in ACTIVATIONS]
    names = {index.names[position] for position in between}
    if "mean" in names and not names & _RESPONSES:
        return None
    activation = _activation(index, between)
    if len(inner) == 1:
        parts = any(index.names[position] in PARTS for position in between)
        gated = activation == "glu" or (parts and any(_joins(index, position) for position in between))
        return Perceptron(tuple(inner), tuple(between), (outer,), gated, activation, inner[0])
    if not any(_joins(index, position) for position in between):
        return None
    gate = _feeding(index, bending[0], inner, set(between))
    return Perceptron(tuple(inner), tuple(between), (outer,), True, activation, gate)


def _joins(index: Index, position: int) -> bool:
    """Whether a node multiplies two different activations."""
    inputs = index.nodes[position].inputs
    return index.names[position] == "mul" and len(inputs) == 2 and inputs[0] != inputs[1]


def _feeding(index: Index, bending: int, inner: list[int], between: set[int]) -> int:
    """Find the product that feeds an activation."""
    pending = [bending]
    while pending:
        here = pending.pop()
        for value in index.nodes[here].inputs:
            position = index.source(value, here)
            if position in inner:
                return position
            if position in between:
                pending.append(position)
    return inner[0]


def _activation(index: Index, between: list[int]) -> str:
    """Return the name of the activation, even if it is decomposed."""
    names = {index.names[position] for position in between}
    if "glu" in names:
        return "glu"
    if "tanh" in names and "pow" in names:
        return "gelu_tanh"
    if "sigmoid" in names and "mul" in names:
        scaled = any(index.names[p] == "mul" and len(index.nodes[p].inputs) == 1 for p in between)
        return "quick_gelu" if scaled else "silu"
    if "relu" in names and names & {"pow", "square"}:
        return "relu_squared"
    for name, meaning in _FORMULAS:
        if name in names:
            return meaning
    return min(names & ACTIVATIONS)


def find_mlps(index: Index) -> list[PatternMatch]:
    """Find plain and gated perceptrons; those of experts belong to ``moe``."""
    routed = {position for routing in index.once(find_routings) for position in routing.nodes}
    claimed: set[int] = set()
    found = []
    for perceptron in index.once(find_perceptrons).values():
        if routed and not routed.isdisjoint(perceptron.inner):
            continue
        found.append(_match(index, perceptron, claimed))
    return found


def _match(index: Index, perceptron: Perceptron, claimed: set[int]) -> PatternMatch:
    positions = set(perceptron.between)
    for product in (*perceptron.inner, *perceptron.outer):
        positions.update(index.wrapped(product))
    positions -= claimed
    claimed |= positions
    roles = dict.fromkeys(perceptron.inner, "up_projection")
    if perceptron.is_gated and len(perceptron.inner) > 1:
        roles[perceptron.gate] = "gate_projection"
    roles |= dict.fromkeys(perceptron.outer[:-1], "hidden_projection")
    roles |= {position: "activation" for position in perceptron.between if index.names[position] in ACTIVATIONS}
    last = perceptron.outer[-1]
    roles[last] = "down_projection"
    first, final = index.linear(perceptron.inner[0]), index.linear(last)
    assert first is not None
    assert final is not None
    widths = [size[-1] if (size := index.size(value)) else None for value in (first[0], final[0])]
    result = index.result(last) or ""
    out = index.size(result)
    return index.match(
        "mlp", positions, roles=roles, values={"input": first[0], "weight": final[1], "result": result},
        metadata={"is_gated": perceptron.is_gated, "activation": perceptron.activation,
                  "layers": 1 + len(perceptron.outer), "in_features": widths[0], "hidden_features": widths[1],
                  "out_features": out[-1] if out else None})

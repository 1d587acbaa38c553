"""Normalisation: as one operation, or decomposed around the root of a mean."""

from __future__ import annotations

from djinn_plugins.graph.kinds import PatternMatch
from djinn_plugins.graph.patterns.index import Index
from djinn_plugins.graph.patterns.operators import CASTS, FUSED_NORMS, SAME, VIEWS

_ROOTS = frozenset({"rsqrt", "sqrt"})
_SAVED = frozenset({"detach", "alias"})
"""Operators with which autograd saves a value."""


def find_norms(index: Index) -> list[PatternMatch]:
    """Find layer, root-mean-square, group and batch norms."""
    found = []
    claimed: set[int] = set()
    for position, name in enumerate(index.names):
        if name in FUSED_NORMS and index.nodes[position].inputs:
            found.append(_fused(index, position, FUSED_NORMS[name]))
        elif name in _ROOTS or (name == "pow" and index.argument(position, 1) == -0.5):
            match = _taken_apart(index, position, claimed)
            if match is not None:
                found.append(match)
    return found


def _fused(index: Index, position: int, kind: str) -> PatternMatch:
    node = index.nodes[position]
    values = {"input": node.inputs[0]}
    if len(node.inputs) > 1:
        values["weight"] = node.inputs[1]
    result = index.result(position)
    if result is not None:
        values["result"] = result
    return index.match("norm", [position], roles={position: "normalize"}, values=values,
                       metadata={"kind": kind, "form": "composite"})


def _taken_apart(index: Index, root: int, claimed: set[int]) -> PatternMatch | None:
    """Search in both directions from the root of a mean of squares."""
    statistic = _statistic(index, root)
    if statistic is None:
        return None
    kind, x, before = statistic
    scaled = _scaled(index, root, x, kind)
    if scaled is None:
        return None
    behind, last = _affine(index, scaled[-1], kind)
    nodes = [node for node in (*before, root, *scaled, *behind) if node not in claimed]
    claimed.update(nodes)
    roles = {root: "inverse_deviation", scaled[-1]: "normalize"}
    return index.match("norm", nodes, roles=roles, values={"input": x, "result": index.result(last) or ""},
                       metadata={"kind": kind, "form": "decomposed"},
                       confidence=0.95)


def _statistic(index: Index, root: int) -> tuple[str, str, list[int]] | None:
    """Analyze the operand of the root: return the kind of norm, its input, and the nodes between them."""
    node = index.nodes[root]
    if not node.inputs:
        return None
    passed: list[int] = []
    value, before = node.inputs[0], root
    for _ in range(6):
        position = index.source(value, before)
        if position < 0:
            # The variance of a frozen batch norm comes from outside.
            return ("batch", "", passed) if passed and _is_vector(index, value) else None
        name, inputs = index.names[position], index.nodes[position].inputs
        if name in ("mean", "sum") and inputs:
            return _mean_of_squares(index, position, passed)
        if name in ("var", "var_mean") and inputs:
            return "layer", index.root(inputs[0], position), [*passed, position]
        if not inputs or not (name in SAME or (name in ("add", "clamp_min", "clamp", "maximum", "div"))):
            return None
        if len(inputs) > 1 and not index.is_weight(inputs[1]):
            return None
        passed.append(position)
        value, before = inputs[0], position
    return None


def _is_vector(index: Index, value: str) -> bool:
    size = index.size(value)
    return size is not None and sum(extent != 1 for extent in size) == 1


def _mean_of_squares(index: Index, mean: int, passed: list[int]) -> tuple[str, str, list[int]] | None:
    inputs = index.nodes[mean].inputs
    value, before = index.upstream(inputs[0], mean)
    square = index.source(value, before)
    if square < 0 or not _is_square(index, square):
        return None
    passed = [*passed, mean, square]
    x, before = index.upstream(index.nodes[square].inputs[0], square)
    centred = index.source(x, before)
    if centred >= 0 and index.names[centred] == "sub" and len(index.nodes[centred].inputs) > 1:
        whole, average = index.nodes[centred].inputs[:2]
        middle = index.source(*index.upstream(average, centred))
        if middle >= 0 and index.names[middle] == "mean":
            return "layer", index.root(whole, centred), [*passed, centred, middle]
    if index.names[mean] == "sum":
        return None
    return "rms", x, passed


def _is_square(index: Index, position: int) -> bool:
    node, name = index.nodes[position], index.names[position]
    if name == "pow":
        return len(node.inputs) == 1 and index.argument(position, 1, default=2) == 2
    return name == "square" or (name == "mul" and len(node.inputs) > 1 and node.inputs[0] == node.inputs[1])


def _scaled(index: Index, root: int, x: str, kind: str) -> list[int] | None:
    """Find where the input is multiplied by the inverse root, or divided by the root."""
    way: list[int] = []
    for _ in range(5):
        following = -1
        for reader in index.uses(way[-1] if way else root):
            name, inputs = index.names[reader], index.nodes[reader].inputs
            if name in ("mul", "div") and len(inputs) > 1:
                others = [index.root(value, reader) for value in inputs[:2]]
                if kind == "batch":
                    ours = index.result(way[-1] if way else root)
                    other = inputs[1] if inputs[0] == ours else inputs[0]
                    if not index.is_weight(other):
                        return [*way, reader]
                    following = reader if name == "mul" else following
                elif x in others or _is_centred(index, inputs, reader, x):
                    return [*way, reader]
            elif following < 0 and (name in CASTS or name in VIEWS or name == "reciprocal") and name not in _SAVED:
                following = reader
        if following < 0:
            return None
        way.append(following)
    return None


def _is_centred(index: Index, inputs: tuple[str, ...], reader: int, x: str) -> bool:
    """Whether an operand is the input minus its mean."""
    for value in inputs[:2]:
        position = index.source(*index.upstream(value, reader))
        if position >= 0 and index.names[position] == "sub" and x == index.root(
                index.nodes[position].inputs[0], position):
            return True
    return False


def _affine(index: Index, scaled: int, kind: str) -> tuple[list[int], int]:
    """Follow the normalised value through its cast, weight and bias."""
    way: list[int] = []
    wanted = ["mul", "add"] if kind != "batch" else ["add"]
    here = scaled
    for _ in range(5):
        following = -1
        for reader in index.uses(here):
            name, inputs = index.names[reader], index.nodes[reader].inputs
            if name in CASTS:
                following = reader
            elif name in wanted and len(inputs) > 1:
                ours = index.result(here)
                other = inputs[1] if inputs[0] == ours else inputs[0]
                if index.is_weight(other) or (kind == "batch" and _is_shift(index, other)):
                    following = reader
                    way += _only_for(index, other)
                    wanted = wanted[wanted.index(name) + 1:]
            if following >= 0:
                break
        if following < 0:
            break
        way.append(following)
        here = following
    while way and index.names[way[-1]] in CASTS:
        way.pop()
    return way, way[-1] if way else scaled


def _is_shift(index: Index, value: str) -> bool:
    """Whether a value is computed from outside vectors: the bias of a frozen batch norm."""
    position = index.producer(value)
    return position >= 0 and index.names[position] in ("sub", "add") and _is_vector(index, value)


def _only_for(index: Index, value: str) -> list[int]:
    """List the nodes that prepare a weight for its only reader: its cast, or the addition of one."""
    prepared = []
    position = index.producer(value)
    while position >= 0 and len(index.readers(value)) == 1 and len(index.nodes[position].inputs) == 1:
        prepared.append(position)
        value = index.nodes[position].inputs[0]
        position = index.producer(value)
    return prepared

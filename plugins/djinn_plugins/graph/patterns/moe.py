"""Mixtures of experts: a router, the choice of a few experts for each token, and the combination of their results."""

from __future__ import annotations

from heapq import heappop, heappush

import attrs

from djinn_plugins.graph.kinds import PatternMatch
from djinn_plugins.graph.patterns.index import Index
from djinn_plugins.graph.patterns.operators import GROUPED_PRODUCTS, LOOKUPS, PARTS, SAME, SOFTMAXES

_MAX_EXPERTS = 2048
_MAX_STEPS = 16
_MAX_NODES = 60_000
_SCORING = SAME | PARTS | SOFTMAXES | frozenset({
    "sigmoid", "add", "sub", "mul", "div", "masked_fill", "where", "scatter", "gather", "sqrt", "softplus", "tanh",
    "rsub", "clamp_min", "log"})
_CHOOSING = frozenset({"topk", "argmax", "max", "sort"})
_COMBINING = frozenset({"index_add", "index_put", "_index_put_impl", "scatter_add", "scatter_reduce", "index_copy",
                        "masked_scatter"})
_SUMMING = frozenset({"sum", "mean"})
_DISPATCHING = frozenset({"index", "index_select", "gather", "masked_select", "one_hot", "nonzero", "sort", "argsort",
                          "take_along_dim", "embedding_bag", "repeat_interleave"})


@attrs.frozen
class Routing:
    """One mixture, by position."""

    router: int
    choices: tuple[int, ...]
    nodes: frozenset[int]
    combinations: tuple[int, ...]
    products: tuple[int, ...]
    experts: int
    chosen: int


def find_routings(index: Index) -> list[Routing]:
    """Find every mixture of experts, in program order."""
    choices: dict[int, list[tuple[int, list[int]]]] = {}
    for position, name in enumerate(index.names):
        if name in _CHOOSING:
            way = _way_from_router(index, position)
            if way is not None:
                choices.setdefault(way[0], []).append((position, way))
    found: list[Routing] = []
    taken: set[int] = set()
    for router in sorted(choices):
        made = _routing(index, router, choices[router], taken)
        if made is not None:
            found.append(made)
            taken |= made.nodes
    return found


def _way_from_router(index: Index, choice: int) -> list[int] | None:
    """Go back from a choice to the product that scores the experts; return the path, the router first."""
    inputs = index.nodes[choice].inputs
    if not inputs:
        return None
    way = [choice]
    value, before = inputs[0], choice
    for _ in range(_MAX_STEPS):
        position = index.source(value, before)
        if position < 0:
            return None
        if index.linear(position) is not None:
            size = index.size(index.result(position) or "")
            # A vocabulary is also chosen from; the use of the choice distinguishes them.
            return [position, *reversed(way)] if size and size[-1] <= _MAX_EXPERTS else None
        operands = index.nodes[position].inputs
        if index.names[position] not in _SCORING or not operands:
            return None
        way.append(position)
        place = 1 if index.names[position] == "where" and len(operands) > 1 else 0
        value, before = operands[place], position
    return None


def _routing(index: Index, router: int, chosen: list[tuple[int, list[int]]], taken: set[int]) -> Routing | None:
    """Go forward from all choices of one router to the combination of the chosen experts' results."""
    choices = [choice for choice, _ in chosen]
    reached = set(choices)
    heavy: set[int] = set()
    products, combinations = list[int](), list[int]()
    dispatches = False
    pending = sorted(choices)
    while pending:
        here = heappop(pending)  # in program order, so its inputs are known
        name = index.names[here]
        dispatches = dispatches or name in _DISPATCHING
        if here not in choices:
            if name in GROUPED_PRODUCTS or index.linear(here) is not None:
                products.append(here)
                heavy.add(here)
            elif _reads_heavy(index, here, heavy):
                if name in _COMBINING or (name in _SUMMING and _drops_a_choice(index, here)):
                    combinations.append(here)
                    continue
                heavy.add(here)
        for reader in index.uses(here):
            name = index.names[reader]
            if name in LOOKUPS:
                return None  # a value that is looked up in a table is a token
            if reader not in reached and reader not in taken and "backward" not in name:
                reached.add(reader)
                heappush(pending, reader)
        if len(reached) > _MAX_NODES:
            break
    if not products or not combinations or not dispatches:
        return None
    # Later nodes read the result, or belong to the backward pass.
    start, end = router, max(_forward_only(index, combinations))
    nodes = reached.union(*(way for _, way in chosen))
    nodes = {position for position in nodes if start <= position <= end}
    nodes |= _prepared(index, nodes)
    nodes -= taken
    scores = index.size(index.result(router) or "")
    return Routing(router, tuple(choices), frozenset(nodes), tuple(p for p in combinations if p <= end),
                   tuple(p for p in products if p <= end), scores[-1] if scores else 0, _chosen(index, choices))


def _chosen(index: Index, choices: list[int]) -> int:
    """Return how many experts the last choice selects for a token."""
    size = index.size(index.result(choices[-1]) or "")
    return size[-1] if size and index.names[choices[-1]] == "topk" else 1


def _reads_heavy(index: Index, reader: int, heavy: set[int]) -> bool:
    return any(index.source(value, reader) in heavy for value in index.nodes[reader].inputs)


def _drops_a_choice(index: Index, position: int) -> bool:
    """Whether a sum is over the chosen experts of a token, and not over all elements."""
    before, after = index.size(index.nodes[position].inputs[0]), index.size(index.result(position) or "")
    return bool(before and after and len(before) == len(after) + 1 and before[-1] == after[-1])


def _forward_only(index: Index, combinations: list[int]) -> list[int]:
    """Leave out combinations of the backward pass: they write to other storages, and later."""
    ordered = sorted(combinations)
    first = index.nodes[ordered[0]]
    if not first.writes:
        return ordered[:1]
    storage = index.storage(first.writes[0])
    return [p for p in ordered
            if index.nodes[p].writes and index.storage(index.nodes[p].writes[0]) == storage]


def _prepared(index: Index, nodes: set[int]) -> set[int]:
    """List the nodes that only serve the mixture: its sum before any addition, views of weights, parts of tokens."""
    more: set[int] = set()
    for position in nodes:
        for value in index.nodes[position].inputs:
            made = index.producer(value)
            if made >= 0 and made not in nodes and len(index.readers(value)) == 1 and (
                    index.names[made] in SAME or index.names[made] in PARTS):
                more.add(made)
    return more


def find_moes(index: Index) -> list[PatternMatch]:
    """Find every mixture of experts."""
    return [_match(index, routing) for routing in index.once(find_routings)]


def _match(index: Index, routing: Routing) -> PatternMatch:
    roles = dict.fromkeys(routing.products, "expert")
    roles |= dict.fromkeys(routing.combinations, "combine")
    roles |= dict.fromkeys(routing.choices, "choice")
    roles[routing.router] = "router"
    linear = index.linear(routing.router)
    values = {"input": linear[0] if linear else "", "result": index.result(routing.combinations[-1]) or ""}
    return index.match(
        "moe", routing.nodes, roles=roles, values=values, confidence=0.95,
        metadata={"experts": routing.experts, "experts_per_token": routing.chosen})

"""Attention: as one operation, or decomposed into two products with a softmax between them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import attrs

from djinn_plugins.graph.kinds import PatternMatch
from djinn_plugins.graph.patterns.causality import is_causal_mask
from djinn_plugins.graph.patterns.index import Index
from djinn_plugins.graph.patterns.norm import find_norms
from djinn_plugins.graph.patterns.operators import (
    ACTIVATIONS,
    ARITHMETIC,
    ATTENTIONS,
    CASTS,
    PARTS,
    PRODUCTS,
    REORDERINGS,
    SAME,
    SOFTMAXES,
    VIEWS,
)
from djinn_plugins.graph.patterns.paths import Path, path_to_projection

_SCORES_STEPS = 24
_CONTEXT_STEPS = 10
_SCORE_PATH = SAME | PARTS | ARITHMETIC | ACTIVATIONS | frozenset({"cat", "constant_pad_nd", "triu", "tril"})
_WEIGHTS_PATH = SAME | PARTS | CASTS | frozenset({"mul", "where", "masked_fill", "div"})
_CONTEXT_PATH = SAME | REORDERINGS | frozenset({"mul", "cat", "slice"})


@attrs.frozen
class Core:
    """The core of an attention: its three operands, and the nodes that combine them."""

    anchor: int
    query: tuple[str, int]
    key: tuple[str, int]
    value: tuple[str, int]
    nodes: tuple[int, ...]
    roles: dict[int, str]
    result: int
    masks: tuple[tuple[str, int], ...]
    is_causal: bool
    is_composite: bool


@attrs.frozen
class Attention:
    """An attention, with the paths of its operands."""

    core: Core
    query: Path
    key: Path
    value: Path


def find_cores(index: Index) -> list[Core]:
    """Find the core of every attention, in program order."""
    found = []
    for position, name in enumerate(index.names):
        if name in ATTENTIONS and len(index.nodes[position].inputs) > 2:  # query, key and value
            found.append(_composite(index, position, *ATTENTIONS[name]))
        elif name in SOFTMAXES:
            core = _taken_apart(index, position)
            if core is not None:
                found.append(core)
    return found


def _composite(index: Index, position: int, mask_place: int, causal_place: int) -> Core:
    query, key, value = index.nodes[position].inputs[:3]
    mask = index.tensor(position, mask_place, "attn_mask") or index.tensor(position, -1, "attn_bias")
    causal = bool(index.argument(position, causal_place, "is_causal", default=False))
    return Core(position, (query, position), (key, position), (value, position), (position,),
                {position: "attention"}, position, ((mask, position),) if mask else (), causal, True)


def _taken_apart(index: Index, softmax: int) -> Core | None:
    """Find the product of queries and keys before a softmax, and the product with values after it."""
    before = _scores(index, softmax)
    if before is None:
        return None
    product, scoring, masks = before
    behind = _mixing(index, softmax)
    if behind is None:
        return None
    context, weighing = behind
    query, key = _factors(index, product)
    value = _factors(index, context)[1]
    roles = {product: "scores", softmax: "softmax", context: "context"}
    nodes = (product, *scoring, softmax, *weighing, context)
    return Core(softmax, (query, product), (key, product), (value, context), nodes, roles, context, masks, False, False)


def _factors(index: Index, product: int) -> tuple[str, str]:
    """Return the two factors of a product, without the summand of ``baddbmm``."""
    inputs = index.nodes[product].inputs
    return inputs[-2], inputs[-1]


def _scores(index: Index, softmax: int) -> tuple[int, list[int], tuple[tuple[str, int], ...]] | None:
    """Go back from a softmax to the product of two activations; added or filled-in values on the path are masks."""
    inputs = index.nodes[softmax].inputs
    if not inputs:
        return None
    way: list[int] = []
    masks: list[tuple[str, int]] = []
    value, before = inputs[0], softmax
    for _ in range(_SCORES_STEPS):
        position = index.source(value, before)
        if position < 0:
            return None
        name, operands = index.names[position], index.nodes[position].inputs
        if name in PRODUCTS:
            if not _multiplies_activations(index, position):
                return None
            if name == "baddbmm":
                masks.append((operands[0], position))
            return position, way, tuple(masks)
        if name not in _SCORE_PATH or not operands:
            return None
        way.append(position)
        main = _main_operand(index, position)
        masks += [(other, position) for place, other in enumerate(operands) if place != main]
        value, before = operands[main], position
    return None


def _main_operand(index: Index, position: int) -> int:
    """Return the operand that carries the scores: of several, the result of a product."""
    operands = index.nodes[position].inputs
    if len(operands) == 1:
        return 0
    sizes = [index.size(value) for value in operands]
    result = index.size(index.result(position) or "")
    for place, value in enumerate(operands):
        if sizes[place] is not None and result is not None and len(sizes[place] or ()) != len(result):
            continue
        if _comes_from_product(index, value, position):
            return place
    return 1 if index.names[position] == "where" else 0


def _comes_from_product(index: Index, value: str, before: int) -> bool:
    """Whether a product of activations is close before a value."""
    for _ in range(8):
        position = index.source(value, before)
        if position < 0:
            return False
        name, operands = index.names[position], index.nodes[position].inputs
        if name in PRODUCTS:
            return True
        if name not in _SCORE_PATH or not operands:
            return False
        place = 1 if name == "where" and len(operands) > 1 else 0
        value, before = operands[place], position
    return False


def _multiplies_activations(index: Index, position: int) -> bool:
    """Whether both factors are activations, and there are several matrices or both factors are computed here."""
    if index.linear(position) is not None:
        return False
    factors = _factors(index, position)
    sizes = [index.size(factor) for factor in factors]
    if all(size is None or len(size) > 2 for size in sizes):  # more than one matrix
        return True
    return all(index.source(*index.upstream(factor, position)) >= 0 for factor in factors)


def _mixing(index: Index, softmax: int) -> tuple[int, list[int]] | None:
    """Go forward from a softmax to the product that has its result as the left factor."""
    way: list[int] = []
    here = softmax
    for _ in range(_CONTEXT_STEPS):
        following = -1
        for reader in index.uses(here):
            name = index.names[reader]
            if name in PRODUCTS and _is_left_factor(index, reader, here):
                return (reader, way) if _multiplies_activations(index, reader) else None
            if name in _WEIGHTS_PATH and following < 0 and (name not in ("detach", "alias")):
                following = reader
        if following < 0:
            return None
        way.append(following)
        here = following
    return None


def _is_left_factor(index: Index, product: int, here: int) -> bool:
    inputs = index.nodes[product].inputs
    return len(inputs) > 1 and inputs[-2] in index.nodes[here].outputs


def find_attention_paths(index: Index) -> list[Attention]:
    """Find every attention, with the paths of its query, key and value from their projections or caches."""
    return [Attention(core, path_to_projection(index, *core.query), path_to_projection(index, *core.key),
                      path_to_projection(index, *core.value)) for core in index.once(find_cores)]


def find_attentions(index: Index) -> list[PatternMatch]:
    """Find every attention, from its projections to its output projection."""
    claimed: set[int] = set()
    return [_match(index, attention, claimed) for attention in index.once(find_attention_paths)]


def _match(index: Index, attention: Attention, claimed: set[int]) -> PatternMatch:
    core = attention.core
    paths = {"query": attention.query, "key": attention.key, "value": attention.value}
    roles: dict[int, str] = {}
    positions: set[int] = set()
    for name, path in paths.items():
        positions.update(path.nodes)
        for projection in path.projections:
            shared = roles.get(projection)
            roles[projection] = f"{name}_projection" if shared is None else "projection"
            positions.update(index.wrapped(projection))
    output, behind = _output_projection(index, core.result)
    positions.update(behind)
    if output >= 0:
        positions.update(index.wrapped(output))
        roles[output] = "output_projection"
    positions = (positions | set(core.nodes)) - claimed
    claimed |= positions
    values = {"query": core.query[0], "key": core.key[0], "value": core.value[0],
              "result": index.result(output if output >= 0 else core.result) or ""}
    metadata = _metadata(index, attention)
    return index.match("attention", positions, roles=roles | core.roles, values=values, metadata=metadata,
                       confidence=1.0 if core.is_composite else 0.95)


def _output_projection(index: Index, result: int) -> tuple[int, list[int]]:
    """Go forward from the mixed values to the next product with a weight; -1 if there is none nearby."""
    way: list[int] = []
    here = result
    for _ in range(_CONTEXT_STEPS):
        following = -1
        for reader in _reading_first(index, here):
            if index.linear(reader) is not None:
                return reader, way
            if index.names[reader] in _CONTEXT_PATH and following < 0 and index.names[reader] not in (
                    "detach", "alias"):
                following = reader
        if following < 0:
            return -1, []
        way.append(following)
        here = following
    return -1, []


def _reading_first(index: Index, here: int) -> Iterator[int]:
    """List the readers of a node's first result; the other results of a fused kernel are for its backward pass."""
    value = index.result(here)
    for reader in index.uses(here):
        if value in index.nodes[reader].inputs:
            yield reader


def _metadata(index: Index, attention: Attention) -> dict[str, object]:
    core = attention.core
    heads, kv_heads, queries, keys = _extents(index, attention)
    cached = bool(attention.key.caches)
    causal = core.is_causal or any(is_causal_mask(index, *mask) for mask in core.masks) or cached
    cross = is_cross(index, attention)
    return {
        "form": "composite" if core.is_composite else "decomposed",
        "is_causal": causal and not cross, "is_cross": cross, "is_masked": bool(core.masks) or core.is_causal,
        "is_grouped": heads is not None and kv_heads is not None and kv_heads < heads,
        "heads": heads, "kv_heads": kv_heads, "query_length": queries, "key_length": keys,
    }


def _extents(index: Index, attention: Attention) -> tuple[int | None, int | None, int | None, int | None]:
    """Return the numbers of query and key heads, and of query and key positions."""
    core = attention.core
    query, value = index.size(core.query[0]), index.size(core.value[0])
    queries = query[-2] if query and len(query) > 1 else None
    # The right factor of the scores is transposed; values are not.
    keys = value[-2] if value and len(value) > 1 else None
    heads = _heads(index, query, attention.query)
    kv_heads = _heads(index, value, attention.value)
    if kv_heads is not None:
        kv_heads //= attention.value.repeats
    packed = _packed(index, *core.query)
    if packed is not None and heads is not None and queries is not None:
        heads, queries = packed
    return heads, kv_heads, queries, keys


def _heads(index: Index, size: tuple[int, ...] | None, path: Path) -> int | None:
    """Return the number of heads from a size in which they have their own dimension, now or earlier on the path."""
    if size is None or len(size) < 2:
        return None
    if len(size) == 4:  # batch, heads, positions, width of a head
        return size[1]
    for position in reversed(path.nodes):
        earlier = index.size(index.nodes[position].inputs[0])
        if index.names[position] in VIEWS and earlier is not None and len(earlier) == 4 \
                and math.prod(earlier) == math.prod(size):
            if set(earlier[-2:]) == set(size[-2:]):
                return earlier[1]
            if earlier[-1] in size[-2:] and earlier[1] in size[-2:]:
                return earlier[2]
    return 1 if len(size) == 2 else None  # one matrix


def _packed(index: Index, value: str, before: int) -> tuple[int, int] | None:
    """Recognise one position's queries that were packed by key heads: return the numbers of heads and positions."""
    for _ in range(4):
        position = index.source(value, before)
        if position < 0 or (index.names[position] not in VIEWS and index.names[position] != "mul"):
            return None
        now, then = index.size(value), index.size(index.nodes[position].inputs[0])
        if now and then and len(now) == len(then) == 4 and now[0] == then[0] and now[3] == then[3] \
                and then[2] == 1 and now[1] != then[1] and now[1] * now[2] == then[1]:
            return then[1], 1
        value, before = index.nodes[position].inputs[0], position
    return None


def is_cross(index: Index, attention: Attention) -> bool:
    """Whether queries and keys come from different sequences."""
    queries, keys = attention.query.sources, attention.key.sources
    if attention.key.caches and not attention.key.projections:
        return True
    if not attention.key.projections and not keys:
        # The keys were projected earlier and come from outside: they belong to an encoder.
        return bool(attention.query.projections)
    if not attention.query.projections and not attention.key.projections:
        query, key = index.size(attention.core.query[0]), index.size(attention.core.value[0])
        return bool(query and key and query[-2:-1] != key[-2:-1])
    for _ in range(4):
        if queries & keys:
            return False
        queries, keys = queries | _behind(index, queries), keys | _behind(index, keys)
    return not queries & keys


def _behind(index: Index, values: frozenset[str]) -> frozenset[str]:
    """Go one step further back: through norms, products and additions of weights, but not through other sums."""
    entries = index.once(_norm_inputs)
    found = set()
    for value in values:
        if value in entries:
            found.add(index.root(entries[value]))
            continue
        position = index.source(value)
        if position < 0:
            continue
        linear, name, inputs = index.linear(position), index.names[position], index.nodes[position].inputs
        if linear is not None:
            found.add(index.root(linear[0], position))
        elif name in PARTS or name in SAME or (name in ("add", "mul", "roll", "constant_pad_nd", "index") and (
                len(inputs) == 1 or index.is_weight(inputs[1]))):
            found.add(index.root(inputs[0], position))
    return frozenset(found)


def _norm_inputs(index: Index) -> dict[str, str]:
    """Map the result of each norm to its input."""
    return {match.values["result"]: match.values["input"] for match in index.once(find_norms)
            if match.values.get("result")}

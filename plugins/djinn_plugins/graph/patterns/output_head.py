"""Heads: the last product of a model, and the choice of a token or a class from its result."""

from __future__ import annotations

import attrs

from djinn_plugins.graph.kinds import PatternMatch
from djinn_plugins.graph.patterns.embedding import find_embeddings
from djinn_plugins.graph.patterns.index import Index
from djinn_plugins.graph.patterns.moe import find_routings
from djinn_plugins.graph.patterns.operators import CHOICES, DROPOUTS, FACTORIES, PARTS, SAME

_MAX_NODES = 400
_FOLLOWING = CHOICES | SAME | PARTS | DROPOUTS
_BENDING = frozenset({"tanh"})
_CHOOSING = frozenset({"argmax", "multinomial", "topk", "max"})
_LOSSES = ("loss", "softmax", "logsumexp")


@attrs.frozen
class OutputHead:
    """The last product of a model, by position, with the nodes that follow it."""

    product: int
    following: tuple[int, ...]
    vocabulary: bool
    """Whether it scores the rows of a table that is looked up in the same graph."""
    features: int


def find_last_products(index: Index) -> list[OutputHead]:
    """Find every product with a weight whose result no other layer reads."""
    tables = {match.metadata["vocabulary"] for match in index.once(find_embeddings)}
    routers = {routing.router for routing in index.once(find_routings)}
    found = []
    for position in range(len(index.nodes)):
        if position in routers:
            continue
        linear = index.linear(position)
        size = index.size(index.result(position) or "") if linear is not None else None
        if linear is None or not size or index.is_gradient(position):
            continue
        following = _following(index, position, linear)
        if following is not None:
            found.append(OutputHead(position, tuple(following), size[-1] in tables, size[-1]))
    return found


def _following(index: Index, product: int, linear: tuple[str, str]) -> list[int] | None:
    """List the nodes after a product, if they only choose or compute a loss; ``None`` if a layer reads it."""
    weight, given = index.weight_root(linear[1]), index.root(linear[0], product)
    reached = {product}
    pending = [product]
    while pending:
        here = pending.pop()
        for reader in sorted(index.uses(here)):
            if reader in reached:
                continue
            verdict = _verdict(index, reader, here, reached, weight, given)
            if verdict is None or len(reached) > _MAX_NODES:
                return None
            if verdict == "stop":
                continue
            reached.add(reader)
            if verdict == "through":
                pending.append(reader)
    return sorted(reached - {product})


def _verdict(index: Index, reader: int, here: int, reached: set[int], weight: str, given: str) -> str | None:
    """Classify a node: go ``through`` it, ``end`` with it, ``stop`` before it; ``None`` if a layer begins."""
    name, node = index.names[reader], index.nodes[reader]
    if "backward" in name or name in FACTORIES:
        return "stop"
    linear = index.linear(reader)
    if linear is not None or name in ("mm", "bmm", "matmul"):
        return "stop" if _is_own_backward(index, reader, weight, given) else None
    if name in _BENDING:
        # Scores may be capped by a scaled activation; an unscaled activation belongs to a layer.
        return "through" if _is_scaled(index, here) else None
    if name not in _FOLLOWING:
        return None
    if node.writes and index.source(node.writes[0], reader) not in reached:
        return None  # a cache, or another part's sum
    if name in _CHOOSING:
        return "end"
    spec = index.spec(index.result(reader) or "")
    if spec is not None and not spec.dtype.is_floating_point:
        return "end"
    if name in ("add", "sub", "mul", "div", "cat", "stack", "where") and not any(word in name for word in _LOSSES):
        for value in node.inputs:
            made = index.source(value, reader)
            if made >= 0 and made not in reached and _is_layer(index, value, made, reached):
                return None
    return "through"


def _is_own_backward(index: Index, reader: int, weight: str, given: str) -> bool:
    return any(index.weight_root(value) == weight or index.root(value, reader) in (weight, given)
               for value in index.nodes[reader].inputs)


def _is_scaled(index: Index, here: int) -> bool:
    return index.names[here] in ("div", "mul") and len(index.nodes[here].inputs) == 1


def _is_layer(index: Index, value: str, made: int, reached: set[int]) -> bool:
    """Whether a value is the result of another layer, as large as the scores: then nothing is being chosen yet."""
    product = min(reached)
    spec, scores = index.spec(index.root(value)), index.spec(index.result(product) or "")
    if spec is None or scores is None or not spec.dtype.is_floating_point or spec.numel < scores.numel:
        return False
    if made < product:
        return not index.is_weight(value)
    source = index.source(*index.upstream(value, through=_SCALED))
    return source >= 0 and index.linear(source) is not None and not index.is_gradient(source)


_SCALED = SAME | PARTS | frozenset({"mul", "div"})


def find_heads(index: Index) -> list[PatternMatch]:
    """Find the heads of language models and classifiers, with the choice of a token if there is one."""
    claimed: set[int] = set()
    return [_match(index, head, claimed) for head in index.once(find_last_products)]


def _match(index: Index, head: OutputHead, claimed: set[int]) -> PatternMatch:
    positions = {*index.wrapped(head.product), *head.following} - claimed
    claimed |= positions
    roles = {head.product: "projection"}
    sampling = next((index.names[p] for p in head.following if index.names[p] in _CHOOSING), "")
    roles |= {p: "choice" for p in head.following if index.names[p] in _CHOOSING}
    has_loss = any("loss" in index.names[p] for p in head.following)
    linear = index.linear(head.product)
    assert linear is not None
    return index.match(
        "head", positions, roles=roles, confidence=1.0 if head.vocabulary else 0.8,
        values={"input": linear[0], "weight": linear[1], "logits": index.result(head.product) or ""},
        metadata={"kind": "language_model" if head.vocabulary else "classifier", "features": head.features,
                  "sampling": sampling, "has_loss": has_loss})

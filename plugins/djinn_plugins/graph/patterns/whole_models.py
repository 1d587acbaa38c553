"""Whole models: a language model from its tokens to its scores, a vision encoder starting with its pixels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import attrs

from djinn_plugins.graph.kinds import PatternMatch
from djinn_plugins.graph.patterns.attention import find_attentions
from djinn_plugins.graph.patterns.caches import find_caches
from djinn_plugins.graph.patterns.convolution import find_convolutions
from djinn_plugins.graph.patterns.embedding import find_embeddings
from djinn_plugins.graph.patterns.index import Index
from djinn_plugins.graph.patterns.mlp import find_mlps
from djinn_plugins.graph.patterns.norm import find_norms
from djinn_plugins.graph.patterns.operators import CONVOLUTIONS, LOOKUPS, PRODUCTS
from djinn_plugins.graph.patterns.output_head import OutputHead, find_last_products

_IMAGE_DIMENSIONS = (4, 5)
_IMAGE_CHANNELS = (1, 2, 3, 4)
_FUSIONS = frozenset({"masked_scatter", "index_put", "_index_put_impl", "scatter", "where"})


@attrs.frozen
class Parts:
    """The nodes of each part of a model, by identifier."""

    attention: dict[str, PatternMatch]
    mlp: dict[str, PatternMatch]
    cache: dict[str, PatternMatch]
    norm: dict[str, PatternMatch]


def _parts(index: Index) -> Parts:
    return Parts(*({identifier: match for match in index.once(search) for identifier in match.nodes}
                   for search in (find_attentions, find_mlps, find_caches, find_norms)))


def find_llms(index: Index) -> list[PatternMatch]:
    """Find every run of a generating language model: from the tokens, or an encoder's input, to the scores.

    Several steps in one graph are several matches, and no node is in two of them.
    """
    claimed: set[int] = set()
    found = []
    for head in index.once(find_last_products):
        if not head.vocabulary:
            continue
        nodes = _feeding(index, head.product, claimed) | set(head.following)
        match = _llm(index, head, nodes - claimed)
        if match is not None:
            claimed |= nodes
            found.append(match)
    return found


def _feeding(index: Index, start: int, claimed: set[int]) -> set[int]:
    """List all dependencies of a node, without the choice of its tokens and without earlier steps."""
    reached, pending = {start}, [start]
    while pending:
        here = pending.pop()
        inputs = index.nodes[here].inputs
        if index.names[here] in LOOKUPS:
            inputs = inputs[:1]
        for value in inputs:
            position = index.source(value, here)
            if position >= 0 and position not in reached and position not in claimed:
                reached.add(position)
                pending.append(position)
    return reached


def _llm(index: Index, head: OutputHead, nodes: set[int]) -> PatternMatch | None:
    parts = index.once(_parts)
    ids = {index.nodes[position].id for position in nodes}
    attentions = _within(parts.attention, ids)
    caches = _within(parts.cache, ids)
    if not any(match.metadata["is_causal"] for match in attentions) and not caches:
        return None
    decoding = [match for match in attentions if match.metadata["is_causal"] or match.metadata["is_cross"]]
    has_encoder = any(match.metadata["is_cross"] for match in attentions)
    lookups = [position for position in nodes if index.names[position] in LOOKUPS]
    tokens = next((index.nodes[p].inputs[1] for p in sorted(lookups)), "")
    linear = index.linear(head.product)
    queries = [match.metadata["query_length"] for match in decoding if match.metadata["query_length"]]
    return index.match(
        "llm", nodes, roles={head.product: "head"}, confidence=0.95,
        values={"tokens": tokens, "logits": index.result(head.product) or "", "weight": linear[1] if linear else ""},
        metadata={
            "architecture": "encoder_decoder" if has_encoder else "decoder",
            "layers": sum(not match.metadata["is_cross"] for match in decoding),
            "attention": len(attentions), "mlp": len(_within(parts.mlp, ids)), "norm": len(_within(parts.norm, ids)),
            "kv_cache": len(caches), "cache_form": caches[0].metadata["form"] if caches else "",
            "vocabulary": head.features, "query_length": min(queries) if queries else None})


def _within(of: dict[str, PatternMatch], ids: set[str]) -> Sequence[PatternMatch]:
    """List the matches that contain one of the given nodes."""
    found = {id(match): match for identifier, match in of.items() if identifier in ids}
    return list(found.values())


def find_vision_encoders(index: Index) -> list[PatternMatch]:
    """Find the processing of pixels, until it meets text or reaches a head."""
    heads = {head.product for head in index.once(find_last_products)}
    claimed: set[int] = set()
    found = []
    for match in index.once(find_convolutions):
        position = next(p for p in _positions(index, match) if index.names[p] in CONVOLUTIONS)
        if position in claimed or not _reads_pixels(index, position):
            continue
        nodes = _becoming(index, position, heads, claimed)
        made = _vision_encoder(index, position, nodes)
        if made is not None:
            claimed |= nodes
            found.append(made)
    return found


def _positions(index: Index, match: PatternMatch) -> list[int]:
    places = index.once(_places)
    return [places[identifier] for identifier in match.nodes]


def _places(index: Index) -> dict[str, int]:
    return {node.id: position for position, node in enumerate(index.nodes)}


def _reads_pixels(index: Index, convolution: int) -> bool:
    value = index.nodes[convolution].inputs[0]
    size = index.size(value)
    if size is None or len(size) not in _IMAGE_DIMENSIONS or size[1] not in _IMAGE_CHANNELS:
        return False
    return _is_given(index, value)


def _is_given(index: Index, value: str) -> bool:
    """Whether a value is from outside, possibly scaled, shifted, cropped or padded."""
    for _ in range(12):
        position = index.producer(value)
        if position < 0:
            return True
        inputs = index.nodes[position].inputs
        if not inputs or index.names[position] in PRODUCTS or index.names[position] in CONVOLUTIONS:
            return not inputs
        value = inputs[0]
    return False


def _becoming(index: Index, start: int, heads: set[int], claimed: set[int]) -> set[int]:
    """List the nodes that depend on pixels, up to heads, text, or the backward pass."""
    reached, pending = {start}, [start]
    attentions = index.once(_parts).attention
    textual = index.once(_textual)
    while pending:
        for reader in index.uses(pending.pop()):
            if reader in reached or reader in claimed or reader in heads or "backward" in index.names[reader]:
                continue
            if _meets_another(index, reader, reached, textual, attentions):
                continue
            reached.add(reader)
            pending.append(reader)
    return reached


def _textual(index: Index) -> set[int]:
    """List the nodes that depend on large word tables: results of a vocabulary lookup are not pictures."""
    found: set[int] = set()
    for match in index.once(find_embeddings):
        if match.metadata["lookups"] and _is_of_tokens(index, match):
            found.update(_positions(index, match))
    pending = list(found)
    while pending:
        for reader in index.uses(pending.pop()):
            if reader not in found:
                found.add(reader)
                pending.append(reader)
    return found


def _is_of_tokens(index: Index, match: PatternMatch) -> bool:
    """Whether outside values look up a table with as many rows as a vocabulary, and not in counting order."""
    size = index.size(match.values["indices"])
    root = index.source(*index.upstream(match.values["indices"]))
    if root >= 0 and index.names[root] == "arange":
        return False
    rows = match.metadata["vocabulary"]
    # Positions of patches are looked up in order: there are as many rows as indices.
    return size is not None and rows != size[-1]


def _meets_another(
    index: Index, reader: int, reached: set[int], textual: set[int], attentions: dict[str, PatternMatch]
) -> bool:
    """Whether a node combines pixels with another kind of data."""
    if reader in textual:
        return True
    name, inputs = index.names[reader], index.nodes[reader].inputs
    if name in _FUSIONS and inputs and index.source(inputs[0], reader) not in reached:
        others = [value for value in inputs if (s := index.source(value, reader)) >= 0 and s not in reached]
        return any((spec := index.spec(value)) is not None and spec.dtype.is_floating_point and spec.numel > 1
                   for value in others)
    match = attentions.get(index.nodes[reader].id)
    return match is not None and match.metadata["is_cross"]


def _vision_encoder(index: Index, start: int, nodes: set[int]) -> PatternMatch | None:
    parts = index.once(_parts)
    ids = {index.nodes[position].id for position in nodes}
    attentions = _within(parts.attention, ids)
    names = Counter(index.names[position] for position in nodes)
    convolutions = sum(count for name, count in names.items() if name in CONVOLUTIONS)
    if not attentions and convolutions < 2:  # a single filter encodes nothing
        return None
    size = index.size(index.nodes[start].inputs[0])
    return index.match(
        "vision_encoder", nodes, roles={start: "stem"}, confidence=0.95,
        values={"pixels": index.root(index.nodes[start].inputs[0], start), "features": index.result(max(nodes)) or ""},
        metadata={"architecture": "transformer" if attentions else "convolutional", "attention": len(attentions),
                  "convolutions": convolutions, "mlp": len(_within(parts.mlp, ids)),
                  "norm": len(_within(parts.norm, ids)), "pixels": list(size) if size else None})

"""Convolution blocks: a convolution followed by its norm and activation."""

from __future__ import annotations

from djinn_plugins.graph.kinds import PatternMatch
from djinn_plugins.graph.patterns.index import Index
from djinn_plugins.graph.patterns.norm import find_norms
from djinn_plugins.graph.patterns.operators import ACTIVATIONS, CONVOLUTIONS, SAME

_POOLS = frozenset({"max_pool1d", "max_pool2d", "max_pool3d", "max_pool2d_with_indices", "avg_pool1d", "avg_pool2d",
                    "avg_pool3d", "adaptive_avg_pool2d", "_adaptive_avg_pool2d", "adaptive_max_pool2d"})
_CHANNELS_FIRST = 1


def find_convolutions(index: Index) -> list[PatternMatch]:
    """Find every convolution, with the operations that form a block with it."""
    norms = {identifier: match for match in index.once(find_norms) for identifier in match.nodes}
    claimed: set[int] = set()
    return [_block(index, position, norms, claimed) for position, name in enumerate(index.names)
            if name in CONVOLUTIONS and len(index.nodes[position].inputs) > 1]


def _block(index: Index, position: int, norms: dict[str, PatternMatch], claimed: set[int]) -> PatternMatch:
    ids = {index.nodes[position].id: position}
    roles = {position: "convolution"}
    here, norm, activation = position, "", ""
    for _ in range(8):
        following = next((reader for reader in index.uses(here) if reader not in claimed
                          and index.names[reader] not in ("detach", "alias")
                          and _continues(index, reader, here, norms, bool(norm), bool(activation))), -1)
        if following < 0:
            break
        match = norms.get(index.nodes[following].id)
        if match is not None and not norm:
            norm = match.metadata["kind"]
            members = set(match.nodes)
            # A decomposed norm ends further down.
            inside = [p for p in range(following, following + 4 * len(members) + 1)
                      if p < len(index.nodes) and index.nodes[p].id in members]
            ids |= {index.nodes[p].id: p for p in inside}
            here = inside[-1]
            roles[here] = "norm"
            continue
        if index.names[following] in ACTIVATIONS:
            activation = index.names[following]
            roles[following] = "activation"
        ids[index.nodes[following].id] = following
        here = following
    while here != position and here not in roles and index.names[here] in SAME:
        del ids[index.nodes[here].id]  # a view at the end belongs to its reader
        here = max(ids.values())
    claimed.update(ids.values())
    return _match(index, position, ids.values(), roles, norm, activation)


def _continues(
    index: Index, reader: int, here: int, norms: dict[str, PatternMatch], has_norm: bool, is_bent: bool
) -> bool:
    """Whether a node continues the block that has reached ``here``."""
    if is_bent:
        return False
    if index.nodes[reader].id in norms:
        return not has_norm
    name = index.names[reader]
    return name in ACTIVATIONS or (name in SAME and index.nodes[reader].inputs[0] == index.result(here))


def _match(
    index: Index, position: int, positions: object, roles: dict[int, str], norm: str, activation: str
) -> PatternMatch:
    x, weight = index.nodes[position].inputs[:2]
    kernel, channels = index.size(weight), index.size(x)
    name = index.names[position]
    groups = index.argument(position, 8 if name == "convolution" else 6, "groups", 1)
    transposed = "transpose" in name or (name == "convolution" and bool(index.argument(position, 6, default=False)))
    metadata = {
        "norm": norm, "activation": activation, "is_transposed": transposed,
        "kernel": list(kernel[2:]) if kernel else None,
        "in_channels": channels[1] if channels and len(channels) > _CHANNELS_FIRST else None,
        "out_channels": kernel[0] if kernel and not transposed else None,
        "is_depthwise": isinstance(groups, int) and groups > 1 and bool(kernel) and kernel is not None
        and kernel[1] == 1,
        "dimensions": len(kernel) - 2 if kernel else None,
    }
    return index.match("conv_block", positions, roles=roles,  # type: ignore[arg-type]  # positions of the block
                       values={"input": x, "weight": weight, "result": index.result(position) or ""},
                       metadata=metadata)

"""The values that a run of a graph returns, if it is not one call of a model and none are named."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from djinn_plugins.graph.graph import Graph, GraphNode, node_of
from djinn_plugins.graph.returned import Returned
from djinn_plugins.schedule.inputs import tensors_of
from djinn_plugins.schedule.schedule import CachingPolicy, ExecutionSchedule

if TYPE_CHECKING:
    from djinn.session.session import Session

__all__ = ("held_results", "last_results")


def held_results(session: Session, graph: Graph) -> Returned | None:
    """Find the values of a graph that the program holds, as far as no other one that it holds is computed from them.

    Results of factories do not count, and neither does what only autograd holds.

    Returns:
        A tuple of them, in program order; ``None`` if there are none.
    """
    nodes = graph.nodes()
    made = {value: spec for node in nodes if node.inputs
            for value, spec in zip(node.outputs, node.specs, strict=False) if spec is not None}
    tensors = tensors_of(session)
    # Who has a variable for one of them holds it, too.
    held = {value for position in range(len(tensors)) if _is_held(tensors, position)
            for value in [f"v{tensors[position]._value.slot.number}"]
            if made.get(value) is tensors[position]._value.spec}
    needed: list[GraphNode] = []
    wanted = set(held)
    for node in reversed(nodes):
        if not wanted.isdisjoint(node.outputs):
            needed.append(node)
            wanted.update(node.inputs)
    ends = {value: spec for value, spec in made.items() if value in held.difference(_read(needed))}
    return Returned.listing(ends) if ends else None


def last_results(graph: Graph, schedule: ExecutionSchedule) -> list[str]:
    """List the values that outlive a graph: of nodes none of whose results is read, and those that the schedule keeps.

    An unread result of a node does not count if another result of the node is read. The copies that autograd saves do
    not count either.
    """
    nodes = [node_of(graph, identifier) for identifier in schedule.order]
    read = _read(nodes)
    nodes = [node for node in nodes if node.operation != "aten::detach" or not read.isdisjoint(node.outputs)]
    read = _read(nodes)
    return [value for node in nodes for value, spec in zip(node.outputs, node.specs, strict=False)
            if spec is not None and (read.isdisjoint(node.outputs) or (
                value in read and schedule.caching.get(value) is CachingPolicy.PERSIST))]


def _read(nodes: Sequence[GraphNode]) -> set[str]:
    """List the values that are read. A node that writes a value does not count: the last written value is a result."""
    return {value for node in nodes for value in node.inputs if value not in node.writes}


def _is_held(tensors: list[Any], position: int) -> bool:
    """Whether anything in Python but the list holds a tensor. Where that cannot be known, it is taken to be so."""
    alone = _alone()
    return alone is None or _holders(tensors, position) > alone


def _holders(tensors: list[Any], position: int) -> int:
    """Count Python's references to a tensor, but for the one that PyTorch itself may hold."""
    with torch._C.DisableTorchFunctionSubclass():
        is_shared: bool = tensors[position]._use_count() > 1
    return sys.getrefcount(tensors[position]) - is_shared


@cache
def _alone() -> int | None:
    """Return what `_holders` counts for a tensor that only the list holds; ``None`` if autograd makes a difference."""
    with torch.enable_grad(), torch.inference_mode(mode=False):
        first = torch.ones(1, requires_grad=True) * 1
        saves = first * first
    tensors = [torch.ones(1), first]
    del first
    counts = {_holders(tensors, position) for position in range(len(tensors))}
    del saves
    return counts.pop() if len(counts) == 1 else None

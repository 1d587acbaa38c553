"""The analyzer: three tiers, each of which can be disabled."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from time import perf_counter
from typing import Any

from djinn_plugins.graph.analyzer.meaning import Meaning, mean
from djinn_plugins.graph.analyzer.operation import Operations
from djinn_plugins.graph.analyzer.profile import profile_of
from djinn_plugins.graph.analyzer.runtime import add_runtime, is_watched
from djinn_plugins.graph.analyzer.stages import by_structure
from djinn_plugins.graph.analyzer.structure import add_structure
from djinn_plugins.graph.analyzer.survey import Survey, survey
from djinn_plugins.graph.graph import Graph
from djinn_plugins.graph.kinds import Annotations, PatternMatch
from djinn_plugins.graph.metadata import Tier


class CoreAnalyzer:
    """Annotates nodes and values in tiers: a later tier adds to the results of an earlier one, or corrects them.

    Args:
        tiers: The tiers to use. Without the structure tier, pattern matches are ignored.

    Concurrency:
        Any thread; no state is kept between graphs.
    """

    name = "core"

    def __init__(self, tiers: Collection[Tier] = tuple(Tier)) -> None:
        self.tiers = frozenset(tiers)

    def annotate(self, graph: Graph, matches: Sequence[PatternMatch]) -> Annotations:
        """Annotate the nodes and values of a graph."""
        if not graph.nodes():
            return Annotations()
        began = perf_counter()
        seconds: dict[Tier, float] = {}
        found, meaning = survey(graph), None
        fields: list[dict[str, Any]] = [{} for _ in found.nodes]
        if Tier.OPERATION in self.tiers:
            operations = Operations(found)
            fields = [dict(operations.fields(position)) for position in range(len(fields))]
            seconds[Tier.OPERATION] = perf_counter() - began
        used = [match for match in matches if _is_in(found, match)] if Tier.STRUCTURE in self.tiers else []
        if Tier.STRUCTURE in self.tiers:
            began = perf_counter()
            meaning = _plain(found, used)
            add_structure(fields, found, used, meaning)
            seconds[Tier.STRUCTURE] = perf_counter() - began
        if Tier.RUNTIME in self.tiers and is_watched(found):
            began = perf_counter()
            meaning = add_runtime(fields, found, used, _plain(found, used) if meaning is None else meaning)
            seconds[Tier.RUNTIME] = perf_counter() - began
        return Annotations(
            {node.id: known for node, known in zip(found.nodes, fields, strict=True)},
            {} if meaning is None else {value: residency for value, (residency, _) in meaning.values.items()},
            profile_of(found, used, fields, meaning), seconds)


def _is_in(found: Survey, match: PatternMatch) -> bool:
    """Whether a match belongs to this graph."""
    return bool(match.nodes) and all(node in found.positions for node in match.nodes)


def _plain(found: Survey, matches: Sequence[PatternMatch]) -> Meaning:
    return mean(found, matches, by_structure(found, matches), {}, {})

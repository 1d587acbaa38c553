"""The analysis that the structure and runtime tiers share; the runtime tier has more information."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import attrs

from djinn_plugins.graph.analyzer.modality import modalities
from djinn_plugins.graph.analyzer.phases import Phases, phases_of
from djinn_plugins.graph.analyzer.residency import Residency, cache_values, residencies
from djinn_plugins.graph.analyzer.stages import Division
from djinn_plugins.graph.analyzer.survey import Survey
from djinn_plugins.graph.kinds import PatternMatch
from djinn_plugins.graph.metadata import DataResidency

UNKNOWN: Residency = (DataResidency.UNKNOWN, 0.0)


@attrs.frozen(eq=False)
class Meaning:
    """The meaning of a graph's nodes and values, by position."""

    division: Division
    bits: Sequence[int]
    """Modalities of each node."""
    phases: Phases
    values: Mapping[str, Residency]
    caches: Mapping[str, float]
    """Storages of caches."""

    def residency(self, found: Survey, position: int) -> Residency:
        """Return the residency of a node's first result, or of the value that it writes."""
        node = found.nodes[position]
        value = node.outputs[0] if node.outputs else node.writes[0] if node.writes else ""
        return self.values.get(value, UNKNOWN)


def mean(
    found: Survey,
    matches: Sequence[PatternMatch],
    division: Division,
    bits: Mapping[str, int],
    told: Mapping[str, Residency],
    decoding: Collection[int] = (),
) -> Meaning:
    """Derive the meaning of a graph.

    Args:
        found: The graph.
        matches: Pattern matches in it.
        division: Its stages and steps.
        bits: Modalities of outside values that are known from other sources.
        told: Residencies of storages that are known from other sources.
        decoding: Nodes that make pictures from features, if they process pictures.
    """
    caches = {base: sure for base, sure in cache_values(found, matches).items() if base not in told}
    crossing = {found.positions[node] for match in matches
                if match.pattern == "attention" and match.metadata.get("is_cross") for node in match.nodes}
    carried, meets = modalities(found, division.stages, caches, crossing.union(decoding), bits)
    phases = phases_of(found, division, matches, carried, meets)
    values = residencies(found, division.stages, matches, caches, told)
    return Meaning(division, carried, phases, values, caches)

"""What the structure tier and the runtime tier both work out: the one from the graph alone, the other knowing more."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import attrs
from djinn_lib_graph.kinds import PatternMatch
from djinn_lib_graph.metadata import DataResidency

from djinn_analyzer_core.modality import modalities
from djinn_analyzer_core.phases import Phases, phases_of
from djinn_analyzer_core.residency import Residency, cache_values, residencies
from djinn_analyzer_core.stages import Division
from djinn_analyzer_core.survey import Survey

UNKNOWN: Residency = (DataResidency.UNKNOWN, 0.0)


@attrs.frozen(eq=False)
class Meaning:
    """What the nodes and values of a graph are, by position."""

    division: Division
    bits: Sequence[int]
    """Modalities of each node."""
    phases: Phases
    values: Mapping[str, Residency]
    caches: Mapping[str, float]
    """Storages of caches."""

    def residency(self, found: Survey, position: int) -> Residency:
        """Return what the first result of a node is, or what it writes."""
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
    """Work it out.

    Args:
        found: The graph.
        matches: What patterns found in it.
        division: Its stages and steps.
        bits: Modalities of outside values that are known otherwise.
        told: What storages are that are known otherwise.
        decoding: Nodes that make pictures of features, if it is pictures that they work on.
    """
    caches = {base: sure for base, sure in cache_values(found, matches).items() if base not in told}
    crossing = {found.positions[node] for match in matches
                if match.pattern == "attention" and match.metadata.get("is_cross") for node in match.nodes}
    carried, meets = modalities(found, division.stages, caches, crossing.union(decoding), bits)
    phases = phases_of(found, division, matches, carried, meets)
    values = residencies(found, division.stages, matches, caches, told)
    return Meaning(division, carried, phases, values, caches)

"""The second tier: conclusions from patterns and from the flow of values through the graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from djinn.ir.phase import ExecutionPhase
from djinn_plugins.graph.analyzer.meaning import Meaning
from djinn_plugins.graph.analyzer.modality import KINDS, modality_of
from djinn_plugins.graph.analyzer.stages import TrainingStage
from djinn_plugins.graph.analyzer.survey import Survey
from djinn_plugins.graph.kinds import PatternMatch
from djinn_plugins.graph.metadata import DataLineage, Evidence, Tier

WHOLES = frozenset({"llm", "vision_encoder"})
"""Patterns that contain other patterns."""
WAITED_FOR = 100
"""Priority of work that a client waits for."""
PRIORITIES: Mapping[ExecutionPhase, int] = MappingProxyType({
    ExecutionPhase.LLM_DECODE: 40,
    ExecutionPhase.LLM_PREFILL: 30,
    ExecutionPhase.MULTIMODAL_FUSION: 20,
    ExecutionPhase.VISION_ENCODING: 20,
    ExecutionPhase.VISION_DECODING: 20,
    ExecutionPhase.FORWARD: 20,
    ExecutionPhase.TRAINING_FORWARD: 10,
    ExecutionPhase.BACKWARD: 10,
    ExecutionPhase.OPTIMIZER_STEP: 0,
})
"""Users read along while a model generates, and wait for its first token; single training steps are not watched."""

_known_evidence: dict[tuple[Tier, float], Evidence] = {}


def evidence(tier: Tier, confidence: float) -> Evidence:
    """Return the shared evidence object of a tier with this confidence."""
    return _known_evidence.setdefault((tier, confidence), Evidence(tier, confidence))


def add_structure(
    fields: Sequence[dict[str, Any]], found: Survey, matches: Sequence[PatternMatch], meaning: Meaning
) -> None:
    """Add structural conclusions to the fields of each node, by position."""
    holders, layers = _holders(found, matches), _layers(found, matches, meaning)
    first_use = _first_uses(found)
    shared: dict[tuple[Any, ...], dict[str, Evidence]] = {}
    for position, known in enumerate(fields):
        holder, layer = holders.get(position), layers.get(position)
        residency = add_meaning(known, found, meaning, position)
        known["data_lineage"] = _lineage(found, position)
        colocated = _colocated(found, position, first_use, meaning, holder)
        if colocated is not None:
            known["must_colocate"] = colocated
        if holder is not None:
            role = holder.roles.get(found.nodes[position].id)
            known["semantic_role"] = f"{holder.pattern}.{role}" if role else holder.pattern
            known["workload_hints"] = holder.hints
        if layer is not None:
            known["layer_depth"] = layer
        modality = modality_of(meaning.bits[position])[1]
        key = (meaning.phases.nodes[position][1], residency, modality, None if holder is None else holder.confidence,
               layer is None, colocated is None)
        if key not in shared:
            shared[key] = _evidence(*key)
        known["evidence"] = shared[key]


def add_meaning(known: dict[str, Any], found: Survey, meaning: Meaning, position: int) -> float:
    """Record a node's phase, its modality and its result's kind; return the confidence of the latter."""
    phase = meaning.phases.nodes[position][0]
    residency, sure = meaning.residency(found, position)
    known["execution_phase"] = phase
    known["data_residency"] = residency
    known["modality"] = modality_of(meaning.bits[position])[0]
    known["priority"] = PRIORITIES[phase] + (WAITED_FOR if known.get("requires_sync") else 0)
    return sure


def _evidence(
    phase: float, residency: float, modality: float, role: float | None, has_no_layer: bool, is_free: bool
) -> dict[str, Evidence]:
    certain = evidence(Tier.STRUCTURE, 1.0)
    made = {
        "execution_phase": evidence(Tier.STRUCTURE, phase),
        "data_residency": evidence(Tier.STRUCTURE, residency),
        "modality": evidence(Tier.STRUCTURE, modality),
        "priority": evidence(Tier.STRUCTURE, phase),
        "data_lineage": certain,
    }
    if role is not None:
        made["semantic_role"] = made["workload_hints"] = evidence(Tier.STRUCTURE, role)
    if not has_no_layer:
        made["layer_depth"] = evidence(Tier.STRUCTURE, 0.7)
    if not is_free:
        made["must_colocate"] = certain
    return made


def _holders(found: Survey, matches: Sequence[PatternMatch]) -> dict[int, PatternMatch]:
    """For each node: the smallest structure that contains it; among equal ones, the one that names its role."""
    held: dict[int, PatternMatch] = {}

    def size_of(match: PatternMatch, node: str) -> tuple[int, bool]:
        return len(match.nodes), node not in match.roles

    for match in matches:
        if match.pattern in WHOLES:
            continue
        for node in match.nodes:
            position = found.positions[node]
            if position not in held or size_of(match, node) < size_of(held[position], node):
                held[position] = match
    return held


def _layers(found: Survey, matches: Sequence[PatternMatch], meaning: Meaning) -> dict[int, int]:
    """Count layers by their self-attention. A norm belongs to the next layer; the last norm belongs to none."""
    ordered = sorted((found.positions[match.nodes[0]], place) for place, match in enumerate(matches)
                     if match.pattern in ("attention", "kv_cache", "mlp", "moe", "norm"))
    layers: dict[int, int] = {}
    waiting: list[PatternMatch] = []
    run: tuple[int, object, int] | None = None
    layer = -1
    for position, place in ordered:
        match = matches[place]
        if meaning.division.stages[position] is not TrainingStage.FORWARD:
            continue
        if match.pattern in ("norm", "kv_cache"):
            waiting.append(match)
            continue
        if match.pattern == "attention" and not match.metadata.get("is_cross"):
            told = match.metadata
            now = (meaning.division.steps[position], told.get("is_causal"), meaning.bits[position] & KINDS)
            layer = layer + 1 if now == run else 0
            run = now
            layer = told["layer"] if isinstance(told.get("layer"), int) and told["layer"] >= 0 else layer
        if layer >= 0:
            for held in (*waiting, match):
                layers.update((found.positions[node], layer) for node in held.nodes)
        waiting.clear()
    return layers


def _first_uses(found: Survey) -> dict[str, int]:
    """For each storage: the first node that makes or uses it."""
    first: dict[str, int] = {}
    for position, touched in enumerate(zip(found.reads, found.makes, strict=True)):
        for bases in touched:
            for base in bases:
                first.setdefault(base, position)
    return first


def _colocated(
    found: Survey, position: int, first_use: Mapping[str, int], meaning: Meaning, holder: PatternMatch | None
) -> str | None:
    """Return the node that a view, a write, or a node of a pattern with the hint ``colocate`` has to be colocated with.

    The hint names a value of the match, such as the cache that grows; otherwise the match's first node is meant.
    """
    node = found.nodes[position]
    wanted = holder.hints.get("colocate") if holder is not None else None
    if holder is not None and wanted:
        touched = holder.values.get(wanted) if isinstance(wanted, str) else None
        if touched is None:
            return holder.nodes[0] if found.positions[holder.nodes[0]] < position else None
    else:
        touched = node.writes[0] if node.writes else node.outputs[0] if found.is_view[position] else None
    if touched is None:
        return None
    first = first_use.get(found.base(touched), position)
    return found.nodes[first].id if first < position else None


def _lineage(found: Survey, position: int) -> DataLineage:
    node = found.nodes[position]
    sources, producers = [], []
    for value in node.inputs:
        producer = found.producer.get(value)
        if producer is None:
            sources.append(value)
        else:
            producers.append(found.nodes[producer].id)
    last = -1
    for value in node.outputs:
        readers = found.readers.get(value)
        if readers and readers[-1] > last:
            last = readers[-1]
    return DataLineage(tuple(dict.fromkeys(sources)), tuple(dict.fromkeys(producers)),
                       found.nodes[last].id if last >= 0 else "")

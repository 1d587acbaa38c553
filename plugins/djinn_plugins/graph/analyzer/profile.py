"""A summary of a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from djinn.ir.phase import ExecutionPhase
from djinn_plugins.graph.analyzer.meaning import Meaning
from djinn_plugins.graph.analyzer.modality import AUDIO, KINDS, TEXT, VISION
from djinn_plugins.graph.analyzer.operation import size_bytes
from djinn_plugins.graph.analyzer.survey import Survey
from djinn_plugins.graph.kinds import PatternMatch
from djinn_plugins.graph.metadata import WorkloadProfile

_LANGUAGE = (ExecutionPhase.LLM_PREFILL, ExecutionPhase.LLM_DECODE)
_TRAINING = (ExecutionPhase.TRAINING_FORWARD, ExecutionPhase.BACKWARD, ExecutionPhase.OPTIMIZER_STEP)


def profile_of(
    found: Survey, matches: Sequence[PatternMatch], fields: Sequence[Mapping[str, Any]], meaning: Meaning | None
) -> WorkloadProfile:
    """Summarize a graph.

    Args:
        found: The graph.
        matches: Pattern matches in it.
        fields: Fields of each node, by position.
        meaning: The meaning of the whole; ``None`` if only operations were analyzed.
    """
    flops = sum(known.get("flops", 0) for known in fields)
    moved = sum(known.get("bytes_read", 0) + known.get("bytes_written", 0) for known in fields)
    told: dict[str, Any] = {}
    if meaning is not None:
        told = {
            "workload": _workload(matches, meaning),
            "phases": _counts(phase for phase, _ in meaning.phases.nodes),
            "residency_bytes": _residency_bytes(found, meaning),
            "steps": tuple(phase for phase, _ in meaning.phases.steps.values()),
            "confidence": _mean([sure for _, sure in meaning.phases.nodes]),
        }
    return WorkloadProfile(
        patterns=_counts(match.pattern for match in matches), nodes=len(fields), flops=flops, bytes_moved=moved,
        compute_intensity=flops / moved if moved else 0.0, **told)


def _counts(names: Any) -> dict[str, int]:
    return {str(name): count for name, count in sorted(Counter(names).items())}


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 3) if values else 0.0


def _workload(matches: Sequence[PatternMatch], meaning: Meaning) -> str:
    """Return the kind of work, preferring special kinds."""
    phases = {phase for phase, _ in meaning.phases.nodes}
    kinds = 0
    for bits in meaning.bits:
        kinds |= bits & KINDS
    attention = [match.metadata for match in matches if match.pattern == "attention"]
    patterns = {match.pattern for match in matches}
    if not phases.isdisjoint(_TRAINING):
        return "training"
    if kinds & AUDIO:
        return "speech"
    if kinds & TEXT and kinds & VISION:
        return "multimodal"
    if any(told.get("is_cross") for told in attention) and kinds & TEXT:
        return "encoder_decoder"
    if not phases.isdisjoint(_LANGUAGE) or (kinds == TEXT and any(told.get("is_causal") for told in attention)):
        return "llm"
    if kinds & VISION:
        return "vision"
    if "recurrent" in patterns:
        return "recurrent"
    return "text_encoder" if kinds & TEXT and attention else "unknown"


def _residency_bytes(found: Survey, meaning: Meaning) -> dict[str, int]:
    """Sum the bytes of each kind; views of one storage count once."""
    largest: dict[str, int] = {}
    kinds: dict[str, str] = {}
    storages = found.graph.storages
    for value, (residency, _) in meaning.values.items():
        base = storages.get(value, value)
        if base == value or base not in kinds:
            kinds[base] = residency.value
            largest[base] = size_bytes(found.specs.get(value))
        elif base not in meaning.values:
            # The whole storage was never seen, so the largest view represents it.
            largest[base] = max(largest[base], size_bytes(found.specs.get(value)))
    totals: dict[str, int] = {}
    for base, kind in kinds.items():
        totals[kind] = totals.get(kind, 0) + largest[base]
    return dict(sorted(totals.items()))

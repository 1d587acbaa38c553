"""Prefill, decode, encoding, fusion, training: the phase of each step and of each node in it."""

from __future__ import annotations

import bisect
import enum
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import attrs

from djinn.ir.phase import ExecutionPhase
from djinn_plugins.graph.analyzer.modality import DECODED, KINDS, VISION
from djinn_plugins.graph.analyzer.stages import Division, TrainingStage
from djinn_plugins.graph.analyzer.survey import Survey
from djinn_plugins.graph.kinds import PatternMatch

Phase: TypeAlias = tuple[ExecutionPhase, float]
"""A phase, and its confidence."""

FEW = 8
"""Maximum positions of one decode step: speculative drafts are checked together."""


class _Kind(enum.IntFlag):
    """The kind of model part that an attention belongs to."""

    NONE = 0
    WHOLE = 1
    """Attends to the whole sequence at once: an encoder."""
    CACHED = 2
    """Belongs to a decoder with a cache."""


@attrs.frozen(eq=False)
class _Attention:
    """A matched attention, by positions."""

    nodes: Sequence[int]
    step: int
    is_cross: bool
    query_length: int
    key_length: int
    caches: list[PatternMatch] = attrs.field(factory=list)

    @property
    def is_cached(self) -> bool:
        """Whether it is self-attention over more than the new positions, or stores them for later."""
        return not self.is_cross and (bool(self.caches) or self.key_length > self.query_length)


@attrs.frozen(eq=False)
class Phases:
    """The phase of each node, by position, and of each step."""

    nodes: Sequence[Phase]
    steps: Mapping[int, Phase]
    """By step number, in order; steps without a forward pass have none."""
    lengths: Mapping[int, tuple[int, int]]
    """For each step of a language model: the number of new positions, and of positions that it attends to."""


def phases_of(
    found: Survey,
    division: Division,
    matches: Sequence[PatternMatch],
    bits: Sequence[int],
    meets: Sequence[bool],
) -> Phases:
    """Determine the phase of each node."""
    attentions = _attentions(found, division, matches)
    language = _language(found, attentions)
    language |= _carried(found, division, matches, {attention.step for attention in attentions})
    firsts: dict[int, int] = {}
    kinds = _kinds(found, division, attentions, language, firsts)
    training = _training(found, division)
    nodes: list[Phase] = []
    for position, (stage, step) in enumerate(zip(division.stages, division.steps, strict=True)):
        if stage is not TrainingStage.FORWARD:
            is_backward = stage is TrainingStage.BACKWARD
            nodes.append((ExecutionPhase.BACKWARD if is_backward else ExecutionPhase.OPTIMIZER_STEP, 0.9))
        elif step in training:
            nodes.append((ExecutionPhase.TRAINING_FORWARD, 0.9))
        elif kinds[position] is _Kind.CACHED or (step in language and _is_mixed(bits[position])):
            # A decoder that attends to pictures while it generates is still a decoder.
            fuses = meets[position] and position < firsts.get(step, 0)
            nodes.append((ExecutionPhase.MULTIMODAL_FUSION, 0.8) if fuses else language[step])
        else:
            nodes.append(_by_modality(bits[position]))
    return Phases(nodes, _steps(division, nodes, language, training), _lengths(attentions))


def _attentions(found: Survey, division: Division, matches: Sequence[PatternMatch]) -> list[_Attention]:
    """List forward attentions in program order, each with the caches that grow for it."""
    made = []
    for match in matches:
        nodes = sorted(found.positions[node] for node in match.nodes)
        if match.pattern == "attention" and division.stages[nodes[-1]] is TrainingStage.FORWARD:
            told = match.metadata
            made.append(_Attention(nodes, division.steps[nodes[-1]], bool(told.get("is_cross")),
                                   _length(told.get("query_length")), _length(told.get("key_length"))))
    made.sort(key=lambda attention: attention.nodes[-1])
    ends = [attention.nodes[-1] for attention in made]
    for match in matches:
        if match.pattern == "kv_cache":
            grown = found.positions[match.nodes[0]]
            place = bisect.bisect_left(ends, grown)
            if place < len(made) and made[place].step == division.steps[grown]:
                made[place].caches.append(match)
    return made


def _length(told: object) -> int:
    """Return a number that a pattern has reported; 0 if it is none."""
    return told if isinstance(told, int) else 0


def _language(found: Survey, attentions: Sequence[_Attention]) -> dict[int, Phase]:
    """Determine for each step with a cache whether it is prefill or decode."""
    by_step: dict[int, list[_Attention]] = {}
    for attention in attentions:
        if attention.is_cached:
            by_step.setdefault(attention.step, []).append(attention)
    written: set[str] = set()
    said: dict[int, Phase] = {}
    for step in sorted(by_step):
        said[step] = _read_or_write(found, by_step[step], written)
        for attention in by_step[step]:
            for cache in attention.caches:
                written.update(found.base(cache.values[role]) for role in ("cache", "result") if role in cache.values)
    return said


def _lengths(attentions: Sequence[_Attention]) -> dict[int, tuple[int, int]]:
    made: dict[int, tuple[int, int]] = {}
    for attention in attentions:
        if attention.is_cached:
            query, key = made.get(attention.step, (0, 0))
            made[attention.step] = max(query, attention.query_length), max(key, attention.key_length)
    return made


def _read_or_write(found: Survey, attentions: Sequence[_Attention], written: set[str]) -> Phase:
    query = max(attention.query_length for attention in attentions)
    past = max(attention.key_length - attention.query_length for attention in attentions)
    caches = [cache for attention in attentions for cache in attention.caches]
    if not caches:
        # There are earlier keys, but in no known form of cache.
        return (ExecutionPhase.LLM_DECODE if query <= min(FEW, max(past, 1)) else ExecutionPhase.LLM_PREFILL, 0.7)
    is_static = any(cache.metadata.get("form") == "static" for cache in caches)
    if not is_static:
        begins = all(_is_empty(found, cache) for cache in caches) or past <= 0
        sure = 0.95
    else:
        stores = {found.base(cache.values["cache"]) for cache in caches if "cache" in cache.values}
        is_fresh = not stores & written
        begins = is_fresh and ((past <= 0 and query > 1) or all(store in found.producer for store in stores))
        if is_fresh and not begins:
            # The fill level of an outside cache is unknown; a step with more than one position counts as prefill.
            return (ExecutionPhase.LLM_DECODE if query == 1 else ExecutionPhase.LLM_PREFILL, 0.7)
        sure = 0.9
    if begins or query > FEW or query > max(past, 1):
        return ExecutionPhase.LLM_PREFILL, sure
    return ExecutionPhase.LLM_DECODE, sure


def _is_empty(found: Survey, cache: PatternMatch) -> bool:
    """Whether a growing cache was empty before."""
    before = found.specs.get(cache.values.get("cache", ""))
    return before is None or before.numel == 0


def _carried(
    found: Survey, division: Division, matches: Sequence[PatternMatch], attending: set[int]
) -> dict[int, Phase]:
    """Determine the phases of language models without attention, which carry a state from step to step."""
    able = {division.steps[found.positions[match.nodes[-1]]] for match in matches
            if match.pattern == "head" and match.metadata.get("kind") == "language_model"} - attending
    brought: dict[int, int] = {}
    said: dict[int, Phase] = {}
    for position, step in enumerate(division.steps if able else ()):
        if step not in able or division.stages[position] is not TrainingStage.FORWARD:
            continue
        if found.facts[position].name == "embedding" and len(found.operands[position]) > 1:
            index = found.operands[position][1]
            brought[step] = max(brought.get(step, 0), index.size[-1] if index is not None and index.size else 0)
        for base, spec in zip(found.reads[position], found.operands[position], strict=True):
            source = division.steps[found.producer[base]] if base in found.producer else step
            if source < step and source in able and spec is not None and spec.dtype.is_floating_point:
                said.setdefault(source, (ExecutionPhase.LLM_PREFILL, 0.7))
                is_long = brought.get(step, 0) > FEW
                said[step] = ExecutionPhase.LLM_PREFILL if is_long else ExecutionPhase.LLM_DECODE, 0.7
    return said


def _kinds(
    found: Survey, division: Division, attentions: Sequence[_Attention], language: Mapping[int, Phase],
    firsts: dict[int, int],
) -> list[_Kind]:
    """Determine for each node whether it belongs to a decoder with a cache, or to another part.

    ``firsts`` receives, by step, the position of the decoder's first attention.
    """
    wholes: dict[int, int] = {}
    own = [_Kind.NONE] * len(found.nodes)
    for attention in attentions:
        # An encoder precedes its decoder's first attention, so cross-attention belongs to the decoder.
        is_part = attention.is_cached or (attention.is_cross and attention.step in language)
        for position in attention.nodes:
            own[position] = _Kind.CACHED if is_part else _Kind.WHOLE
        if is_part:
            firsts.setdefault(attention.step, attention.nodes[0])
        else:
            wholes[attention.step] = wholes.get(attention.step, 0) + 1
    behind = _behind(found, division, own, wholes, language)
    ahead = _ahead(found, division, own, wholes, language)
    made = []
    for position, step in enumerate(division.steps):
        if step not in language:
            made.append(_Kind.WHOLE)
        elif step not in wholes:
            made.append(_Kind.CACHED)
        elif own[position]:
            made.append(own[position])
        elif behind[position] is _Kind.WHOLE:
            made.append(_Kind.CACHED if position > firsts[step] else _Kind.WHOLE)
        elif not behind[position] and _Kind.WHOLE in ahead[position] and _Kind.CACHED not in ahead[position]:
            made.append(_Kind.WHOLE)
        elif not behind[position] and ahead[position] == _Kind.WHOLE | _Kind.CACHED:
            made.append(_Kind.WHOLE if position < firsts[step] else _Kind.CACHED)
        else:
            made.append(_Kind.CACHED)
    return made


def _behind(
    found: Survey, division: Division, own: Sequence[_Kind], mixed: Mapping[int, int], language: Mapping[int, Phase]
) -> list[_Kind]:
    """For each node of a step of both kinds: the kinds of the last attentions that it depends on."""
    made = [_Kind.NONE] * len(own)
    for position, node in enumerate(found.nodes):
        step = division.steps[position]
        if step not in mixed or step not in language:
            continue
        union = own[position]
        if not union:
            for value in node.inputs:
                source = found.producer.get(value, len(own))
                if source < position and division.steps[source] == step:
                    union |= made[source]
        made[position] = union
    return made


def _ahead(
    found: Survey, division: Division, own: Sequence[_Kind], mixed: Mapping[int, int], language: Mapping[int, Phase]
) -> list[_Kind]:
    """For each node of a step of both kinds: the kinds of the next attentions that depend on it."""
    made = [_Kind.NONE] * len(own)
    for position in range(len(own) - 1, -1, -1):
        step = division.steps[position]
        if step not in mixed or step not in language:
            continue
        union = own[position]
        if not union:
            for value in found.nodes[position].outputs:
                for reader in found.readers.get(value, ()):
                    if reader > position and division.steps[reader] == step:
                        union |= made[reader]
        made[position] = union
    return made


def _training(found: Survey, division: Division) -> set[int]:
    """Return the steps whose forward values a backward pass reads."""
    steps: set[int] = set()
    for position, node in enumerate(found.nodes):
        if division.stages[position] is TrainingStage.BACKWARD:
            for value in node.inputs:
                source = found.producer.get(value)
                if source is not None and division.stages[source] is TrainingStage.FORWARD:
                    steps.add(division.steps[source])
    return steps


def _is_mixed(bits: int) -> bool:
    kinds = bits & KINDS
    return kinds & (kinds - 1) != 0


def _by_modality(bits: int) -> Phase:
    kinds = bits & KINDS
    if kinds == VISION:
        return (ExecutionPhase.VISION_DECODING if bits & DECODED else ExecutionPhase.VISION_ENCODING, 0.8)
    if _is_mixed(bits):
        return ExecutionPhase.MULTIMODAL_FUSION, 0.8
    return ExecutionPhase.FORWARD, 0.8


def _steps(
    division: Division, nodes: Sequence[Phase], language: Mapping[int, Phase], training: set[int]
) -> dict[int, Phase]:
    """Determine the phase of each step: that of its decoder, or else that of most of its nodes."""
    counts: dict[int, dict[Phase, int]] = {}
    for position, step in enumerate(division.steps):
        if division.stages[position] is TrainingStage.FORWARD:
            known = counts.setdefault(step, {})
            # Nodes between calls count only if there are no others.
            weight = len(nodes) if not division.inside or division.inside[position] else 1
            known[nodes[position]] = known.get(nodes[position], 0) + weight
    made: dict[int, Phase] = {}
    for step, known in sorted(counts.items()):
        if step in training:
            made[step] = ExecutionPhase.TRAINING_FORWARD, 0.9
        else:
            made[step] = language.get(step) or max(known, key=lambda phase: (known[phase], phase[0]))
    return made

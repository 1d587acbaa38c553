"""Weights, activations, caches, gradients, optimizer state: the kind of each value, derived from its use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from djinn.ir.spec import TensorSpec
from djinn_plugins.graph.analyzer.calls import names_of_operands
from djinn_plugins.graph.analyzer.stages import TrainingStage
from djinn_plugins.graph.analyzer.survey import Survey
from djinn_plugins.graph.kinds import PatternMatch
from djinn_plugins.graph.metadata import DataResidency

Residency: TypeAlias = tuple[DataResidency, float]
"""The kind of a value, and its confidence."""

_PARAMETERS = frozenset(
    "weight bias running_mean running_var mat2 params w_ih w_hh b_ih b_hh weight0 weight1 weight2 weight3 qkv_weight "
    "qkv_bias proj_weight proj_bias weight_buf".split()
)
"""Names of parameters in schemas."""
_PARAMETERS_OF = frozenset({("addmm", "self"), ("_weight_norm", "v"), ("_weight_norm", "g"),
                            ("_weight_norm_interface", "v"), ("_weight_norm_interface", "g")})
_UNKNOWN = DataResidency.UNKNOWN, 0.0


def cache_values(found: Survey, matches: Sequence[PatternMatch]) -> dict[str, float]:
    """Return the storages of caches, with their confidences."""
    caches: dict[str, float] = {}
    for match in matches:
        if match.pattern == "kv_cache":
            for role in ("cache", "result"):
                if role in match.values:
                    caches[found.base(match.values[role])] = match.confidence
    for match in matches:
        if match.pattern == "attention":
            for role in ("key", "value"):
                value = match.values.get(role)
                spec = None if value is None else found.specs.get(value)
                # Keys that come from outside the graph were made for an earlier attention.
                if value is not None and found.is_outside(value) and spec is not None and len(spec.size) >= 3:
                    caches.setdefault(found.base(value), 0.8)
    return caches


def residencies(
    found: Survey,
    stages: Sequence[TrainingStage],
    matches: Sequence[PatternMatch],
    caches: Mapping[str, float],
    told: Mapping[str, Residency],
) -> dict[str, Residency]:
    """Determine the kind of each value.

    Args:
        found: The graph.
        stages: Stages of the nodes.
        matches: Pattern matches.
        caches: Storages of caches, with their confidences.
        told: Kinds of storages that are known from other sources.
    """
    in_attention = {found.positions[node] for match in matches if match.pattern == "attention" for node in match.nodes}
    said: dict[str, Residency] = {base: (DataResidency.STATEFUL_KV_CACHE, sure) for base, sure in caches.items()}
    said.update(told)
    for value in found.outside:
        base = found.base(value)
        if base not in told and base not in caches:
            said[base] = max(said.get(base, _UNKNOWN), _outside(found, value, stages, in_attention),
                             key=lambda residency: residency[1])
    made: dict[str, Residency] = {value: said[found.base(value)] for value in found.outside}
    activation = DataResidency.EPHEMERAL_ACTIVATION, 0.9
    for position, node in enumerate(found.nodes):
        for value, base in zip(node.outputs, found.makes[position], strict=True):
            if base in said:
                made[value] = said[base]
            elif stages[position] is TrainingStage.FORWARD:
                made[value] = said[base] = activation
            elif stages[position] is TrainingStage.BACKWARD:
                made[value] = said[base] = DataResidency.GRADIENT, 0.8
            else:
                kept = _is_kept_state(found, value, stages)
                made[value] = said[base] = (DataResidency.OPTIMIZER_STATE, 0.8) if kept else activation
    return made


def _is_kept_state(found: Survey, value: str, stages: Sequence[TrainingStage]) -> bool:
    """Whether the optimizer will write a value that it makes again: moments, momentum."""
    made = found.nodes[found.producer[value]]
    if found.facts[found.producer[value]].name not in ("zeros_like", "full_like", "clone", "zeros"):
        return False
    return len(made.outputs) == 1 and any(
        value in found.nodes[reader].writes for reader in found.readers.get(value, ())
        if stages[reader] is TrainingStage.OPTIMIZER)


def _outside(found: Survey, value: str, stages: Sequence[TrainingStage], in_attention: set[int]) -> Residency:
    """Determine the kind of an outside value from its use."""
    spec = found.specs.get(value)
    if spec is None or not (spec.dtype.is_floating_point or spec.dtype.is_complex):
        return (DataResidency.INPUT, 0.7)
    best: Residency = (DataResidency.INPUT, 0.4)
    is_written = False
    pending, seen = [value], {value}
    while pending:
        name = pending.pop()
        for reader in found.readers.get(name, ()):
            node = found.nodes[reader]
            if found.is_view[reader] or _is_alone(found, reader):
                pending += [output for output in node.outputs if output not in seen]
                seen.update(node.outputs)
                continue
            is_written |= stages[reader] is TrainingStage.OPTIMIZER and name in node.writes
            guess = _by_use(found, reader, name, spec, stages[reader], in_attention)
            best = max(best, guess, key=lambda residency: residency[1])
    if is_written and best[0] is not DataResidency.PERSISTENT_WEIGHT:
        return (DataResidency.OPTIMIZER_STATE, 0.7)
    return best


def _is_alone(found: Survey, reader: int) -> bool:
    """Whether a node only changes the shape or scale of the single value that it reads."""
    node = found.nodes[reader]
    return found.facts[reader].is_elementwise and len(node.inputs) == 1 and not node.writes


def _by_use(
    found: Survey, reader: int, name: str, spec: TensorSpec, stage: TrainingStage, in_attention: set[int]
) -> Residency:
    node, facts = found.nodes[reader], found.facts[reader]
    if stage is TrainingStage.OPTIMIZER:
        return _UNKNOWN
    argument = names_of_operands(facts, node).get(node.inputs.index(name), "")
    if argument in _PARAMETERS or (facts.name, argument) in _PARAMETERS_OF or (
            (facts.name, argument) == ("matmul", "other") and len(spec.size) == 2):
        return (DataResidency.PERSISTENT_WEIGHT, 0.95)
    made = next((spec for spec in found.results[reader] if spec is not None), None)
    if made is None:
        return _UNKNOWN
    if not spec.size or len(spec.size) == 1 or reader not in in_attention:
        if (facts.is_elementwise and len(node.inputs) > 1 and (
                spec.numel < made.numel or len(spec.size) < len(made.size))):
            # The same scale or shift applies to every position or element of a batch.
            return (DataResidency.PERSISTENT_WEIGHT, 0.7)
        if facts.is_indexed and argument in ("self", "weight"):
            return (DataResidency.PERSISTENT_WEIGHT, 0.6)
        if facts.name in ("repeat", "clone") and made.numel > spec.numel:
            return (DataResidency.PERSISTENT_WEIGHT, 0.5)
        if not spec.size or (facts.name in ("add", "mul", "cat") and (
                spec.size[0] == 1 or len(spec.size) < len(made.size))):
            return (DataResidency.PERSISTENT_WEIGHT, 0.5)
    return _UNKNOWN

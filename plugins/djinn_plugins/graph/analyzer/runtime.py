"""The third tier: conclusions from observations while the graph was recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs

from djinn.ir.phase import ExecutionPhase
from djinn_plugins.graph.analyzer.meaning import Meaning, mean
from djinn_plugins.graph.analyzer.modality import AUDIO, INDEX, VISION, modality_of
from djinn_plugins.graph.analyzer.residency import Residency
from djinn_plugins.graph.analyzer.stages import STAGES, Division
from djinn_plugins.graph.analyzer.structure import add_meaning, evidence
from djinn_plugins.graph.analyzer.survey import Survey
from djinn_plugins.graph.kinds import PatternMatch
from djinn_plugins.graph.metadata import DataResidency, Evidence, Tier

_KINDS: Mapping[str, DataResidency] = MappingProxyType({
    "parameter": DataResidency.PERSISTENT_WEIGHT,
    "buffer": DataResidency.PERSISTENT_WEIGHT,
    "optimizer_state": DataResidency.OPTIMIZER_STATE,
    "gradient": DataResidency.GRADIENT,
    "input": DataResidency.INPUT,
})
_INPUTS: Mapping[str, int] = MappingProxyType({
    "input_ids": INDEX, "decoder_input_ids": INDEX, "pixel_values": VISION, "pixel_values_videos": VISION,
    "images": VISION, "image": VISION, "input_features": AUDIO, "input_values": AUDIO, "audio": AUDIO, "speech": AUDIO,
    "waveform": AUDIO,
})
"""Names of inputs in models."""
_MAKERS = frozenset({"decode_head", "decoder", "mask_decoder", "pixel_decoder", "segmentation_head"})
"""Names of model parts that make pictures, boxes or masks from features."""


def is_watched(found: Survey) -> bool:
    """Whether the graph contains observations of its recording."""
    return bool(found.graph.values) or any(
        node.origin.stage or node.origin.module_type or node.origin.call_index >= 0 for node in found.nodes)


def add_runtime(
    fields: Sequence[dict[str, Any]], found: Survey, matches: Sequence[PatternMatch], before: Meaning
) -> Meaning:
    """Add observations to the fields of each node, by position, and return the updated meaning of the whole."""
    division = _division(found, before.division)
    told = _told(found, before)
    meaning = _grown(mean(found, matches, division, _named(found), told, _makers(found)))
    paths: dict[str, int | None] = {}
    shared: dict[tuple[Any, ...], dict[str, Evidence]] = {}
    for position, known in enumerate(fields):
        node = found.nodes[position]
        origin, earlier = node.origin, known.get("evidence", {})
        was = known.get("execution_phase"), known.get("data_residency"), known.get("modality")
        add_meaning(known, found, meaning, position)
        if origin.module_type:
            known["module_path"], known["model_module"] = origin.module_path, origin.module_type
        if origin.call_index >= 0:
            known["call_index"] = origin.call_index
        if origin.module_path not in paths:
            paths[origin.module_path] = layer_of(origin.module_path)
        layer = paths[origin.module_path]
        if layer is not None:
            known["layer_depth"] = layer
        value = next(iter((*node.outputs, *node.writes)), "")
        now = known["execution_phase"], known["data_residency"], known["modality"]
        phase_sure = meaning.phases.nodes[position][1] if origin.stage or was[0] != now[0] else -1.0
        value_sure = meaning.residency(found, position)[1] if found.base(value) in told or was[1] != now[1] else -1.0
        modality_sure = modality_of(meaning.bits[position])[1] if was[2] != now[2] else -1.0
        key = (id(earlier), phase_sure, value_sure, modality_sure, bool(origin.module_type), origin.call_index >= 0,
               layer is not None)
        if key not in shared:
            shared[key] = _evidence(earlier, *key[1:])
        known["evidence"] = shared[key]
    return meaning


def _evidence(
    earlier: Mapping[str, Evidence], phase: float, value: float, modality: float, has_module: bool, has_call: bool,
    has_layer: bool,
) -> dict[str, Evidence]:
    made, certain = dict(earlier), evidence(Tier.RUNTIME, 1.0)
    if phase >= 0:
        made["execution_phase"] = made["priority"] = evidence(Tier.RUNTIME, phase)
    if value >= 0:
        made["data_residency"] = evidence(Tier.RUNTIME, value)
    if modality >= 0:
        made["modality"] = evidence(Tier.RUNTIME, modality)
    if has_module:
        made["module_path"] = made["model_module"] = certain
    if has_call:
        made["call_index"] = certain
    if has_layer:
        made["layer_depth"] = certain
    return made


def layer_of(path: str) -> int | None:
    """Return the number of the repeated layer that a module is in: the first number of its path."""
    return next((int(part) for part in path.split(".") if part.isdecimal()), None)


def _division(found: Survey, before: Division) -> Division:
    """Divide by the observations; where there are none, keep the structural division."""
    stages = [
        # Work on gradients between backward and step, such as clipping, is only recognized by its structure.
        stage if node.origin.stage == "forward" and not node.origin.module_type else
        STAGES.get(node.origin.stage, stage) for node, stage in zip(found.nodes, before.stages, strict=True)]
    if all(node.origin.call_index < 0 for node in found.nodes):
        return Division(stages, before.steps)
    # Nodes before the first call prepare it.
    return Division(stages, [max(node.origin.call_index, 0) for node in found.nodes],
                    [bool(node.origin.module_type) for node in found.nodes])


def _told(found: Survey, before: Meaning) -> dict[str, Residency]:
    """Return the residencies of named storages. A cache remains a cache."""
    told: dict[str, Residency] = {}
    for value, info in found.graph.values.items():
        residency, base = _KINDS.get(info.kind), found.base(value)
        if residency is not None and base not in before.caches and (base not in told or info.kind != "input"):
            told[base] = residency, 1.0
    return told


def _named(found: Survey) -> dict[str, int]:
    """Return the modalities of inputs with known names."""
    named: dict[str, int] = {}
    for value, info in found.graph.values.items():
        name = info.name.rpartition(".")[2]
        if info.kind == "input" and name in _INPUTS:
            named[value] = _INPUTS[name]
        elif info.kind == "buffer":
            named[value] = 0
    return named


def _makers(found: Survey) -> set[int]:
    """Return the nodes that make pictures from features, according to their modules."""
    known: dict[str, bool] = {}
    made: set[int] = set()
    for position, node in enumerate(found.nodes):
        path = node.origin.module_path
        if path not in known:
            known[path] = not _MAKERS.isdisjoint(path.split("."))
        if known[path]:
            made.add(position)
    return made


def _grown(meaning: Meaning) -> Meaning:
    """Raise the confidence for calls whose attention covers the previous call's positions and the new ones."""
    phases, seen = meaning.phases, 0
    sure: dict[int, ExecutionPhase] = {}
    for step, (query, key) in sorted(phases.lengths.items()):
        phase = phases.steps[step][0]
        if phase is ExecutionPhase.LLM_DECODE and seen and key == seen + query:
            sure[step] = phase
        seen = key
    if not sure:
        return meaning
    nodes = [(phase[0], 1.0) if sure.get(step) is phase[0] else phase
             for phase, step in zip(phases.nodes, meaning.division.steps, strict=True)]
    steps = {step: (phase[0], 1.0) if step in sure else phase for step, phase in phases.steps.items()}
    return attrs.evolve(meaning, phases=attrs.evolve(phases, nodes=nodes, steps=steps))

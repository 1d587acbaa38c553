"""Text, pictures, sound: where each enters a graph, and which nodes it reaches."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from djinn.ir.spec import TensorSpec
from djinn_plugins.graph.analyzer.stages import TrainingStage
from djinn_plugins.graph.analyzer.survey import Survey
from djinn_plugins.graph.metadata import Modality

TEXT, VISION, AUDIO, DECODED, INDEX = 1, 2, 4, 8, 16
"""Bits of a value's content: three modalities; features that are being decoded to pictures; an index."""
KINDS = TEXT | VISION | AUDIO

_NAMES = {0: (Modality.UNKNOWN, 0.0), TEXT: (Modality.TEXT, 0.8), VISION: (Modality.VISION, 0.8),
          AUDIO: (Modality.AUDIO, 0.8)}
_ENLARGING = ("upsample", "conv_transpose", "pixel_shuffle", "_upsample")


def modalities(
    found: Survey,
    stages: Sequence[TrainingStage],
    caches: Collection[str],
    decoding: Collection[int],
    known: Mapping[str, int],
) -> tuple[list[int], list[bool]]:
    """Follow the modalities through a graph.

    Args:
        found: The graph.
        stages: Stages of the nodes.
        caches: Storages of caches, which transfer no modality from one step to the next.
        decoding: Nodes where the decoding of features to pictures begins, according to a pattern.
        known: Bits of outside values that are known by name.

    Returns:
        The bits of each node, and whether different modalities meet in it for the first time.
    """
    carried: dict[str, int] = {}
    for value in found.outside:
        carried[found.base(value)] = known.get(value, _outside(found.specs.get(value)))
    bits: list[int] = []
    meets: list[bool] = []
    for position, node in enumerate(found.nodes):
        given = [carried.get(base, 0) for base in found.reads[position] if base not in caches]
        union = 0
        for mask in given:
            union |= mask
        made = union | _source(found, position, union, known)
        kinds = made & KINDS
        if kinds & VISION and (position in decoding or _enlarges(found, position)):
            made |= DECODED
        is_index = _gives_indices(found.results[position])
        made = (INDEX if made else 0) if is_index else made & ~INDEX
        bits.append(made)
        meets.append(not is_index and kinds & (kinds - 1) != 0 and all(mask & KINDS != kinds for mask in given))
        for base in found.makes[position]:
            carried[base] = carried.get(base, 0) | made
        if node.writes and stages[position] is TrainingStage.FORWARD:
            for value in node.writes:
                if not found.is_outside(value):
                    carried[found.base(value)] = carried.get(found.base(value), 0) | made
    return _from_readers(found, bits), meets


def modality_of(bits: int) -> tuple[Modality, float]:
    """Return the modality that these bits say, and the confidence."""
    return _NAMES.get(bits & KINDS, (Modality.MULTIMODAL_FUSION, 0.8))


def _outside(spec: TensorSpec | None) -> int:
    return INDEX if spec is not None and _is_whole_number(spec) and spec.size else 0


def _is_whole_number(spec: TensorSpec) -> bool:
    return not (spec.dtype.is_floating_point or spec.dtype.is_complex)


def _gives_indices(results: Sequence[TensorSpec | None]) -> bool:
    return bool(results) and results[0] is not None and _is_whole_number(results[0])


def _source(found: Survey, position: int, union: int, known: Mapping[str, int]) -> int:
    """Return the modality that enters with a node."""
    node, facts, operands = found.nodes[position], found.facts[position], found.operands[position]
    if len(node.inputs) < 2:
        return 0
    if facts.name in ("embedding", "embedding_bag"):
        table, index = operands[:2]
        if table is None or index is None:
            return 0
        # If there are as many outside indices as rows, they are the model's own list of positions.
        is_list = index.numel == table.size[0] and found.is_outside(node.inputs[1]) and (
            node.inputs[1] not in known)
        return TEXT if union & INDEX and not is_list else 0
    if facts.name.startswith(("conv", "_convolution")) and not facts.is_backward and not union & KINDS:
        weight = operands[1]
        return 0 if weight is None else AUDIO if len(weight.size) == 3 else VISION
    return 0


def _enlarges(found: Survey, position: int) -> bool:
    node, facts = found.nodes[position], found.facts[position]
    if facts.name.startswith(_ENLARGING):
        return True
    return facts.name == "convolution" and len(node.arguments) > 6 and node.arguments[6] is True


def _from_readers(found: Survey, bits: list[int]) -> list[int]:
    """Give values without own modality, such as masks, the modality of their first reader."""
    for position in range(len(bits) - 1, -1, -1):
        if not bits[position] & KINDS:
            for value in found.nodes[position].outputs:
                reader = next(iter(found.readers.get(value, ())), -1)
                if reader > position and bits[reader] & KINDS:
                    bits[position] |= bits[reader]
                    break
    only = {mask & KINDS for mask in bits} - {0}
    if len(only) == 1:
        alone = only.pop()
        return [mask | alone for mask in bits]
    return bits

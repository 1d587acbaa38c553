"""Forward, backward, optimizer: assigns each node to a stage, by the values that it reads and writes."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import attrs

from djinn_plugins.graph.analyzer.survey import Survey
from djinn_plugins.graph.kinds import PatternMatch

_BEGINS = frozenset(
    "addmm batch_norm conv1d conv2d conv3d convolution embedding embedding_bag layer_norm linear native_batch_norm "
    "native_dropout native_group_norm native_layer_norm".split()
)
"""Operators of a forward pass that neither autograd nor an optimizer uses, except on gradients."""
_CONVOLUTIONS = frozenset("conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d".split())


class TrainingStage(enum.IntEnum):
    """A stage of a training step; work without gradients is forward."""

    FORWARD = 0
    BACKWARD = 1
    OPTIMIZER = 2


STAGES = {"forward": TrainingStage.FORWARD, "backward": TrainingStage.BACKWARD, "optimizer": TrainingStage.OPTIMIZER}
"""By the name that an origin uses."""


@attrs.frozen(eq=False)
class Division:
    """The division of a graph into stages and steps, by position."""

    stages: Sequence[TrainingStage]
    steps: Sequence[int]
    """Step number: one call of a model, or a section that looks like one."""
    inside: Sequence[bool] = ()
    """Whether a node belongs to the call itself and not to the work between calls; empty if unknown."""


def by_structure(found: Survey, matches: Sequence[PatternMatch]) -> Division:
    """Divide a graph by its structure alone."""
    stages = _stages(found)
    return Division(stages, _steps(found, stages, matches))


def _is_seed(found: Survey, position: int) -> bool:
    """Whether a backward pass begins here: autograd creates a gradient of one for a scalar loss."""
    spec = next(iter(found.results[position]), None)
    return (found.facts[position].name == "ones_like" and spec is not None and not spec.size
            and spec.dtype.is_floating_point)


def _stages(found: Survey) -> list[TrainingStage]:
    stages = [TrainingStage.FORWARD] * len(found.nodes)
    if not any(facts.is_backward or _is_seed(found, position) for position, facts in enumerate(found.facts)):
        return stages
    grounded = _grounded(found)
    now, derived, state, began = TrainingStage.FORWARD, set[str](), set[str](), 0
    for position, (node, facts) in enumerate(zip(found.nodes, found.facts, strict=True)):
        bases = found.reads[position]
        reads = not (derived.isdisjoint(bases) and state.isdisjoint(bases))
        if facts.is_backward or _is_seed(found, position):
            now = TrainingStage.BACKWARD
        elif now is TrainingStage.BACKWARD and _is_optimizer(found, position, derived, state, reads=reads):
            now, began = TrainingStage.OPTIMIZER, position - _copied(found, position)
            for earlier in range(began, position):
                stages[earlier] = now
                state.update(found.nodes[earlier].outputs)
        elif now and not reads and (facts.name in _BEGINS or (
                now is TrainingStage.OPTIMIZER and not node.writes and not _initialises(found, position))):
            now, derived = TrainingStage.FORWARD, set()
            for earlier in _prepared(found, position, grounded):
                stages[earlier] = now
        if now is TrainingStage.BACKWARD and (facts.is_backward or reads or _is_seed(found, position)):
            derived.update(map(found.base, (*node.outputs, *node.writes)))
        elif now is TrainingStage.OPTIMIZER:
            # A value that no forward pass has read is not a weight; it occurs again in the next step.
            state.update(found.base(value) for value in node.outputs if not found.is_view[position])
            state.update(base for base in map(found.base, node.writes) if found.readers.get(base, (0,))[0] >= began)
        stages[position] = now
    return stages


def _initialises(found: Survey, position: int) -> bool:
    """Whether a node creates optimizer state: zeros in the shape of a weight."""
    node = found.nodes[position]
    return (found.facts[position].name in ("zeros_like", "full_like") and bool(node.inputs)
            and found.is_outside(node.inputs[0]))


def _copied(found: Survey, position: int) -> int:
    """Count the preceding nodes that copy a gradient, as initial momentum."""
    if position < 2 or [found.facts[position - back].name for back in (2, 1)] != ["detach", "clone"]:
        return 0
    return 2 if found.nodes[position - 1].inputs == found.nodes[position - 2].outputs else 0


def _is_optimizer(found: Survey, position: int, derived: set[str], state: set[str], *, reads: bool) -> bool:
    """Whether an optimizer begins here: autograd neither processes lists nor writes outside values."""
    node, name = found.nodes[position], found.facts[position].name
    if name.startswith(("_foreach_", "_fused_")):
        return True
    if node.writes:
        written = found.base(node.writes[0])
        # An update of an outside gradient has no factor; an update of a weight has one.
        return written in state or (written not in derived and found.is_outside(written) and not (
            name == "add" and reads and "alpha" not in node.keywords))
    return _initialises(found, position)


def _grounded(found: Survey) -> list[bool]:
    """Determine which nodes use only outside values, to prepare positions or masks, for example."""
    grounded: list[bool] = []
    for position, node in enumerate(found.nodes):
        facts = found.facts[position]
        plain = not node.writes and facts.name != "embedding" and not facts.name.startswith("_foreach_") and (
            not found.may_cost[position])
        grounded.append(plain and all(
            value not in found.producer or (found.producer[value] < position and grounded[found.producer[value]])
            for value in node.inputs))
    return grounded


def _prepared(found: Survey, start: int, grounded: Sequence[bool]) -> range:
    """Return the range of nodes just before ``start`` that only prepare values for the step that begins here."""
    first = start
    while first > 0 and grounded[first - 1] and all(
            found.readers.get(value, (start,))[0] >= first - 1 for value in found.nodes[first - 1].outputs):
        first -= 1
    return range(first, start)


def _steps(found: Survey, stages: Sequence[TrainingStage], matches: Sequence[PatternMatch]) -> list[int]:
    """Number the steps: a step begins if a forward pass follows another stage, or enters by the same door again.

    A door is a table that is looked up, or the first convolution. A grown cache that grows again also begins a step.
    """
    steps: list[int] = []
    grounded, grown = _grounded(found), _growths(found, matches)
    doors: dict[str, int] = {}
    caches: set[str] = set()
    step, last_work, before = 0, -1, TrainingStage.FORWARD
    for position, stage in enumerate(stages):
        begins = stage is TrainingStage.FORWARD and before is not TrainingStage.FORWARD
        door = _door(found, position) if stage is TrainingStage.FORWARD else None
        begins |= door is not None and last_work > doors.get(door, last_work)
        cache, result = grown.get(position, ("", ""))
        begins |= cache in caches
        if begins and position:
            step += 1
            doors, caches = {}, set()
        steps.append(step)
        if begins and position:
            for earlier in _prepared(found, position, grounded):
                steps[earlier] = step
        if door is not None and (found.facts[position].name == "embedding" or not doors):
            doors.setdefault(door, position)
        if position in grown:
            caches.add(result)
        if found.facts[position].name != "embedding" and not grounded[position] and not found.is_view[position]:
            last_work = position
        before = stage
    return steps


def _door(found: Survey, position: int) -> str | None:
    """Return the outside table or weights by which data enters at this node, or ``None``."""
    node, name = found.nodes[position], found.facts[position].name
    if len(node.inputs) < 2 or (name != "embedding" and name not in _CONVOLUTIONS):
        return None
    table = found.base(node.inputs[0 if name == "embedding" else 1])
    return table if found.is_outside(table) else None


def _growths(found: Survey, matches: Sequence[PatternMatch]) -> dict[int, tuple[str, str]]:
    """For each node that grows or writes a cache: the storage before and after."""
    grown: dict[int, tuple[str, str]] = {}
    for match in matches:
        cache = match.values.get("cache") if match.pattern == "kv_cache" else None
        if cache is not None:
            position = found.positions[match.nodes[-1]]
            grown[position] = found.base(cache), found.base(match.values.get("result", cache))
    return grown

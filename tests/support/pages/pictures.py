"""Annotated graphs of real captures, with meaning that is read off the modules: pictures must not wait for analysis."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any

import torch

import djinn
from djinn.ir.phase import ExecutionPhase
from djinn_plugins.graph.annotated import AnnotatedGraph
from djinn_plugins.graph.graph import Graph, GraphNode, Origin, RecordedGraph
from djinn_plugins.graph.kinds import PatternMatch
from djinn_plugins.graph.metadata import (
    DataResidency,
    Evidence,
    MemoryPattern,
    SemanticMetadata,
    Tier,
    WorkloadProfile,
)

OF_MODULES = {"attn": "attention", "mlp": "mlp", "ln_1": "norm", "ln_2": "norm", "ln_f": "norm", "wte": "embedding",
              "wpe": "embedding", "lm_head": "head"}
OF_KINDS = {"parameter": DataResidency.PERSISTENT_WEIGHT, "buffer": DataResidency.PERSISTENT_WEIGHT,
            "input": DataResidency.INPUT, "gradient": DataResidency.GRADIENT,
            "optimizer_state": DataResidency.OPTIMIZER_STATE}
STAGES = {"backward": ExecutionPhase.BACKWARD, "optimizer": ExecutionPhase.OPTIMIZER_STEP}
VIEWS = ("view", "permute", "transpose", "::t.", "unsqueeze", "expand", "slice", "select", "split")


def gpt2(layers: int = 12, width: int = 768, heads: int = 12) -> Any:
    """A GPT-2 with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=width, n_head=heads, vocab_size=1000, n_positions=128,
                                      bos_token_id=0, eos_token_id=0)).eval()


def captured(model: Any, work: Callable[[Any], object]) -> RecordedGraph:
    with djinn.capture(model.to("remote_accelerator:0")) as block:
        work(model)
    return block.graph


def annotated_by_modules(graph: Graph, steps: tuple[ExecutionPhase, ...] = ()) -> AnnotatedGraph:
    """Annotate a graph; ``steps`` are the phases of the model's calls."""
    values = {value: OF_KINDS.get(info.kind, DataResidency.UNKNOWN) for value, info in graph.values.items()}
    nodes = {node.id: _metadata(node, steps, values) for node in graph.nodes()}
    matches = tuple(_matches(graph))
    return AnnotatedGraph(graph, nodes, values, matches, WorkloadProfile(
        workload="llm", phases=Counter(str(known.execution_phase) for known in nodes.values()),
        patterns=Counter(match.pattern for match in matches), nodes=len(nodes),
        flops=sum(known.flops for known in nodes.values()),
        bytes_moved=sum(known.bytes_read + known.bytes_written for known in nodes.values()),
        residency_bytes={"persistent_weight": 340_000_000, "stateful_kv_cache": 2_000_000,
                         "ephemeral_activation": 60_000_000, "input": 512},
        compute_intensity=3.5, steps=steps, confidence=0.97))


def _metadata(
    node: GraphNode, steps: tuple[ExecutionPhase, ...], values: dict[str, DataResidency]
) -> SemanticMetadata:
    origin = node.origin
    phase = STAGES.get(origin.stage, ExecutionPhase.UNKNOWN)
    if phase is ExecutionPhase.UNKNOWN and 0 <= origin.call_index < len(steps):
        phase = steps[origin.call_index]
    is_view = any(word in node.operation for word in VIEWS)
    result = DataResidency.EPHEMERAL_ACTIVATION
    if "aten::cat" in node.operation and origin.module_type == "GPT2Attention":
        result = DataResidency.STATEFUL_KV_CACHE
    elif origin.stage == "backward":
        result = DataResidency.GRADIENT
    values.update(dict.fromkeys(node.outputs, result))
    size = math.prod(node.shape or ())
    return SemanticMetadata(
        node.operation, tensor_shape=node.shape, dtype=None, module_path=origin.module_path or None,
        model_module=origin.module_type or None, call_index=origin.call_index if origin.call_index >= 0 else None,
        semantic_role="attention.scores" if "attention" in node.operation else None, execution_phase=phase,
        data_residency=result,
        memory_pattern=MemoryPattern.NONE if is_view else MemoryPattern.SEQUENTIAL,
        flops=0 if is_view else size * (1536 if "mm" in node.operation or "linear" in node.operation else 1),
        bytes_read=0 if is_view else 8 * size, bytes_written=0 if is_view else 4 * size,
        workload_hints={"fuse_with": "next"} if "gelu" in node.operation else {},
        evidence={"execution_phase": Evidence(Tier.RUNTIME, 0.9)})


def _matches(graph: Graph) -> list[PatternMatch]:
    """Make a match of each run of operations within a module that is known by its class."""
    made = []

    def around(node: GraphNode) -> tuple[str, str, int, str]:
        parts = node.origin.module_path.split(".")
        last = max((place for place, part in enumerate(parts) if part in OF_MODULES), default=-1)
        return ".".join(parts[: last + 1]), OF_MODULES.get(parts[last], ""), node.origin.call_index, node.origin.stage

    for (_, pattern, _, stage), run in groupby(graph.nodes(), around):
        if pattern and stage == "forward":
            made.append(PatternMatch(pattern, tuple(node.id for node in run), 0.9, {"fused_kernel": True},
                                     metadata={"heads": 12, "is_causal": True} if pattern == "attention" else {}))
    return made


def repeated(graph: Graph, length: int) -> RecordedGraph:
    """Lay copies of a graph one behind the other, each a call of its own, until there are ``length`` nodes."""
    nodes: list[GraphNode] = []
    values: dict[str, Any] = {}
    copy = 0
    while len(nodes) < length:
        for node in graph.nodes()[: length - len(nodes)]:
            origin = node.origin
            nodes.append(GraphNode(
                id=f"n{len(nodes)}", operation=node.operation, inputs=tuple(f"{name}.{copy}" for name in node.inputs),
                outputs=tuple(f"{name}.{copy}" for name in node.outputs), specs=node.specs,
                input_specs=node.input_specs,
                origin=Origin(origin.module_path, origin.module_type, copy, origin.stage)))
        values |= {f"{name}.{copy}": info for name, info in graph.values.items()}
        copy += 1
    return RecordedGraph(tuple(nodes), values=values)


def without_origins(annotated: AnnotatedGraph, changes: Mapping[str, Any] | None = None) -> AnnotatedGraph:
    """Forget modules, calls and patterns: what a graph of nobody's model looks like."""
    import attrs

    nodes = {name: attrs.evolve(known, module_path=None, model_module=None, call_index=None, **(changes or {}))
             for name, known in annotated.nodes.items()}
    graph = RecordedGraph(tuple(attrs.evolve(node, origin=Origin()) for node in annotated.graph.nodes()))
    return attrs.evolve(annotated, graph=graph, nodes=nodes, patterns=())

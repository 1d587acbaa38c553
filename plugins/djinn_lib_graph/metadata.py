"""What a graph means: the vocabulary of annotations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

import attrs

from djinn.ir.phase import ExecutionPhase


class DataResidency(StrEnum):
    """What a value is to the work, and thus how long it stays."""

    UNKNOWN = "unknown"
    EPHEMERAL_ACTIVATION = "ephemeral_activation"
    PERSISTENT_WEIGHT = "persistent_weight"
    STATEFUL_KV_CACHE = "stateful_kv_cache"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer_state"
    INPUT = "input"
    """Came from outside for this piece of work: tokens, pixels, a mask."""


class Modality(StrEnum):
    """What kind of data is worked on."""

    UNKNOWN = "unknown"
    TEXT = "text"
    VISION = "vision"
    AUDIO = "audio"
    MULTIMODAL_FUSION = "fusion"


class MemoryPattern(StrEnum):
    """How an operation goes through memory."""

    SEQUENTIAL = "sequential"
    """Each byte about once, in order."""
    STREAMING = "streaming"
    """Large operands once, too large to be kept near: weights at batch size one."""
    REUSED = "reused"
    """Operands many times: large matrix products, convolutions."""
    RANDOM = "random"
    """By index: embedding, gather, index_put."""
    NONE = "none"
    """No bytes move: a view."""


class Tier(StrEnum):
    """Which part of the analysis decided."""

    OPERATION = "operation"
    """The overload and its arguments alone."""
    STRUCTURE = "structure"
    """Patterns and the way of values through the graph."""
    RUNTIME = "runtime"
    """What happened while the graph was made: modules, calls, growth from call to call."""


@attrs.frozen
class DataLineage:
    """Where a node's result comes from."""

    sources: tuple[str, ...] = ()
    """Values from outside of the graph on which it depends directly."""
    producers: tuple[str, ...] = ()
    """Nodes whose results it reads."""
    last_use: str = ""
    """The last node that reads a result of it; empty if the result outlives the graph."""


@attrs.frozen
class Evidence:
    """Who decided a field, and how sure that is."""

    tier: Tier
    confidence: float = 1.0
    """Between 0 and 1."""


@attrs.frozen
class SemanticMetadata:
    """What is known of one node."""

    operation_type: str
    """Qualified overload, ``namespace::name.overload``."""
    tensor_shape: tuple[int, ...] | None = None
    """Size of the first output."""
    dtype: str | None = None
    """Name of its dtype, for example ``float32``."""
    device_hint: str = "remote_accelerator:0"
    """Where it runs, or had better run."""
    module_path: str | None = None
    """For example ``transformer.h.0.attn``."""
    model_module: str | None = None
    """Class of that module."""
    layer_depth: int | None = None
    """Which of the repeated layers it is in, from 0."""
    call_index: int | None = None
    """In which call of the captured model it was recorded, from 0."""
    semantic_role: str | None = None
    """What it is for, in the words of the pattern that holds it: ``attention.scores``, ``mlp.down_projection``, ..."""
    execution_phase: ExecutionPhase = ExecutionPhase.UNKNOWN
    data_residency: DataResidency = DataResidency.UNKNOWN
    """Of its first result."""
    modality: Modality = Modality.UNKNOWN
    memory_pattern: MemoryPattern = MemoryPattern.SEQUENTIAL
    data_lineage: DataLineage = DataLineage()
    flops: int = 0
    """Floating-point operations; a multiply-add counts as two."""
    bytes_read: int = 0
    bytes_written: int = 0
    compute_intensity: float = 0.0
    """FLOP per byte that is read or written."""
    is_gradient: bool = False
    is_activation: bool = False
    kv_cache_related: bool = False
    requires_sync: bool = False
    """Whether the client waits for it: its result is no tensor, or its shape depends on data."""
    can_fuse: bool = False
    """Whether it may run in one kernel with its neighbours: element by element, or a view."""
    can_recompute: bool = False
    """Whether running it again is cheaper than moving its result, and gives the same."""
    must_colocate: str | None = None
    """Node that has to be on the same device: it shares a storage, or grows the same cache."""
    priority: int = 0
    """The higher, the sooner among what is ready."""
    workload_hints: Mapping[str, Any] = attrs.field(factory=dict)
    """What patterns suggest for the structure that holds the node."""
    evidence: Mapping[str, Evidence] = attrs.field(factory=dict)
    """By field name: who decided it. A field that is not named was decided by the operation alone."""


@attrs.frozen
class WorkloadProfile:
    """The whole at a glance."""

    workload: str = "unknown"
    """``llm``, ``encoder_decoder``, ``vision``, ``speech``, ``multimodal``, ``recurrent``, ``training``, ..."""
    phases: Mapping[str, int] = attrs.field(factory=dict)
    """Number of nodes of each `ExecutionPhase` that occurs."""
    modalities: tuple[Modality, ...] = ()
    patterns: Mapping[str, int] = attrs.field(factory=dict)
    """Number of matches of each pattern that occurs."""
    nodes: int = 0
    flops: int = 0
    bytes_moved: int = 0
    residency_bytes: Mapping[str, int] = attrs.field(factory=dict)
    """Bytes of the values of each `DataResidency`."""
    compute_intensity: float = 0.0
    steps: tuple[ExecutionPhase, ...] = ()
    """Phase of each call of the captured model, in order; one entry if calls are not known."""
    confidence: float = 0.0


class MetadataPlaceholder:
    """Annotations that are computed when somebody first looks, once, whoever looks.

    Concurrency:
        Any thread. While one computes, others wait. A computation that raised is tried again by the next who looks.
    """

    def __init__(self, compute: Callable[[], Any]) -> None:
        self._compute: Callable[[], Any] | None = compute
        self._lock = threading.Lock()
        self._value: Any = None

    @property
    def is_computed(self) -> bool:
        """Whether somebody has looked."""
        return self._compute is None

    def get(self) -> Any:
        """Return the annotations."""
        if self._compute is not None:
            with self._lock:
                if self._compute is not None:
                    self._value = self._compute()
                    self._compute = None
        return self._value

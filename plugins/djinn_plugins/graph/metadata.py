"""The vocabulary of annotations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import attrs

from djinn.ir.phase import ExecutionPhase


class DataResidency(StrEnum):
    """The role of a value in the work, which determines how long it stays."""

    UNKNOWN = "unknown"
    EPHEMERAL_ACTIVATION = "ephemeral_activation"
    PERSISTENT_WEIGHT = "persistent_weight"
    STATEFUL_KV_CACHE = "stateful_kv_cache"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer_state"
    INPUT = "input"
    """Passed from outside for this piece of work: tokens, pixels, a mask."""


class Modality(StrEnum):
    """The kind of content that an operation processes."""

    UNKNOWN = "unknown"
    VISION = "vision"
    TEXT = "text"
    AUDIO = "audio"
    MULTIMODAL_FUSION = "fusion"
    """Content of several kinds: its operands derive from text and from pictures, for example."""


class MemoryPattern(StrEnum):
    """The memory access pattern of an operation."""

    SEQUENTIAL = "sequential"
    """Each byte about once, in order."""
    STREAMING = "streaming"
    """Large operands once, too large to be cached: weights at batch size one."""
    REUSED = "reused"
    """Operands many times: large matrix products, convolutions."""
    RANDOM = "random"
    """By index: embedding, gather, index_put."""
    NONE = "none"
    """No bytes move: a view."""


class Tier(StrEnum):
    """The part of the analysis that made a decision."""

    OPERATION = "operation"
    """The overload and its arguments alone."""
    STRUCTURE = "structure"
    """Patterns, and how values flow through the graph."""
    RUNTIME = "runtime"
    """Events during the recording of the graph: modules, calls, growth from call to call."""


@attrs.frozen
class DataLineage:
    """The origin of a node's result."""

    sources: tuple[str, ...] = ()
    """Values from outside the graph on which it depends directly."""
    producers: tuple[str, ...] = ()
    """Nodes whose results it reads."""
    last_use: str = ""
    """The last node that reads one of its results; empty if the result outlives the graph."""


@attrs.frozen
class Evidence:
    """The origin of a field's value, and its confidence."""

    tier: Tier
    confidence: float = 1.0
    """Between 0 and 1."""


@attrs.frozen
class SemanticMetadata:
    """Annotations of one node."""

    operation_type: str
    """Qualified overload, ``namespace::name.overload``."""
    tensor_shape: tuple[int, ...] | None = None
    """Size of the first output."""
    dtype: str | None = None
    """Name of its dtype, for example ``float32``."""
    device_hint: str = "remote_accelerator:0"
    """Where it runs, or should run."""
    module_path: str | None = None
    """For example ``transformer.h.0.attn``."""
    model_module: str | None = None
    """Class of that module."""
    layer_depth: int | None = None
    """Index of the repeated layer that it belongs to, from 0."""
    call_index: int | None = None
    """In which call of the captured model it was recorded, from 0."""
    semantic_role: str | None = None
    """Its purpose, in the terms of the pattern that contains it: ``attention.scores``, ``mlp.down_projection``, ..."""
    execution_phase: ExecutionPhase = ExecutionPhase.UNKNOWN
    data_residency: DataResidency = DataResidency.UNKNOWN
    """Residency of its first result."""
    modality: Modality = Modality.UNKNOWN
    """The content that its operands derive from. The phase says where modalities meet first."""
    memory_pattern: MemoryPattern = MemoryPattern.SEQUENTIAL
    data_lineage: DataLineage = DataLineage()
    flops: int = 0
    """Floating-point operations; a multiply-add counts as two."""
    bytes_read: int = 0
    bytes_written: int = 0
    requires_sync: bool = False
    """Whether the client waits for it: its result is not a tensor, or its shape depends on data."""
    can_recompute: bool = False
    """Whether running it again is cheaper than moving its result, and gives the same result."""
    must_colocate: str | None = None
    """Node that must be on the same device: it shares a storage, or grows the same cache."""
    priority: int = 0
    """Nodes with higher values run first among those that are ready."""
    workload_hints: Mapping[str, Any] = attrs.field(factory=dict)
    """Hints of patterns for the structure that contains the node."""
    evidence: Mapping[str, Evidence] = attrs.field(factory=dict)
    """By field name: who decided it. Fields not listed were decided by the operation alone."""

    @property
    def compute_intensity(self) -> float:
        """FLOP per byte read or written."""
        moved_bytes = self.bytes_read + self.bytes_written
        return self.flops / moved_bytes if moved_bytes else 0.0

    @property
    def is_gradient(self) -> bool:
        """Whether its first result is a gradient."""
        return self.data_residency is DataResidency.GRADIENT

    @property
    def is_activation(self) -> bool:
        """Whether its first result is an activation of a forward pass."""
        return self.data_residency is DataResidency.EPHEMERAL_ACTIVATION and (
            self.execution_phase not in (ExecutionPhase.BACKWARD, ExecutionPhase.OPTIMIZER_STEP))

    @property
    def kv_cache_related(self) -> bool:
        """Whether its first result is a KV cache."""
        return self.data_residency is DataResidency.STATEFUL_KV_CACHE


class WorkloadType(StrEnum):
    """What a graph is part of."""

    UNKNOWN = "unknown"
    LLM = "llm"
    ENCODER_DECODER = "encoder_decoder"
    TEXT_ENCODER = "text_encoder"
    VISION = "vision"
    SPEECH = "speech"
    MULTIMODAL = "multimodal"
    RECURRENT = "recurrent"
    TRAINING = "training"

    @classmethod
    def _missing_(cls, value: object) -> WorkloadType:  # noqa: ARG003  # as enum calls it
        return cls.UNKNOWN


@attrs.frozen
class WorkloadProfile:
    """A summary of the whole graph."""

    workload: str = "unknown"
    """A `WorkloadType`, or a word of the analyzer's own."""
    phases: Mapping[str, int] = attrs.field(factory=dict)
    """Number of nodes in each `ExecutionPhase` that occurs."""
    patterns: Mapping[str, int] = attrs.field(factory=dict)
    """Number of matches of each pattern that occurs."""
    nodes: int = 0
    flops: int = 0
    bytes_moved: int = 0
    residency_bytes: Mapping[str, int] = attrs.field(factory=dict)
    """Bytes of the values of each `DataResidency`."""
    compute_intensity: float = 0.0
    steps: tuple[ExecutionPhase, ...] = ()
    """Phase of each call of the captured model, in order; one entry if calls are unknown."""
    confidence: float = 0.0

    @property
    def workload_type(self) -> WorkloadType:
        """The workload; ``UNKNOWN`` for a word of the analyzer's own."""
        return WorkloadType(self.workload)


class MetadataPlaceholder:
    """Annotations computed once, on first access.

    Args:
        compute: Computes them. Without it, `get_metadata` is given the function.
        operation: The operation that is annotated.
        inputs: Its inputs.
        kwargs: Its keyword arguments.

    Concurrency:
        Any thread. While one computes, others wait. If a computation raises, the next access tries again.
    """

    def __init__(
        self, compute: Callable[[], Any] | None = None, *, operation: str = "", inputs: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.operation, self.inputs, self.kwargs = operation, tuple(inputs), dict(kwargs or {})
        self._compute: Callable[[], Any] | None = compute or self._least
        self._lock = threading.Lock()
        self._value: Any = None

    @property
    def is_computed(self) -> bool:
        """Whether they have been computed."""
        return self._compute is None

    def get(self) -> Any:
        """Return the annotations."""
        if self._compute is not None:
            with self._lock:
                if self._compute is not None:
                    self._value = self._compute()
                    self._compute = None
        return self._value

    def get_metadata(self, capture_fn: Callable[[str, list[Any], dict[str, Any]], Any] | None = None) -> Any:
        """Return the annotations.

        Args:
            capture_fn: Computes them from the operation, its inputs and its keyword arguments, if they have not been
                computed yet.
        """
        if capture_fn is not None:
            with self._lock:
                if self._compute is not None:
                    self._value = capture_fn(self.operation, list(self.inputs), self.kwargs)
                    self._compute = None
        return self.get()

    def _least(self) -> dict[str, Any]:
        return {"operation": self.operation, "lazy": True}

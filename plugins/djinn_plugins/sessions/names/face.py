"""The names of ``djinn`` that libraries provide, for type checkers; `table`, beside it, loads them one by one."""

from __future__ import annotations

from djinn.kinds import OperationClass
from djinn_plugins.client.later.face import LaterHandler, LaterValue, later
from djinn_plugins.common.tracing.counters import reset_stats, stats
from djinn_plugins.common.tracing.debugging import set_debug_level
from djinn_plugins.common.tracing.metrics import metrics
from djinn_plugins.common.tracing.state import (
    RuntimeState,
    get_initialization_time_ms,
    get_interception_stats,
    get_runtime_state,
)
from djinn_plugins.common.tracing.waits import DjinnWarning
from djinn_plugins.graph.analysis import annotate_graph, build_graph, find_patterns
from djinn_plugins.graph.annotated import AnnotatedGraph
from djinn_plugins.graph.capture import Captured, capture, get_graph, is_capturing
from djinn_plugins.graph.graph import Graph, GraphNode
from djinn_plugins.graph.interception import (
    InterceptionContext,
    disable_interception,
    get_current_context,
    should_intercept,
)
from djinn_plugins.graph.match import PatternMatch
from djinn_plugins.graph.metadata import (
    DataResidency,
    MemoryPattern,
    MetadataPlaceholder,
    Modality,
    SemanticMetadata,
    WorkloadProfile,
    WorkloadType,
)
from djinn_plugins.models.face import models
from djinn_plugins.schedule.calibrate import calibrate, profiles
from djinn_plugins.schedule.execution import ExecutionStrategy, execute
from djinn_plugins.schedule.lazy_tuple import LazyResult, LazyTuple
from djinn_plugins.schedule.liveness import MemoryEstimator
from djinn_plugins.schedule.profiles import Calibration
from djinn_plugins.schedule.report import explain
from djinn_plugins.schedule.schedule import CostEstimate, ExecutionSchedule
from djinn_plugins.schedule.scheduling import Scheduler, SchedulingStrategy, schedule
from djinn_plugins.sessions.asynchronous.face import init_async, materialize_async, run_async, session
from djinn_plugins.sessions.named.face import kept
from djinn_plugins.sessions.names.analyzing import SemanticAnalyzer
from djinn_plugins.sessions.names.building import GraphBuilder, get_global_builder
from djinn_plugins.sessions.names.coordinating import Coordinator, get_coordinator, get_thread_pool
from djinn_plugins.sessions.names.patterns import PatternPlugin, PatternRegistry
from djinn_plugins.sessions.names.subgraphs import (
    CostCalculator,
    FragmentationConfig,
    RemoteSubgraph,
    SmartSubgraphBuilder,
    SubgraphBuilder,
    SubgraphFragment,
)

__all__ = (
    "AnnotatedGraph", "Calibration", "Captured", "Coordinator", "CostCalculator", "CostEstimate", "DataResidency",
    "DjinnWarning", "ExecutionSchedule", "ExecutionStrategy", "FragmentationConfig", "Graph", "GraphBuilder",
    "GraphNode", "InterceptionContext", "LaterHandler", "LaterValue", "LazyResult", "LazyTuple", "MemoryEstimator",
    "MemoryPattern", "MetadataPlaceholder", "Modality", "OperationClass", "PatternMatch", "PatternPlugin",
    "PatternRegistry", "RemoteSubgraph", "RuntimeState", "Scheduler", "SchedulingStrategy", "SemanticAnalyzer",
    "SemanticMetadata", "SmartSubgraphBuilder", "SubgraphBuilder", "SubgraphFragment", "WorkloadProfile",
    "WorkloadType", "annotate_graph", "build_graph", "calibrate", "capture", "disable_interception", "execute",
    "explain", "find_patterns", "get_coordinator", "get_current_context", "get_global_builder", "get_graph",
    "get_initialization_time_ms", "get_interception_stats", "get_runtime_state", "get_thread_pool", "init_async",
    "is_capturing", "kept", "later", "materialize_async", "metrics", "models", "profiles", "reset_stats", "run_async",
    "schedule", "session", "set_debug_level", "should_intercept", "stats",
)

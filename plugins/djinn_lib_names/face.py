"""The names of ``djinn`` that libraries provide, for type checkers; `djinn_lib_names.table` loads them one by one."""

from __future__ import annotations

from djinn_lib_async.face import init_async, materialize_async, run_async, session
from djinn_lib_graph.analysis import annotate_graph, build_graph, find_patterns
from djinn_lib_graph.annotated import AnnotatedGraph
from djinn_lib_graph.capture import Captured, capture, get_graph, is_capturing
from djinn_lib_graph.graph import Graph, GraphNode
from djinn_lib_graph.interception import (
    InterceptionContext,
    disable_interception,
    get_current_context,
    should_intercept,
)
from djinn_lib_graph.match import PatternMatch
from djinn_lib_graph.metadata import (
    DataResidency,
    MemoryPattern,
    MetadataPlaceholder,
    Modality,
    SemanticMetadata,
    WorkloadProfile,
    WorkloadType,
)
from djinn_lib_later.face import LaterHandler, LaterValue, later
from djinn_lib_models.face import models
from djinn_lib_named.face import kept
from djinn_lib_schedule.calibrate import calibrate, profiles
from djinn_lib_schedule.execution import ExecutionStrategy, execute
from djinn_lib_schedule.lazy_tuple import LazyResult, LazyTuple
from djinn_lib_schedule.liveness import MemoryEstimator
from djinn_lib_schedule.profiles import Calibration
from djinn_lib_schedule.report import explain
from djinn_lib_schedule.schedule import CostEstimate, ExecutionSchedule
from djinn_lib_schedule.scheduling import Scheduler, SchedulingStrategy, schedule
from djinn_lib_trace.counters import reset_stats, stats
from djinn_lib_trace.debugging import set_debug_level
from djinn_lib_trace.metrics import metrics
from djinn_lib_trace.state import (
    RuntimeState,
    get_initialization_time_ms,
    get_interception_stats,
    get_runtime_state,
)
from djinn_lib_trace.waits import DjinnWarning

from djinn.kinds import OperationClass
from djinn_lib_names.analyzing import SemanticAnalyzer
from djinn_lib_names.building import GraphBuilder, get_global_builder
from djinn_lib_names.coordinating import Coordinator, get_coordinator, get_thread_pool
from djinn_lib_names.patterns import PatternPlugin, PatternRegistry
from djinn_lib_names.subgraphs import (
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

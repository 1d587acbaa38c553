"""Which library provides which name."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ("MODULES", "PACKAGES", "load")

MODULES = {
    **dict.fromkeys(("init_async", "materialize_async", "run_async", "session"),
                    "djinn_plugins.sessions.asynchronous.face"),
    **dict.fromkeys(("annotate_graph", "build_graph", "find_patterns"), "djinn_plugins.graph.analysis"),
    **dict.fromkeys(("Captured", "capture", "get_graph", "is_capturing"), "djinn_plugins.graph.capture"),
    **dict.fromkeys(("InterceptionContext", "disable_interception", "get_current_context", "should_intercept"),
                    "djinn_plugins.graph.interception"),
    **dict.fromkeys(("DataResidency", "MemoryPattern", "MetadataPlaceholder", "Modality", "SemanticMetadata",
                     "WorkloadProfile", "WorkloadType"), "djinn_plugins.graph.metadata"),
    **dict.fromkeys(("tensor_html", "tensor_text"), "djinn_plugins.graph.display"),
    **dict.fromkeys(("LaterHandler", "LaterValue", "later"), "djinn_plugins.client.later.face"),
    "AnnotatedGraph": "djinn_plugins.graph.annotated",
    **dict.fromkeys(("Graph", "GraphNode"), "djinn_plugins.graph.graph"),
    "PatternMatch": "djinn_plugins.graph.match",
    "OperationClass": "djinn.kinds",
    "models": "djinn_plugins.models.face",
    "kept": "djinn_plugins.sessions.named.face",
    **dict.fromkeys(("calibrate", "profiles"), "djinn_plugins.schedule.calibrate"),
    **dict.fromkeys(("CostEstimate", "ExecutionSchedule"), "djinn_plugins.schedule.schedule"),
    **dict.fromkeys(("ExecutionStrategy", "execute"), "djinn_plugins.schedule.execution"),
    **dict.fromkeys(("Scheduler", "SchedulingStrategy", "schedule"), "djinn_plugins.schedule.scheduling"),
    **dict.fromkeys(("RuntimeState", "get_initialization_time_ms", "get_interception_stats", "get_runtime_state"),
                    "djinn_plugins.common.tracing.state"),
    **dict.fromkeys(("reset_stats", "stats"), "djinn_plugins.common.tracing.counters"),
    "metrics": "djinn_plugins.common.tracing.metrics",
    "set_debug_level": "djinn_plugins.common.tracing.debugging",
    "DjinnWarning": "djinn_plugins.common.tracing.waits",
    "explain": "djinn_plugins.schedule.report",
    "Calibration": "djinn_plugins.schedule.profiles",
    **dict.fromkeys(("LazyResult", "LazyTuple"), "djinn_plugins.schedule.lazy_tuple"),
    **dict.fromkeys(("load_ipython_extension", "unload_ipython_extension"), "djinn_plugins.run.notebook"),
    "MemoryEstimator": "djinn_plugins.schedule.liveness",
    **dict.fromkeys(("GraphBuilder", "get_global_builder"), "djinn_plugins.sessions.names.building"),
    **dict.fromkeys(("PatternPlugin", "PatternRegistry"), "djinn_plugins.sessions.names.patterns"),
    "SemanticAnalyzer": "djinn_plugins.sessions.names.analyzing",
    **dict.fromkeys(("CostCalculator", "FragmentationConfig", "RemoteSubgraph", "SmartSubgraphBuilder",
                     "SubgraphBuilder", "SubgraphFragment"), "djinn_plugins.sessions.names.subgraphs"),
    **dict.fromkeys(("Coordinator", "get_coordinator", "get_thread_pool"), "djinn_plugins.sessions.names.coordinating"),
}
"""The module of each name of ``djinn``."""
PACKAGES = ("core", "frontend", "scheduler", "semantic")
"""Packages of earlier versions, which `djinn_plugins.sessions.names.finder` makes."""


def load(name: str) -> Any:
    """Import the module of a name, and return the object of that name.

    Raises:
        AttributeError: No library provides that name.
    """
    if name in PACKAGES:
        return import_module(f"djinn.{name}")
    if name not in MODULES:
        raise AttributeError(f"module 'djinn' has no attribute {name!r}")
    return getattr(import_module(MODULES[name]), name)

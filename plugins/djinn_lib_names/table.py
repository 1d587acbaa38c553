"""Which library provides which name."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ("MODULES", "PACKAGES", "load")

MODULES = {
    **dict.fromkeys(("init_async", "materialize_async", "run_async", "session"), "djinn_lib_async.face"),
    **dict.fromkeys(("annotate_graph", "build_graph", "find_patterns"), "djinn_lib_graph.analysis"),
    **dict.fromkeys(("Captured", "capture", "get_graph", "is_capturing"), "djinn_lib_graph.capture"),
    **dict.fromkeys(("InterceptionContext", "disable_interception", "get_current_context", "should_intercept"),
                    "djinn_lib_graph.interception"),
    **dict.fromkeys(("DataResidency", "MemoryPattern", "MetadataPlaceholder", "Modality", "SemanticMetadata",
                     "WorkloadProfile", "WorkloadType"), "djinn_lib_graph.metadata"),
    **dict.fromkeys(("tensor_html", "tensor_text"), "djinn_lib_graph.display"),
    **dict.fromkeys(("LaterHandler", "LaterValue", "later"), "djinn_lib_later.face"),
    "AnnotatedGraph": "djinn_lib_graph.annotated",
    **dict.fromkeys(("Graph", "GraphNode"), "djinn_lib_graph.graph"),
    "PatternMatch": "djinn_lib_graph.match",
    "OperationClass": "djinn.kinds",
    "models": "djinn_lib_models.face",
    "kept": "djinn_lib_named.face",
    **dict.fromkeys(("calibrate", "profiles"), "djinn_lib_schedule.calibrate"),
    **dict.fromkeys(("CostEstimate", "ExecutionSchedule"), "djinn_lib_schedule.schedule"),
    **dict.fromkeys(("ExecutionStrategy", "execute"), "djinn_lib_schedule.execution"),
    **dict.fromkeys(("Scheduler", "SchedulingStrategy", "schedule"), "djinn_lib_schedule.scheduling"),
    **dict.fromkeys(("RuntimeState", "get_initialization_time_ms", "get_interception_stats", "get_runtime_state"),
                    "djinn_lib_trace.state"),
    **dict.fromkeys(("reset_stats", "stats"), "djinn_lib_trace.counters"),
    "metrics": "djinn_lib_trace.metrics",
    "set_debug_level": "djinn_lib_trace.debugging",
    "DjinnWarning": "djinn_lib_trace.waits",
    "explain": "djinn_lib_schedule.report",
    "Calibration": "djinn_lib_schedule.profiles",
    **dict.fromkeys(("LazyResult", "LazyTuple"), "djinn_lib_schedule.lazy_tuple"),
    **dict.fromkeys(("load_ipython_extension", "unload_ipython_extension"), "djinn_lib_run.notebook"),
    "MemoryEstimator": "djinn_lib_schedule.liveness",
    **dict.fromkeys(("GraphBuilder", "get_global_builder"), "djinn_lib_names.building"),
    **dict.fromkeys(("PatternPlugin", "PatternRegistry"), "djinn_lib_names.patterns"),
    "SemanticAnalyzer": "djinn_lib_names.analyzing",
    **dict.fromkeys(("CostCalculator", "FragmentationConfig", "RemoteSubgraph", "SmartSubgraphBuilder",
                     "SubgraphBuilder", "SubgraphFragment"), "djinn_lib_names.subgraphs"),
    **dict.fromkeys(("Coordinator", "get_coordinator", "get_thread_pool"), "djinn_lib_names.coordinating"),
}
"""The module of each name of ``djinn``."""
PACKAGES = ("core", "frontend", "scheduler", "semantic")
"""Packages of earlier versions, which `djinn_lib_names.finder` makes."""


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

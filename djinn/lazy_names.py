"""Names that libraries provide and that are imported when a program first asks for them.

Few programs capture, plan or look at graphs, and every program imports djinn.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ("MODULES", "load")

MODULES = {
    **dict.fromkeys(("init_async", "materialize_async", "run_async", "session"), "djinn_lib_async.face"),
    **dict.fromkeys(("annotate_graph", "build_graph", "find_patterns"), "djinn_lib_graph.analysis"),
    **dict.fromkeys(("Captured", "capture", "get_graph", "is_capturing"), "djinn_lib_graph.capture"),
    **dict.fromkeys(("DataResidency", "MemoryPattern", "MetadataPlaceholder", "Modality", "SemanticMetadata",
                     "WorkloadProfile"), "djinn_lib_graph.metadata"),
    **dict.fromkeys(("tensor_html", "tensor_text"), "djinn_lib_graph.display"),
    **dict.fromkeys(("LaterHandler", "LaterValue", "later"), "djinn_lib_later.face"),
    "AnnotatedGraph": "djinn_lib_graph.annotated",
    **dict.fromkeys(("calibrate", "profiles"), "djinn_lib_schedule.calibrate"),
    **dict.fromkeys(("CostEstimate", "ExecutionSchedule"), "djinn_lib_schedule.schedule"),
    **dict.fromkeys(("ExecutionStrategy", "execute"), "djinn_lib_schedule.execution"),
    **dict.fromkeys(("Scheduler", "SchedulingStrategy", "schedule"), "djinn_lib_schedule.scheduling"),
    **dict.fromkeys(("RuntimeState", "get_initialization_time_ms", "get_interception_stats", "get_runtime_state"),
                    "djinn_lib_trace.state"),
    **dict.fromkeys(("reset_stats", "stats"), "djinn_lib_trace.counters"),
    "DjinnWarning": "djinn_lib_trace.waits",
    "explain": "djinn_lib_schedule.report",
    "Calibration": "djinn_lib_schedule.profiles",
    "LazyTuple": "djinn_lib_schedule.lazy_tuple",
    **dict.fromkeys(("load_ipython_extension", "unload_ipython_extension"), "djinn_lib_run.notebook"),
    "MemoryEstimator": "djinn_lib_schedule.liveness",
}
"""The module of each name."""


def load(name: str) -> Any:
    """Import the module of a name, and return the object of that name.

    Raises:
        KeyError: No library provides that name.
    """
    return getattr(import_module(MODULES[name]), name)

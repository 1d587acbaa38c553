"""djinn: unmodified PyTorch on an accelerator on another machine.

Importing registers the device ``remote_accelerator`` with PyTorch. It opens no connection and starts no thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from djinn.gc_pause import paused_collection

if TYPE_CHECKING:
    from djinn_lib_async.face import init_async, materialize_async, run_async, session
    from djinn_lib_graph.analysis import annotate_graph, build_graph, find_patterns
    from djinn_lib_graph.annotated import AnnotatedGraph
    from djinn_lib_graph.capture import Captured, capture, get_graph, is_capturing
    from djinn_lib_graph.metadata import (
        DataResidency,
        MemoryPattern,
        MetadataPlaceholder,
        Modality,
        SemanticMetadata,
        WorkloadProfile,
    )
    from djinn_lib_later.face import LaterHandler, LaterValue, later
    from djinn_lib_schedule.calibrate import calibrate, profiles
    from djinn_lib_schedule.execution import ExecutionStrategy, execute
    from djinn_lib_schedule.lazy_tuple import LazyTuple
    from djinn_lib_schedule.liveness import MemoryEstimator
    from djinn_lib_schedule.profiles import Calibration
    from djinn_lib_schedule.report import explain
    from djinn_lib_schedule.schedule import CostEstimate, ExecutionSchedule
    from djinn_lib_schedule.scheduling import Scheduler, SchedulingStrategy, schedule
    from djinn_lib_trace.counters import reset_stats, stats
    from djinn_lib_trace.state import (
        RuntimeState,
        get_initialization_time_ms,
        get_interception_stats,
        get_runtime_state,
    )
    from djinn_lib_trace.waits import DjinnWarning

with paused_collection():
    from djinn import errors, lazy_names
    from djinn.errors import DjinnError, SessionClosedError, TransportError
    from djinn.ir.phase import ExecutionPhase
    from djinn.record import devices
    from djinn.record.tensor import LazyTensor
    from djinn.session import runtime
    from djinn.session.logs import set_debug_level
    from djinn.session.runtime import ensure_initialized, init, is_initialized, register_init_hook, shutdown

__version__ = "0.1.0"
__all__ = (
    "AnnotatedGraph", "Calibration", "Captured", "CostEstimate", "DataResidency", "DjinnError", "DjinnWarning",
    "ExecutionPhase", "ExecutionSchedule", "ExecutionStrategy", "LaterHandler", "LaterValue", "LazyTensor", "LazyTuple",
    "MemoryEstimator", "MemoryPattern", "MetadataPlaceholder", "Modality", "RuntimeState", "Scheduler",
    "SchedulingStrategy", "SemanticMetadata", "SessionClosedError", "TransportError", "WorkloadProfile",
    "annotate_graph", "build_graph", "calibrate", "capture", "ensure_initialized", "errors", "execute", "explain",
    "find_patterns", "flush", "get_graph", "get_initialization_time_ms", "get_interception_stats", "get_runtime_state",
    "init", "init_async", "is_capturing", "is_initialized", "later", "materialize", "materialize_async", "profiles",
    "register_init_hook", "reset_stats", "run_async", "schedule", "session", "set_debug_level", "shutdown", "stats",
    "synchronize",
)
def __getattr__(name: str) -> Any:
    if name not in lazy_names.MODULES:
        raise AttributeError(f"module 'djinn' has no attribute {name!r}")
    found = globals()[name] = lazy_names.load(name)
    return found


def materialize(*values: Any) -> Any:
    """Fetch tensors in one round trip.

    Args:
        *values: Lazy tensors, or structures of them: lists, tuples, dicts or model outputs, nested in any way.
            Everything else in them, including ordinary tensors, is returned unchanged.

    Returns:
        The same structures with CPU tensors in place of lazy ones; a tuple if several values were given.
    """
    leaves, structure = tree_flatten(values)
    homes = iter(runtime.current().materialize([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]))
    made = tree_unflatten([next(homes) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure)
    return made[0] if len(values) == 1 else made


def flush() -> None:
    """Send everything recorded to the executor without waiting."""
    runtime.current().flush()


def synchronize() -> None:
    """Wait until everything recorded has run; raise the exception of a failed operation."""
    runtime.current().synchronize()


def _install() -> None:
    """Install the interceptor that the environment chooses. An error is raised when the interceptor is first needed."""
    import os

    from djinn.plugins.manager import Plugins
    from djinn.settings.selection import PluginSelection

    try:
        selection = PluginSelection.parse(os.environ.get("DJINN_PLUGINS", ""))
        names = None if "interceptor" in selection.chosen else ["djinn-interceptor-device"]
        plugins = Plugins.load(selection, names=names)
        if plugins.registered("interceptor"):
            runtime.install(plugins.choose("interceptor", "device"))
    except DjinnError as problem:
        devices.install_failed(problem)


with paused_collection():
    _install()

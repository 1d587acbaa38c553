"""djinn: unmodified PyTorch on an accelerator on another machine.

Importing registers the device ``remote_accelerator`` with PyTorch. It opens no connection and starts no thread.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from djinn.gc_pause import paused_collection

if TYPE_CHECKING:
    from djinn_plugins.sessions.names.face import *  # noqa: F403  # the names that libraries provide; at run time, `lazy_names` loads them

with paused_collection():
    from djinn import errors, lazy_names
    from djinn.errors import DjinnError, SessionClosedError, TransportError, UnsupportedTorchError
    from djinn.ir.phase import ExecutionPhase
    from djinn.record import devices
    from djinn.record.tensor import LazyTensor
    from djinn.session import runtime
    from djinn.session.runtime import ensure_initialized, init, is_initialized, register_init_hook, shutdown

__version__ = "0.1.0"
__all__ = (  # noqa: F405  # see above
    "AnnotatedGraph", "Calibration", "Captured", "Coordinator", "CostCalculator", "CostEstimate", "DataResidency",
    "DjinnError", "DjinnWarning", "ExecutionPhase", "ExecutionSchedule", "ExecutionStrategy", "FragmentationConfig",
    "Graph", "GraphBuilder", "GraphNode", "InterceptionContext", "LaterHandler", "LaterValue", "LazyResult",
    "LazyTensor", "LazyTuple", "MemoryEstimator", "MemoryPattern", "MetadataPlaceholder", "Modality", "OperationClass",
    "PatternMatch", "PatternPlugin", "PatternRegistry", "RemoteSubgraph", "RuntimeState", "Scheduler",
    "SchedulingStrategy", "SemanticAnalyzer", "SemanticMetadata", "SessionClosedError", "SmartSubgraphBuilder",
    "SubgraphBuilder", "SubgraphFragment", "TransportError", "WorkloadProfile", "WorkloadType", "annotate_graph",
    "build_graph", "calibrate", "capture", "disable_interception", "ensure_initialized", "errors", "execute", "explain",
    "find_patterns", "flush", "get_coordinator", "get_current_context", "get_global_builder", "get_graph",
    "get_initialization_time_ms", "get_interception_stats", "get_runtime_state", "get_thread_pool", "init",
    "init_async", "is_capturing", "is_initialized", "kept", "later", "materialize", "materialize_async", "metrics",
    "models", "profiles", "register_init_hook", "reset_stats", "run_async", "schedule", "session", "set_debug_level",
    "should_intercept", "shutdown", "stats", "synchronize",
)
def __getattr__(name: str) -> Any:
    return globals().setdefault(name, lazy_names.load(name))


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
    """Wait until everything recorded has run and the device has finished; raise the exception of a failed operation."""
    runtime.current().synchronize()


def _install() -> None:
    """Install the interceptor that the environment chooses.

    Raises:
        UnsupportedTorchError: This PyTorch lacks what the interceptor needs. Any other error is raised when the
            interceptor is first needed.
    """
    import os

    from djinn.plugins.manager import Plugins
    from djinn.settings.selection import PluginSelection

    try:
        selection = PluginSelection.parse(os.environ.get("DJINN_PLUGINS", ""))
        names = None if "interceptor" in selection.chosen else ["djinn-interceptor-device"]
        plugins = Plugins.load(selection, names=names)
        if plugins.registered("interceptor"):
            runtime.install(plugins.choose("interceptor", "device"))
    except UnsupportedTorchError:
        raise
    except DjinnError as problem:
        devices.install_failed(problem)


with paused_collection():
    _install()
sys.meta_path.append(lazy_names)

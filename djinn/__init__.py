"""djinn: unmodified PyTorch on an accelerator that is somewhere else.

Importing registers the device ``remote_accelerator`` with PyTorch; it opens no connection and starts no thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from djinn import errors, runtime
from djinn.analysis import annotate_graph, find_patterns
from djinn.capture import Captured, capture, explain, get_graph, is_capturing
from djinn.errors import DjinnError, SessionClosedError, TransportError
from djinn.logs import set_debug_level
from djinn.model.annotated import AnnotatedGraph
from djinn.model.metadata import (
    DataResidency,
    ExecutionPhase,
    MemoryPattern,
    MetadataPlaceholder,
    Modality,
    SemanticMetadata,
    WorkloadProfile,
)
from djinn.runtime import (
    RuntimeState,
    ensure_initialized,
    get_initialization_time_ms,
    get_runtime_state,
    init,
    init_async,
    is_initialized,
    register_init_hook,
    reset_stats,
    shutdown,
    stats,
)
from djinn.tensor import LazyTensor, LazyTuple

__version__ = "0.1.0"
__all__ = (
    "AnnotatedGraph",
    "Captured",
    "DataResidency",
    "DjinnError",
    "ExecutionPhase",
    "LazyTensor",
    "LazyTuple",
    "MemoryPattern",
    "MetadataPlaceholder",
    "Modality",
    "RuntimeState",
    "SemanticMetadata",
    "SessionClosedError",
    "TransportError",
    "WorkloadProfile",
    "annotate_graph",
    "capture",
    "ensure_initialized",
    "errors",
    "explain",
    "find_patterns",
    "flush",
    "get_graph",
    "get_initialization_time_ms",
    "get_interception_stats",
    "get_runtime_state",
    "init",
    "init_async",
    "is_capturing",
    "is_initialized",
    "materialize",
    "register_init_hook",
    "reset_stats",
    "set_debug_level",
    "shutdown",
    "stats",
    "synchronize",
)


def materialize(*tensors: torch.Tensor) -> Any:
    """Bring tensors home in one round trip.

    Args:
        *tensors: Lazy tensors; ordinary ones are given back as they are.

    Returns:
        One CPU tensor, or a tuple of them if several were given.
    """
    made = runtime.current().materialize(tensors)
    return made[0] if len(tensors) == 1 else tuple(made)


def flush() -> None:
    """Hand everything recorded over to the executor without waiting."""
    runtime.current().flush()


def synchronize() -> None:
    """Wait until everything recorded has run; raises what an operation raised."""
    runtime.current().synchronize()


def get_interception_stats() -> dict[str, int]:
    """Return the counters that concern recording."""
    names = ("operations", "shape_cache_hits", "shape_cache_misses", "materializations", "pending_nodes")
    now = stats()
    return {name: now[name] for name in names}


def _install() -> None:
    """Install the interceptor that the environment chooses. What is wrong with it is raised when it is first needed."""
    import os

    from djinn.plugins import Plugins, PluginSelection

    try:
        selection = PluginSelection.parse(os.environ.get("DJINN_PLUGINS", ""))
        names: Sequence[str] | None = None if "interceptor" in selection.chosen else ("djinn-interceptor-device",)
        plugins = Plugins.load(selection, names=names)
        if plugins.registered("interceptor"):
            runtime.install(plugins.choose("interceptor", "device"))
    except DjinnError as problem:
        runtime.install_failed(problem)


_install()

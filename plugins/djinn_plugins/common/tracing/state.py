"""What can be asked about the running session."""

from __future__ import annotations

import attrs

from djinn.session import runtime
from djinn_plugins.common.tracing.counters import stats
from djinn_plugins.common.tracing.intercepts import INTERCEPTS

__all__ = ("RuntimeState", "get_initialization_time_ms", "get_interception_stats", "get_runtime_state")


@attrs.frozen
class RuntimeState:
    """Description of the running session."""

    is_initialized: bool
    """Whether a session is running."""
    address: str
    """Address of its executor."""
    device: str
    """The executor's own device."""
    initialization_time_ms: float
    """How long its start took."""


def get_runtime_state() -> RuntimeState:
    """Describe the running session. Starts none."""
    session = runtime._session
    if session is None:
        return RuntimeState(False, "", "", 0.0)
    return RuntimeState(True, session.backend.address, session.backend.welcome.device, runtime._init_time_ms)


def get_initialization_time_ms() -> float:
    """Return how long the last start took, in milliseconds."""
    return runtime._init_time_ms


def get_interception_stats() -> dict[str, int]:
    """Return the counters of the recording.

    ``dispatch_intercepts`` is another name of ``operations``; ``factory_intercepts`` counts, since the process began,
    the calls that made tensors on the device.
    """
    names = ("operations", "shape_cache_hits", "shape_cache_misses", "materializations", "pending_nodes")
    now = stats()
    return {**{name: now[name] for name in names}, "dispatch_intercepts": now["operations"],
            "factory_intercepts": INTERCEPTS["factories"]}

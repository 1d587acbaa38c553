"""The contracts of the executor's side: executors, guards, and the serving half of transports.

Each kind's laws are in ``specs/kinds``; this command checks them: ``pytest --pyargs djinn_conformance
--djinn-plugin=NAME``.
"""

from __future__ import annotations

from djinn_lib_service.kinds.executor import CompiledProgram, Executor, ExecutorFactory, RandomState
from djinn_lib_service.kinds.guard import Bounds, CallCheck, CheckedProgram, Guard, Prepared, PreparedGuard, Watch
from djinn_lib_service.kinds.transport import (
    Channel,
    Listener,
    ListeningTransport,
    ListenOptions,
    PeerConnection,
    PeerTransport,
)

__all__ = (
    "Bounds", "CallCheck", "Channel", "CheckedProgram", "CompiledProgram", "Executor", "ExecutorFactory", "Guard",
    "ListenOptions", "Listener", "ListeningTransport", "PeerConnection", "PeerTransport", "Prepared", "PreparedGuard",
    "RandomState", "Watch",
)

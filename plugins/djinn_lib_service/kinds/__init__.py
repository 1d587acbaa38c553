"""The contracts of the executor's side: executors, guards, and the serving half of transports.

Each kind's laws are in ``specs/kinds``; this command checks them: ``pytest --pyargs djinn_conformance
--djinn-plugin=NAME``.
"""

from __future__ import annotations

from djinn_lib_service.kinds.executor import CompiledProgram, Executor, ExecutorFactory, RandomState
from djinn_lib_service.kinds.guard import (
    Bounds,
    CallCheck,
    CheckedProgram,
    Guard,
    Prepared,
    ProgramChecker,
    SupportsPreparation,
)
from djinn_lib_service.kinds.memory import (
    CRITICAL,
    WARNING,
    Execute,
    KeptUploads,
    MemoryFactory,
    MemoryManager,
    MemoryOptions,
    MemoryReport,
    Put,
    RunsAhead,
    SessionMemory,
    SpareData,
    SupportsEviction,
)
from djinn_lib_service.kinds.transport import Channel, Listener, ListeningTransport, PeerConnection, SupportsPeers
from djinn_lib_service.options import ListenOptions

__all__ = (
    "CRITICAL",
    "WARNING",
    "Bounds",
    "CallCheck",
    "Channel",
    "CheckedProgram",
    "CompiledProgram",
    "Execute",
    "Executor",
    "ExecutorFactory",
    "Guard",
    "KeptUploads",
    "ListenOptions",
    "Listener",
    "ListeningTransport",
    "MemoryFactory",
    "MemoryManager",
    "MemoryOptions",
    "MemoryReport",
    "PeerConnection",
    "Prepared",
    "ProgramChecker",
    "Put",
    "RandomState",
    "RunsAhead",
    "SessionMemory",
    "SpareData",
    "SupportsEviction",
    "SupportsPeers",
    "SupportsPreparation",
)

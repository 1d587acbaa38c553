"""One module per plugin kind, with the Protocol that plugins of that kind implement.

Each kind's laws are in ``specs/kinds``; this command checks them: ``pytest --pyargs djinn_conformance
--djinn-plugin=NAME``.
"""

from __future__ import annotations

from djinn.kinds.backend import Arrange, Backend, BackendContext, BackendFactory, OpenBackend, RemoteExecutor
from djinn.kinds.cache import CacheFactory, SubmissionCache
from djinn.kinds.classifier import Classifier, OperationClass
from djinn.kinds.executor import CompiledProgram, Executor, ExecutorFactory, RandomState
from djinn.kinds.guard import Bounds, CallCheck, CheckedProgram, Guard, Prepared, PreparedGuard, Watch
from djinn.kinds.interceptor import Interceptor
from djinn.kinds.observer import Observer
from djinn.kinds.shapes import Inference, OutputSpec, ShapeInference, TensorPlaceholder
from djinn.kinds.transport import (
    Channel,
    Connection,
    ConnectOptions,
    Listener,
    ListenOptions,
    PeerConnection,
    PeerTransport,
    Transport,
)

__all__ = (
    "Arrange", "Backend", "BackendContext", "BackendFactory", "Bounds", "CacheFactory", "CallCheck", "Channel",
    "CheckedProgram", "Classifier", "CompiledProgram", "ConnectOptions", "Connection", "Executor",
    "ExecutorFactory", "Guard", "Inference", "Interceptor", "ListenOptions", "Listener", "Observer", "OpenBackend",
    "OperationClass", "OutputSpec", "PeerConnection", "PeerTransport", "Prepared", "PreparedGuard", "RandomState",
    "RemoteExecutor", "ShapeInference", "SubmissionCache", "TensorPlaceholder", "Transport", "Watch",
)

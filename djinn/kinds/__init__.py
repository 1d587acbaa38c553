"""One module per plugin kind, with the Protocol that plugins of that kind implement.

Each kind's laws are in ``specs/kinds``; this command checks them: ``pytest --pyargs djinn_conformance
--djinn-plugin=NAME``.
"""

from __future__ import annotations

from djinn.kinds.backend import Arrange, Backend, BackendContext, BackendFactory, OpenBackend, RemoteExecutor
from djinn.kinds.cache import CacheFactory, SubmissionCache
from djinn.kinds.classifier import Classifier, OperationClass
from djinn.kinds.interceptor import Interceptor
from djinn.kinds.interop import HostInterop
from djinn.kinds.layer import Layer, SharedState
from djinn.kinds.observer import Observer
from djinn.kinds.shapes import Inference, OutputSpec, ShapeInference, TensorPlaceholder
from djinn.kinds.transport import Connection, ConnectOptions, Transport

__all__ = (
    "Arrange", "Backend", "BackendContext", "BackendFactory", "CacheFactory", "Classifier", "ConnectOptions",
    "Connection", "HostInterop", "Inference", "Interceptor", "Layer", "Observer", "OpenBackend", "OperationClass",
    "OutputSpec", "RemoteExecutor", "ShapeInference", "SharedState", "SubmissionCache", "TensorPlaceholder",
    "Transport",
)

"""One module per plugin kind, with the Protocol that plugins of that kind implement.

Each kind's laws are in ``specs/kinds``; this command checks them: ``pytest --pyargs djinn_conformance
--djinn-plugin=NAME``.
"""

from __future__ import annotations

from djinn.kinds.analyzer import Analyzer, Annotations
from djinn.kinds.classifier import Classifier, OperationClass
from djinn.kinds.executor import CompiledProgram, Executor, ExecutorFactory, RandomState
from djinn.kinds.exporter import Exporter
from djinn.kinds.guard import Bounds, CallCheck, CheckedProgram, Guard, Prepared, PreparedGuard, Watch
from djinn.kinds.interceptor import Interceptor
from djinn.kinds.observer import Observer
from djinn.kinds.pattern import Pattern, PatternMatch
from djinn.kinds.scheduler import Scheduler
from djinn.kinds.shapes import Inference, OutputSpec, ShapeInference, TensorPlaceholder
from djinn.kinds.source import GraphSource
from djinn.kinds.transport import (
    Carrier,
    CarryingTransport,
    Channel,
    Connection,
    ConnectOptions,
    Listener,
    ListenOptions,
    Transport,
)

__all__ = (
    "Analyzer",
    "Annotations",
    "Bounds",
    "CallCheck",
    "Carrier",
    "CarryingTransport",
    "Channel",
    "CheckedProgram",
    "Classifier",
    "CompiledProgram",
    "ConnectOptions",
    "Connection",
    "Executor",
    "ExecutorFactory",
    "Exporter",
    "GraphSource",
    "Guard",
    "Inference",
    "Interceptor",
    "ListenOptions",
    "Listener",
    "Observer",
    "OperationClass",
    "OutputSpec",
    "Pattern",
    "PatternMatch",
    "Prepared",
    "PreparedGuard",
    "RandomState",
    "Scheduler",
    "ShapeInference",
    "TensorPlaceholder",
    "Transport",
    "Watch",
)

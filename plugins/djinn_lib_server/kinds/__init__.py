"""The kinds of plugin that belong to a server, one module each."""

from __future__ import annotations

from djinn_lib_server.kinds.admission import AdmissionFactory, AdmissionPolicy, ServerLoad, TurnOrder
from djinn_lib_server.kinds.authenticator import Authenticator, AuthenticatorFactory, SamplingAuthenticatorFactory
from djinn_lib_server.kinds.metrics import (
    MetricsFactory,
    MetricsOutput,
    MetricsSource,
    PeriodicOutput,
    SamplingMetricsFactory,
)
from djinn_lib_server.kinds.store import (
    ModelStore,
    ModelStoreFactory,
    SamplingModelStoreFactory,
    StoreSample,
    SupportsKeeping,
    TensorExtent,
)

__all__ = (
    "AdmissionFactory", "AdmissionPolicy", "Authenticator", "AuthenticatorFactory", "MetricsFactory", "MetricsOutput",
    "MetricsSource", "ModelStore", "ModelStoreFactory", "PeriodicOutput", "SamplingAuthenticatorFactory",
    "SamplingMetricsFactory", "SamplingModelStoreFactory", "ServerLoad", "StoreSample", "SupportsKeeping",
    "TensorExtent", "TurnOrder",
)

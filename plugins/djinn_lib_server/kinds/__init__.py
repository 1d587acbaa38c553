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

__all__ = (
    "AdmissionFactory", "AdmissionPolicy", "Authenticator", "AuthenticatorFactory", "MetricsFactory", "MetricsOutput",
    "MetricsSource", "PeriodicOutput", "SamplingAuthenticatorFactory", "SamplingMetricsFactory", "ServerLoad",
    "TurnOrder",
)

"""Capabilities: optional properties of a plugin that some laws require."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from djinn.kinds import ConnectOptions
from djinn.settings import Settings
from djinn_conformance.assertions import Tolerance
from djinn_conformance.certificates import certificates
from djinn_conformance.oracle import has_eager_stream
from djinn_conformance.specs import Law
from djinn_conformance.subjects import Subject, torch_device
from djinn_plugins.common.kinds.transport import ListeningTransport, SupportsAsyncAccept, SupportsPeers
from djinn_plugins.common.options import ListenOptions
from djinn_plugins.common.settings.connection import TlsSettings
from djinn_plugins.server.kinds.authenticator import SamplingAuthenticatorFactory
from djinn_plugins.server.kinds.metrics import SamplingMetricsFactory
from djinn_plugins.server.kinds.store import SamplingModelStoreFactory

__all__ = ("FOUND_OUT", "connect_options", "listen_options", "listening_address", "listens", "missing", "tolerance_of")


def declares(subject: Subject, capability: str) -> bool:
    """Whether the object declares a capability."""
    return capability in getattr(subject.registered.value, "capabilities", ())


def listening_address(subject: Subject) -> str:
    """Return an address on this machine that a transport can listen on."""
    transport = subject.registered.value
    return str(getattr(transport, "loopback_address", f"{transport.scheme}://127.0.0.1:0"))


def listen_options(subject: Subject) -> ListenOptions:
    """Return a transport's options for listening: a certificate, if it encrypts."""
    if not getattr(subject.registered.value, "encrypts", False):
        return ListenOptions()
    return ListenOptions(tls_cert=certificates().server)


def connect_options(subject: Subject, **options: Any) -> ConnectOptions:
    """Return a transport's options for connecting: the trusted authority, if it encrypts."""
    if not getattr(subject.registered.value, "encrypts", False):
        return ConnectOptions(**options)
    return ConnectOptions(settings=Settings(TlsSettings(tls_ca=certificates().authority)), **options)


def listens(subject: Subject) -> bool:
    """Whether a transport has a listening side."""
    return isinstance(subject.registered.value, ListeningTransport)


def _awaits(subject: Subject) -> bool:
    if not listens(subject):
        return False
    listener = subject.registered.value.listen(listening_address(subject), listen_options(subject))
    listener.close()
    return isinstance(listener, SupportsAsyncAccept)


def _has_eager_stream(subject: Subject) -> bool:
    device = torch_device(subject)
    return torch.device(subject.device).type == device.type and has_eager_stream(device)


def _computes(subject: Subject) -> bool:
    from djinn_conformance.compositions import COMPUTING

    part = subject.registered.value.part
    return part is None or part.kind in (*COMPUTING, "guard")


def _adds_nothing(law: Law, subject: Subject) -> bool:
    from djinn_conformance.compositions import CHECKED_ONCE, SCATTERED, is_second

    return (subject.registered.value.executors > 1 and law.id not in SCATTERED) or (
        is_second(subject) and law.id in CHECKED_ONCE)


FOUND_OUT: Mapping[str, Callable[[Subject], bool]] = {
    "authenticator.samples": lambda subject: isinstance(subject.registered.value, SamplingAuthenticatorFactory),
    "executor.eager_stream": _has_eager_stream,
    "metrics.samples": lambda subject: isinstance(subject.registered.value, SamplingMetricsFactory),
    "session.computes": _computes,
    "session.served": lambda subject: bool(subject.registered.value.served),
    "store.samples": lambda subject: isinstance(subject.registered.value, SamplingModelStoreFactory),
    "transport.awaits": _awaits,
    "transport.carries": lambda subject: isinstance(subject.registered.value, SupportsPeers),
    "transport.listens": listens,
    "transport.resumes": lambda subject: bool(getattr(subject.registered.value, "resumes", False)),
}


@cache
def _has(subject: Subject, capability: str) -> bool:
    found_out = FOUND_OUT.get(f"{subject.kind}.{capability}")
    return declares(subject, capability) if found_out is None else found_out(subject)


def missing(law: Law, subject: Subject) -> tuple[str, ...]:
    """List the capabilities that a law requires and a plugin lacks."""
    if subject.kind == "session" and _adds_nothing(law, subject):
        return ("another session",)
    return tuple(capability for capability in law.requires if not _has(subject, capability))


def tolerance_of(law: Law, subject: Subject) -> Tolerance:
    """Return the tolerance that a law grants a plugin; empty if values must be equal."""
    if not law.tolerance or not _has(subject, law.tolerance["relaxed_by"]):
        return {}
    return {getattr(torch, name): (float(relative), float(absolute))
            for name, (relative, absolute) in law.tolerance.items() if name != "relaxed_by"}

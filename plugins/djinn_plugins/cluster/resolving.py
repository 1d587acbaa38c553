"""Finding a server of a cluster."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

from djinn.errors import ProtocolError
from djinn.settings import Config, Settings
from djinn_plugins.cluster.asking import ask
from djinn_plugins.cluster.messages import Resolve
from djinn_plugins.common.settings.cluster import ClusterSettings
from djinn_plugins.common.settings.connection import TlsSettings
from djinn_plugins.common.settings.named import NamedSettings

__all__ = ("resolve",)

RECENT_S = 30.0
"""A server that was given so long ago, or later, and is asked for again, has probably died or cannot be reached."""
_lock = threading.Lock()
_recent: deque[tuple[float, str]] = deque(maxlen=16)
"""The addresses that this process was given, with the times."""
_log = logging.getLogger("djinn.cluster")


def resolve(settings: ClusterSettings, others: Settings, *, is_again: bool = False) -> str:
    """Ask a cluster's directory for a server.

    Args:
        settings: The cluster, and what the session needs.
        others: The other settings of the session.
        is_again: Whether the server that was given last does not answer, so that it should be another one.

    Raises:
        DjinnError: The directory does not answer, or names none.
    """
    config = others(Config)
    with _lock:
        since = time.monotonic() - RECENT_S
        recent = tuple({address: None for given_s, address in _recent if given_s > since})
        last = _recent[-1][1] if is_again and _recent else ""
    servers = ask(settings.cluster, lambda name: Resolve(
        config.token, name, recent, settings.cluster_models[:16], settings.cluster_memory_mib * 2**20,
        others(NamedSettings).name, last),
        authorities=others(TlsSettings).tls_ca, timeout_s=config.connect_timeout_s)
    if not servers:
        raise ProtocolError(f"The directory {settings.cluster} names no server, and does not say why.")
    address = next((server.address for server in servers if server.address != last), servers[0].address)
    with _lock:
        _recent.append((time.monotonic(), address))
    _log.info("%s leads to %s", settings.cluster, address)
    return address

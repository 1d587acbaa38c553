"""What tests of sessions with several executors need."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import Any

from support.servers.serving import children_of

from djinn.kinds.backend_wrapper import unwrapped
from djinn.session.session import Session
from djinn_plugins.fleet.fleet import Fleet


def fleet_of(session: Session) -> Fleet:
    backend = unwrapped(session.backend)
    assert isinstance(backend, Fleet)
    return backend


def kill(server: Any) -> None:
    """Kill a server with all its processes, so that nothing comes back."""
    gone = [server.process.pid, *children_of(server.process.pid), *server.workers]
    for process in gone:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)

"""Which sessions share a worker: the boundary that holds between clients, besides that between tenants."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from typing import Literal, TypeAlias

from djinn.wire.messages import Hello
from djinn_plugins.common.settings.connection import MAX_NAME
from djinn_plugins.server.options import ServeOptions

__all__ = ("SPARE", "Boundary", "are_cpus", "boundary_of", "described", "is_of_name", "is_of_one_session", "place_of")

Boundary: TypeAlias = Literal["session", "owner", "tenant"]
SPARE = "spare"
"""Place of a worker that waits for the next owner."""
_SESSION, _NAME = "session\0", "name\0"
_RENAMED = re.compile(r"(~\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)+\Z")
"""The end of a name that `djinn_plugins.server.named_sessions.NamedSessions.rename` has given: its session is where it
was."""
RENAMED_CHARACTERS = 21


def boundary_of(options: ServeOptions) -> Boundary:
    """Return what ``--isolate`` stands for on the server's devices."""
    if options.workers.isolate != "auto":
        return options.workers.isolate
    return "owner" if are_cpus(options.device.names) else "tenant"


def are_cpus(devices: Iterable[str]) -> bool:
    """Whether all devices of these names are CPUs, where another process costs little memory."""
    return all(name.partition(":")[0] == "cpu" for name in devices)


def place_of(boundary: Boundary, greeting: Hello) -> str:
    """Return the place of a session among the workers of its tenant: sessions of the same place share a worker.

    A session with a name has the place of that name, so that its client finds its values. A client that
    names no owner shares with no other.
    """
    if boundary == "tenant":
        return ""
    if greeting.name:
        return _NAME + _RENAMED.sub("", greeting.name)[:MAX_NAME - RENAMED_CHARACTERS]
    if boundary == "session" or not greeting.owner:
        return _SESSION + secrets.token_hex(16)
    return f"owner\0{greeting.owner}"


def is_of_one_session(place: str) -> bool:
    """Whether a place is for one session only: no later one finds it again."""
    return place.startswith(_SESSION)


def is_of_name(place: str) -> bool:
    """Whether a place is that of a session with a name."""
    return place.startswith(_NAME)


def described(boundary: Boundary, options: ServeOptions, *, has_tenants: bool) -> str:
    """Describe the boundary that holds, and its cost."""
    kept = "what one of them gets from a fault of a kernel can be another's"
    whose = "a tenant" if has_tenants else "all clients"
    if boundary == "tenant":
        return (f"the sessions of {whose} share a process: {kept}; --isolate owner separates them, at the cost of a "
                "process for each, with its own memory on the device")
    most = options.limits.workers
    whose_sessions = "all sessions" if boundary == "session" else "sessions of different owners"
    bound = f"at most {most} at a time" if most else "without a limit of their number"
    return (f"{whose_sessions} run in different processes, {bound}"
            f"{' for each tenant' if has_tenants else ''}: each takes some 30 MB before it computes, and on another "
            "device than a CPU its own memory there")

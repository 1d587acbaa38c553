"""The limits of a tenant."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from djinn_lib_server.option import MIB, Option

__all__ = ("Limited", "Limits", "memory_limit")

Limited: TypeAlias = Literal["sessions", "inflight_bytes", "handles", "nodes", "queued", "wait", "programs"]
"""Limits that can refuse a request."""


class Limits(msgspec.Struct, frozen=True, omit_defaults=True, tag="limits"):
    """What all sessions of a tenant together may use; 0 means no limit.

    Attributes:
        sessions: Concurrent sessions.
        inflight_bytes: Bytes of tensors that are being received, or have been received and not stored yet.
        handles: Existing values.
        nodes: Steps of one program.
        queued: Programs that were sent and have not finished.
        wait_s: Longest expected wait of a program, checked when a session begins.
        memory_bytes: Device memory.
        host_bytes: Host memory for values moved there from the device, including cached values.
        programs: Programs that one session has defined.
    """

    sessions: Annotated[int, Meta(ge=0), Option(
        "max-sessions", "Sessions at a time; 0 for any number. With --tokens, this and the next three are for each "
                        "tenant whose token does not say otherwise.", reloads=True)] = 0
    inflight_bytes: Annotated[int, Meta(ge=0), Option(
        "max-inflight-mib", "MiB of tensors on their way into sessions at a time; 0 for any amount.", unit=MIB,
        reloads=True)] = 0
    handles: Annotated[int, Meta(ge=0), Option(
        "max-handles", "Values that sessions hold; 0 for any number.", reloads=True)] = 0
    nodes: Annotated[int, Meta(ge=0), Option(
        "max-nodes", "Operations in one program; 0 for as many as the protocol allows.", reloads=True)] = 0
    queued: Annotated[int, Meta(ge=0), Option(
        "max-queued", "Programs that wait, all sessions together; 0 for any number. With --tokens, this and the next "
                      "are for each tenant too.", reloads=True)] = 0
    wait_s: Annotated[float, Meta(ge=0, le=1e6), Option(
        "max-wait-s", "Seconds that a program is expected to wait, above which no session begins; 0 for any time.",
        reloads=True)] = 0.0
    memory_bytes: Annotated[int, Meta(ge=0), Option(
        "memory-mib", "MiB that the device may hold of all sessions together, which clients are told; what it has no "
                      "room for goes to memory of the host, or is made again. 0 for any amount. With --tokens, for "
                      "each tenant.", unit=MIB, reloads=True, shows_default=False)] = 0
    host_bytes: Annotated[int, Meta(ge=0), Option(
        "max-host-mib", "MiB of memory of the host for what is moved there, together with uploads that are kept; 0 for "
                        "any amount. With --tokens, for each tenant whose token does not say otherwise.", unit=MIB,
        reloads=True)] = 0
    programs: Annotated[int, Meta(ge=0), Option(
        "max-programs", "Programs that one session has defined at a time; 0 for any number. djinn's clients keep "
                        "2048.")] = 0


def memory_limit(server_bytes: int, limits: Limits) -> int:
    """Return a tenant's limit of device memory: the lower one of the server's and the tenant's; 0 for no limit."""
    return min(filter(None, (server_bytes, limits.memory_bytes)), default=0)

"""The limits of a tenant."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from djinn_plugins.server.option import MIB, Option

__all__ = ("MAX_WORKERS", "Limited", "Limits", "memory_limit")

Limited: TypeAlias = Literal["sessions", "inflight_bytes", "handles", "nodes", "queued", "wait", "programs"]
"""Limits that can refuse a request."""
MAX_WORKERS = 1000
"""Most workers of one tenant, whatever its limit."""


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
        workers: Processes for sessions that are kept apart.
    """

    sessions: Annotated[int, Meta(ge=0), Option(
        "max-sessions", "Maximum concurrent sessions; 0: no limit. With --tokens, this and the next three "
                        "apply to each tenant whose token has no limit.", reloads=True)] = 0
    inflight_bytes: Annotated[int, Meta(ge=0), Option(
        "max-inflight-mib", "Maximum MiB of tensors being received at the same time; 0: no limit.", unit=MIB,
        reloads=True)] = 0
    handles: Annotated[int, Meta(ge=0), Option(
        "max-handles", "Maximum values that sessions hold; 0: no limit.", reloads=True)] = 0
    nodes: Annotated[int, Meta(ge=0), Option(
        "max-nodes", "Maximum operations in one program; 0: the protocol's limit.", reloads=True)] = 0
    queued: Annotated[int, Meta(ge=0), Option(
        "max-queued", "Maximum queued programs of all sessions together; 0: no limit. With --tokens, this "
                      "and the next apply to each tenant too.", reloads=True)] = 0
    wait_s: Annotated[float, Meta(ge=0, le=1e6), Option(
        "max-wait-s", "Maximum expected wait of a program, in seconds, above which no session starts; 0: no "
                      "limit.",
        reloads=True)] = 0.0
    memory_bytes: Annotated[int, Meta(ge=0), Option(
        "memory-mib", "Maximum MiB of device memory for all sessions together; clients can read it. Beyond "
                      "it, values are offloaded to host memory, or recomputed. 0: no limit. With --tokens: "
                      "per tenant.", unit=MIB, reloads=True, shows_default=False)] = 0
    host_bytes: Annotated[int, Meta(ge=0), Option(
        "max-host-mib", "Maximum MiB of host memory for offloaded values and cached uploads together; 0: no "
                        "limit. With --tokens, for each tenant whose token has no limit.", unit=MIB,
        reloads=True)] = 0
    programs: Annotated[int, Meta(ge=0), Option(
        "max-programs", "Maximum programs that one session keeps defined; 0: no limit. djinn's clients keep "
                        "2048.")] = 0
    workers: Annotated[int, Meta(ge=0, le=MAX_WORKERS), Option(
        "max-workers", "Maximum processes for owners that --isolate keeps apart; beyond it, the longest idle one ends, "
                       "and if none is idle, no session starts. 0: as many as there can be. With --tokens, for each "
                       "tenant whose token has no limit.", reloads=True)] = 0


def memory_limit(server_bytes: int, limits: Limits) -> int:
    """Return a tenant's limit of device memory: the lower one of the server's and the tenant's; 0 for no limit."""
    return min(filter(None, (server_bytes, limits.memory_bytes)), default=0)

"""What the page of a server shows, and the commands that it executes."""

from __future__ import annotations

import hmac
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any, get_args

import attrs

from djinn.errors import ConfigurationError, DjinnError, RefusedError
from djinn.ir.phase import ExecutionPhase
from djinn_plugins.server.kinds.metrics import MemoryKind, MetricsSource, TenantTotals

__all__ = ("EVERY_S", "ServerModel", "open_tenant")

EVERY_S = 2.0
"""Time between two samples."""
MAX_SAMPLES = 300
MAX_PROGRAMS = 50
"""How many programs of all tenants are shown."""
FRESH_S = 0.5
"""How long a list of sessions is used again, for other readers of the page."""
EVERYBODY = "(all)"
_KICK_S = 2.0


@attrs.frozen
class _Sample:
    """Sums at a moment, by label."""

    at_s: float
    totals: Mapping[str, tuple[int, int, int, int, int]]
    """Requests, bytes in both directions, running time of programs in ns, held bytes, sessions."""


class ServerModel:
    """The content of a server's page; see `djinn_plugins.common.dashboard.endpoint.DashboardModel`.

    The holder of the operator's key sees everything, and may end sessions and drain the server. A client's token shows
    the client's tenant.

    Args:
        source: What the server counts.
        key: The operator's key.
        clock: Returns the time in seconds.

    Concurrency:
        Any thread.
    """

    def __init__(self, source: MetricsSource, key: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._key = key.encode()
        self._clock = clock
        self._began_s = clock()
        self._samples: deque[_Sample] = deque(maxlen=MAX_SAMPLES)
        self._lock = threading.Lock()
        self._sessions: tuple[float, list[dict[str, Any]]] = (-1e9, [])

    def sample(self) -> None:
        """Remember the sums of this moment."""
        totals = {label: (sum(found.counts.requests.values()), found.counts.received_bytes + found.counts.sent_bytes,
                          found.counts.device_ns, found.amounts.held_bytes, found.amounts.sessions)
                  for label, found in self._source.totals().items()}
        self._samples.append(_Sample(self._clock(), totals))

    def state(self, secret: str) -> dict[str, Any]:
        """Return the content of the page; see `DashboardModel.state`."""
        is_operator = self._is_operator(secret)
        tenant = None if is_operator else self._tenant_of(secret)
        totals = {label: found for label, found in sorted(self._source.totals().items()) if tenant in (None, label)}
        not_ready = self._source.why_not_ready()
        sessions = [row for row in self._rows() if tenant in (None, row["tenant"])]
        return {
            "about": f"{self._source.address} · djinn {self._source.version}", "up_s": self._clock() - self._began_s,
            "problem": not_ready, "is_operator": is_operator, "can_drain": True,
            "charts": list(self._charts(tenant)),
            "tables": [_tenants(totals), _memory(totals), _sessions(sessions), _programs(totals)]}

    def act(self, secret: str, action: str, target: str) -> dict[str, Any]:
        """Execute a command; see `DashboardModel.act`."""
        if not self._is_operator(secret):
            raise RefusedError("Only the operator may do that.", hint="Enter the operator's key.")
        if action == "end":
            done = self._source.operate("kick", {"target": target, "wait_s": _KICK_S, "keeps_worker": True})
            end = "ends after its program" if done["remains"] else "has ended"
            return {"done": done, "said": f"Session {target[:8]} {end}."}
        if action == "drain":
            return {"done": self._source.operate("drain", {}),
                    "said": "The server takes no new sessions, and ends after the last one."}
        raise ConfigurationError(f"There is no command {action[:40]!r}.", hint="There are: end, drain.")

    def _is_operator(self, secret: str) -> bool:
        return hmac.compare_digest(secret.encode("utf-8", "surrogateescape"), self._key)

    def _tenant_of(self, secret: str) -> str:
        tenant = self._source.tenant_of(secret)
        # A server that needs no token accepts any, also a mistyped key.
        if secret and tenant == open_tenant(self._source):
            raise RefusedError("This is not the operator's key.", hint="The server's log names the file with the key.")
        return tenant

    def _rows(self) -> list[dict[str, Any]]:
        with self._lock:
            made_s, rows = self._sessions
            if self._clock() - made_s >= FRESH_S:
                try:
                    rows = self._source.operate("sessions", {})
                except DjinnError:
                    rows = []
                self._sessions = (self._clock(), rows)
            return rows

    def _charts(self, tenant: str | None) -> Iterator[dict[str, Any]]:
        samples = [(sample.at_s, [sum(column) for column in zip(*(
            sums for label, sums in sample.totals.items() if tenant in (None, label)), strict=True)] or [0] * 5)
            for sample in list(self._samples)]
        rates = [[max(0, now[index] - before[index]) / max(now_s - before_s, 1e-3) for index in range(3)]
                 for (before_s, before), (now_s, now) in pairwise(samples)]
        seconds = samples[-1][0] - samples[0][0] if samples else 0.0
        for title, how, values in (
                ("Requests", "rate", [rate[0] for rate in rates]), ("Bytes", "byte_rate", [rate[1] for rate in rates]),
                ("Device busy", "part", [rate[2] / 1e9 for rate in rates]),
                ("Held by sessions", "bytes", [sums[3] for _, sums in samples]),
                ("Sessions", "count", [sums[4] for _, sums in samples])):
            yield {"title": title, "format": how, "seconds": seconds, "values": values}


def open_tenant(source: MetricsSource) -> str | None:
    """Return the tenant of clients without a token; ``None`` if they need one."""
    try:
        return source.tenant_of("")
    except RefusedError:
        return None


def _column(title: str, how: str = "count", *, is_problem: bool = False) -> dict[str, Any]:
    return {"title": title, "format": how, "is_problem": is_problem}


def _name(label: str) -> str:
    return label or EVERYBODY


def _tenants(totals: Mapping[str, TenantTotals]) -> dict[str, Any]:
    columns = [_column("tenant", "text"), _column("workers"), _column("sessions"), _column("values"),
               _column("held", "bytes"), _column("limit", "bytes"), _column("uploads kept", "bytes"),
               _column("shared by sessions", "bytes"),
               _column("requests"), _column("failed", is_problem=True), _column("refused", is_problem=True),
               _column("received", "bytes"), _column("sent", "bytes"), _column("programs ran", "seconds"),
               _column("programs waited", "seconds"), _column("workers lost", is_problem=True)]
    rows = []
    for label, found in totals.items():
        counts, amounts = found.counts, found.amounts
        requests = sum(counts.requests.values())
        rows.append({"cells": [
            _name(label), found.workers, amounts.sessions, amounts.handles, amounts.held_bytes,
            found.limit_bytes or None, amounts.kept_bytes, amounts.shared_bytes, requests,
            requests - counts.requests.get("ok", 0), sum(counts.rejections.values()),
            counts.received_bytes, counts.sent_bytes, counts.device_ns / 1e9, counts.wait_ns / 1e9,
            sum(found.restarts.values())]})
    return {"id": "tenants", "title": "Tenants", "columns": columns, "rows": rows}


def _memory(totals: Mapping[str, TenantTotals]) -> dict[str, Any]:
    memory = {label: found.amounts.memory for label, found in totals.items() if any(found.amounts.memory.values())}
    kinds = [kind for kind in get_args(MemoryKind) if any(sizes.get(kind) for sizes in memory.values())]
    rows = [{"cells": [_name(label), *(sizes.get(kind, 0) for kind in kinds)]} for label, sizes in memory.items()]
    return {"id": "memory", "title": "Memory by role", "rows": rows,
            "columns": [_column("tenant", "text"), *(_column(kind.replace("_", " "), "bytes") for kind in kinds)]}


def _sessions(found: list[dict[str, Any]]) -> dict[str, Any]:
    columns = [_column("session", "text"), _column("tenant", "text"), _column("client", "text"),
               _column("age", "seconds"), _column("idle", "seconds"), _column("queued programs"),
               _column("running for", "seconds"), _column("held", "bytes"), _column("values"),
               _column("name", "text"), _column("stays for", "seconds"), _column("state", "text", is_problem=True)]
    rows = []
    for row in found:
        name = row["session"]
        # Of a worker that does not answer, nothing else is known.
        known = [row["age_s"], row["idle_s"], row["queued"]] if row["answers"] else [None] * 3
        held = [row["held_bytes"], row["values"]] if row["answers"] else [None] * 2
        rows.append({
            "cells": [name[:8], _name(row["tenant"]), row["peer"] or None, *known, row["running_s"] or None,
                      *held, row["name"] or None, row["left_s"] or None,
                      "" if row["answers"] else "its worker does not answer"],
            "action": {"title": "End", "name": "end", "target": name, "question": f"End the session {name[:8]}?"}
            if name else None})
    return {"id": "sessions", "title": "Sessions", "columns": columns, "rows": rows}


def _programs(totals: Mapping[str, TenantTotals]) -> dict[str, Any]:
    columns = [_column("tenant", "text"), _column("program", "text"), _column("phase", "text"), _column("runs"),
               _column("total", "seconds"), _column("mean", "seconds"), _column("longest", "seconds")]
    found = sorted(((label, program) for label, tenant in totals.items() for program in tenant.programs),
                   key=lambda pair: -pair[1].total_ns)
    rows = [{"cells": [_name(label), program.name, "" if program.phase is ExecutionPhase.UNKNOWN
                       else program.phase.replace("_", " "), program.runs, program.total_ns / 1e9,
                       program.total_ns / 1e9 / max(program.runs, 1), program.longest_ns / 1e9]}
            for label, program in found[:MAX_PROGRAMS]]
    return {"id": "programs", "title": "Slow programs", "columns": columns, "rows": rows}

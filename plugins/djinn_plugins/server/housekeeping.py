"""Looks after the workers of owners: their number, the idle ones, and their questions to each other."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial

import anyio

from djinn_plugins.common.operators.named_values import NamedSession
from djinn_plugins.server.control import FindNamed, NamedFound
from djinn_plugins.server.control_channel import AwaitedControl
from djinn_plugins.server.counters import MAX_NAMED, REPORT_S
from djinn_plugins.server.event_loop import Tasks
from djinn_plugins.server.isolation import SPARE, is_of_name, is_of_one_session
from djinn_plugins.server.posts import WorkerPost, WorkerPosts
from djinn_plugins.server.shares import Shares
from djinn_plugins.server.tenant_limits import MAX_WORKERS
from djinn_plugins.server.tenants import Tenant
from djinn_plugins.server.worker_process import Worker

__all__ = ("Housekeeping", "of_tenant")

LOOK_TIMEOUT_S = 2.0
"""How long a worker may take to say that it has no sessions, before it is ended for that."""
IDLE_LOOK_S = 1.0
"""How often to look for idle workers; what only one session can use is idle after as long."""
NAME_KNOWN_S = 3600.0
"""How long the worker of a named session that has ended stays, so that the next client of that name learns why."""
MOST_STARTS = 32
"""How many workers of a tenant are started at once; then, `STARTS_PER_S`."""
STARTS_PER_S = 4.0
_log = logging.getLogger("djinn.server")


class Housekeeping:
    """Keeps the number of workers within a tenant's limit, and ends idle ones.

    Args:
        posts: All posts.
        shares: Divided anew when workers have reported.
        tasks: Where workers end, and are asked.
        idle_s: How long a worker may be idle.
        end: Ends a worker, whose programs have so many seconds.

    Concurrency:
        Tasks of one event loop.
    """

    def __init__(self, posts: WorkerPosts, shares: Shares, tasks: Tasks, idle_s: float,
                 end: Callable[[WorkerPost, float], Awaitable[bool]]) -> None:
        self._posts = posts
        self._shares = shares
        self._tasks = tasks
        self._idle_s = idle_s
        self._end = end
        self._starts: dict[tuple[str, str], tuple[float, float]] = {}
        """How many workers of a tenant may be started at once, and when that was true."""

    def has_room(self, tenant: Tenant) -> bool:
        """Whether a tenant may have another worker."""
        own = sum(not post.is_ending for post in self._posts.of(tenant))
        return own < (tenant.limits.workers or MAX_WORKERS)

    def pause_before_start(self, tenant: Tenant) -> float:
        """Return how long to wait before a worker of a tenant may be started, in seconds; 0 if it may be now.

        Clients that name another owner each time would keep the processors busy with starting workers.
        """
        now = time.monotonic()
        left, since_s = self._starts.get((tenant.name, tenant.key), (float(MOST_STARTS), now))
        left = min(MOST_STARTS, left + (now - since_s) * STARTS_PER_S)
        may_start = left >= 1
        self._starts[tenant.name, tenant.key] = left - may_start, now
        return 0.0 if may_start else (1 - left) / STARTS_PER_S

    async def make_room(self, tenant: Tenant) -> bool:
        """End the worker of a tenant that has been idle longest, and return whether there is such a one."""
        idle = [post for post in self._posts.of(tenant) if post.idle_s() > IDLE_LOOK_S]
        for post in sorted(idle, key=WorkerPost.idle_s, reverse=True):
            if await self._retire(post):
                return True
        return self.has_room(tenant)

    async def _retire(self, post: WorkerPost) -> bool:
        """End a worker if it says that it has no sessions and no values, and no client was sent to it meanwhile."""
        handed_s, worker = post.handed_s, post.worker
        if worker is None or await worker.look(LOOK_TIMEOUT_S) != () or post.handed_s != handed_s or post.is_ending:
            return False
        # From here on, a new client gets another worker.
        post.is_ending = True
        _log.info("%sworker %d is idle: ended", of_tenant(post.tenant), worker.pid)
        self._tasks.spawn(self._end, post, IDLE_LOOK_S)
        return True

    async def run(self) -> None:
        """End workers that no client has used for a while, and divide what tenants have, until cancelled."""
        while True:
            await anyio.sleep(REPORT_S)
            await self._shares.divide_changed()
            for post in self._posts.all():
                most_s = (IDLE_LOOK_S if is_of_one_session(post.place) else
                          max(self._idle_s, NAME_KNOWN_S) if is_of_name(post.place) else self._idle_s)
                if post.place not in ("", SPARE) and post.idle_s() > most_s:
                    await self._retire(post)

    def find_named(self, post: WorkerPost, request: FindNamed, control: AwaitedControl) -> None:
        """Answer a worker; returns at once. Another list is made when the last one was read."""
        control.question(self._tasks, partial(self._named_in_others, post, request.number), in_turn=True)

    async def _named_in_others(self, post: WorkerPost, number: int) -> tuple[NamedFound, None]:
        found: list[NamedSession] = []

        async def look(worker: Worker) -> None:
            seen = await worker.look_at_all(LOOK_TIMEOUT_S)
            found.extend(() if seen is None else seen.named[:MAX_NAMED])

        async with anyio.create_task_group() as looking:
            for other in self._posts.of(post.tenant):
                has_some = is_of_name(other.place) or (other.account is not None and bool(other.account.named))
                if has_some and other is not post and other.worker is not None:
                    looking.start_soon(look, other.worker)
        return NamedFound(number, tuple(found[:MAX_NAMED])), None


def of_tenant(tenant: Tenant) -> str:
    """Return the beginning of a line of the log about a worker."""
    return f"{tenant.name}: " if tenant.name else ""

"""WorkerPosts: the successive workers of one place, and the place of each tenant."""

from __future__ import annotations

import time

import anyio
import attrs

from djinn.errors import DjinnError
from djinn_plugins.server.control import Setup
from djinn_plugins.server.counters import WorkerReport
from djinn_plugins.server.device_leases import LeaseClient
from djinn_plugins.server.isolation import SPARE
from djinn_plugins.server.metrics_store import Account
from djinn_plugins.server.tenants import Tenant
from djinn_plugins.server.worker_process import Worker

__all__ = ("WorkerPost", "WorkerPosts")


@attrs.define(eq=False)
class WorkerPost:
    """The successive workers of one place: those of a tenant whose sessions share a worker have the same place.

    Attributes:
        tenant, place: Whose it is; see `djinn_plugins.server.isolation.place_of`.
        handed_s: When a client was sent to it last.
        idle_since_s: Since when its worker has reported that it has no sessions; ``None`` if it has some.
        is_used: Whether it has sessions, or was sent a client that it has not reported yet.
        account: Its worker's reports, while that serves.
        use_place, parts, keep_bytes: What its worker has of its tenant's limits; see
        `djinn_plugins.server.shares.Shares`.
    """

    tenant: Tenant
    place: str
    setup: Setup
    ended: anyio.Event = attrs.field(factory=anyio.Event)
    starting: anyio.CancelScope = attrs.field(factory=anyio.CancelScope)
    worker: Worker | None = None
    customer: LeaseClient | None = None
    device: int = 0
    is_placed: bool = False
    is_beginning: bool = False
    """Whether a process for it is being started."""
    is_ready: bool = False
    is_ending: bool = False
    is_drained: bool = False
    failures: int = 0
    is_excused: bool = False
    """Whether a session's program is known to have killed the last worker, so that only its owner has to wait."""
    problem: DjinnError | None = None
    handed_s: float = attrs.field(factory=time.monotonic)
    idle_since_s: float | None = None
    is_used: bool = False
    is_spare: bool = False
    """Whether its worker was started for an owner that has not come yet."""
    account: Account | None = None
    use_place: int | None = None
    parts: int = 1
    keep_bytes: int = 0

    def heed(self, report: WorkerReport) -> None:
        """Note whether its worker has sessions, or values of sessions that have a name."""
        if self.account is not None:
            self.account.heed(report)
        self.is_used = bool(report.amounts.sessions or report.named)
        if self.is_used:
            self.idle_since_s = None
        elif self.idle_since_s is None:
            self.idle_since_s = time.monotonic()

    def idle_s(self) -> float:
        """Return how long no client has used its worker; 0 while one does."""
        if not self.is_ready or self.is_ending or self.idle_since_s is None:
            return 0.0
        return time.monotonic() - max(self.idle_since_s, self.handed_s)


class WorkerPosts:
    """All posts, by tenant and place.

    Concurrency:
        Tasks of one event loop; any thread calls `all`.
    """

    def __init__(self) -> None:
        self._posts: dict[tuple[str, str], WorkerPost] = {}

    def all(self) -> list[WorkerPost]:
        """List them."""
        return list(self._posts.values())

    def of(self, tenant: Tenant) -> list[WorkerPost]:
        """List those of a tenant."""
        return [post for post in self.all() if post.tenant.name == tenant.name and post.tenant.key == tenant.key]

    def strangers(self, tenant: Tenant) -> list[WorkerPost]:
        """List those of an earlier tenant of the same name that have not begun to end."""
        return [post for post in self.all() if post.tenant.name == tenant.name and post.tenant.key != tenant.key
                and not post.is_ending]

    def find(self, tenant: Tenant, place: str) -> WorkerPost | None:
        """Return the post of a place, unless it is ending. If there is none, the spare one has that place then."""
        for wanted in (place, SPARE):
            post = self._posts.get((tenant.name, wanted))
            if post is not None and not post.is_ending and post.tenant.key == tenant.key:
                if wanted != place:
                    self.remove(post)
                    post.place, post.is_spare = place, False
                    if post.account is not None:
                        post.account.is_spare = False
                    self.add(post)
                return post
        return None

    def add(self, post: WorkerPost) -> None:
        """Add a post. One of the same place that is ending is no longer found."""
        self._posts[post.tenant.name, post.place] = post

    def remove(self, post: WorkerPost) -> None:
        """Remove a post, if it is there."""
        if self._posts.get((post.tenant.name, post.place)) is post:
            del self._posts[post.tenant.name, post.place]

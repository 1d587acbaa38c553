"""How the workers of a tenant share its limits: memory for their amounts, and the part that each of them may have."""

from __future__ import annotations

from djinn_plugins.server.control import Part, SharedUse
from djinn_plugins.server.isolation import SPARE
from djinn_plugins.server.posts import WorkerPost, WorkerPosts
from djinn_plugins.server.tenant_use import TenantUse
from djinn_plugins.server.tenants import Tenant

__all__ = ("Shares",)

STEP = 32
"""A worker is told of another limit of its kept uploads if that changes by one part in so many."""


class Shares:
    """Shares the limits of each tenant among its workers.

    Memory is divided equally among the workers that have sessions. Of the uploads that a tenant may keep, a worker has
    what the others leave, and an equal part at least; shared uploads cost it a part.

    Args:
        posts: All posts.
        keep_bytes: Bytes of uploads that a tenant's workers may keep together.

    Concurrency:
        Tasks of one event loop.
    """

    def __init__(self, posts: WorkerPosts, keep_bytes: int) -> None:
        self._posts = posts
        self._keep_bytes = keep_bytes
        self._uses: dict[tuple[str, str], TenantUse] = {}
        self._changed: dict[tuple[str, str], Tenant] = {}

    def join(self, post: WorkerPost) -> tuple[SharedUse, int]:
        """Give a new worker its place, and return what to send it, with the descriptor of the shared memory.

        Raises:
            OSError: There is no memory.
        """
        key = post.tenant.name, post.tenant.key
        use = self._uses.get(key)
        if use is None:
            use = self._uses[key] = TenantUse()
        # A spare worker is told its part when it has an owner.
        post.use_place, post.parts, post.keep_bytes = use.take(), int(post.place != SPARE), self._keep_bytes
        return SharedUse(post.use_place), use.descriptor

    def leave(self, post: WorkerPost) -> None:
        """Take back what a worker that has ended had."""
        key = post.tenant.name, post.tenant.key
        use = self._uses.get(key)
        if use is not None and post.use_place is not None:
            use.free(post.use_place)
            post.use_place = None
            self._changed[key] = post.tenant
            if use.is_empty:
                del self._uses[key]

    def note(self, tenant: Tenant) -> None:
        """Note that the workers of a tenant use another amount."""
        self._changed[tenant.name, tenant.key] = tenant

    async def divide_changed(self) -> None:
        """Divide anew the memory of tenants whose workers use another amount."""
        changed, self._changed = self._changed, {}
        for tenant in changed.values():
            await self.divide(tenant)

    async def divide(self, tenant: Tenant) -> None:
        """Tell the workers of a tenant their parts, if these have changed."""
        posts = [post for post in self._posts.of(tenant) if post.is_ready and not post.is_ending]
        has_limit = tenant.limits.memory_bytes or tenant.limits.host_bytes
        used = [post for post in posts if post.is_used] or posts[:1]
        parts = max(1, len(used)) if has_limit else 1
        for post, keep_bytes in self._kept(posts).items():
            keeps_other = abs(keep_bytes - post.keep_bytes) * STEP > self._keep_bytes
            if post.account is not None:
                post.account.limit_bytes = tenant.limits.memory_bytes // parts if post in used else 0
            if post.worker is None or post.place == SPARE or (post.parts == parts and not keeps_other):
                continue
            post.parts = parts
            if keeps_other:
                post.keep_bytes = keep_bytes
            await post.worker.tell(Part(parts, post.keep_bytes if keeps_other else None))

    def _kept(self, posts: list[WorkerPost]) -> dict[WorkerPost, int]:
        """Return how many bytes of uploads each worker may keep."""
        of_others = {post: 0 if post.account is None else post.account.charged_to_others() for post in posts}
        charged = {post: 0 if post.account is None else max(0, post.account.amounts.kept_bytes - of_others[post])
                   for post in posts}
        total = sum(charged.values())
        return {post: max(self._keep_bytes // len(posts), self._keep_bytes - total + charged[post]) + of_others[post]
                for post in posts}

"""The supervisor: starts workers for tenants and their owners, and replaces a worker that dies."""

from __future__ import annotations

import itertools
import logging
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from functools import partial

import anyio
import msgspec

from djinn.errors import DjinnError, LimitError, RefusedError, TransportError
from djinn_plugins.executor.peer_exchange import no_mailbox
from djinn_plugins.server.authentication import NoWorkerError
from djinn_plugins.server.changes import Changes
from djinn_plugins.server.control import ControlMessage, Drain, Setup, Stop
from djinn_plugins.server.counters import WorkerReport
from djinn_plugins.server.device_leases import LeaseClient, LeaseManager
from djinn_plugins.server.dialing import Exchange
from djinn_plugins.server.draining import server_drains
from djinn_plugins.server.event_loop import Tasks
from djinn_plugins.server.housekeeping import Housekeeping, of_tenant
from djinn_plugins.server.isolation import SPARE, are_cpus, boundary_of, is_of_one_session
from djinn_plugins.server.kinds.admission import AdmissionPolicy, ServerLoad
from djinn_plugins.server.metrics_store import MetricsStore
from djinn_plugins.server.models import GatewayModels
from djinn_plugins.server.options import ServeOptions
from djinn_plugins.server.oversight import Offenders
from djinn_plugins.server.placement import default_places, least_loaded
from djinn_plugins.server.posts import WorkerPost, WorkerPosts
from djinn_plugins.server.shared_uploads import GatewayUploads
from djinn_plugins.server.shares import Shares
from djinn_plugins.server.spawning import ForkServer
from djinn_plugins.server.tenant_limits import MAX_WORKERS
from djinn_plugins.server.tenants import Tenant, token_ended
from djinn_plugins.server.tickets import KEY_BYTES
from djinn_plugins.server.turn_queue import TurnSettings
from djinn_plugins.server.worker_process import Worker
from djinn_plugins.transport.resumption import no_session

__all__ = ("Supervisor",)

PATIENCE_S = 30.0
"""How long a client waits for a worker."""
PREFIX_BYTES = 3
"""Length of the prefix in the 16 bytes of a mailbox's key; the other 13 are enough to prevent guessing."""
FIRST_DELAY_S = 0.2
DISPLACED_S = 1.0
"""Time that running programs get after their tenant's name has passed to another tenant."""
MAX_PAUSE_S = 0.25
"""How long a client that has to wait for its turn to get a worker waits before it is informed."""
SPARE_DELAY_S = 0.5
"""How long after an owner has got the spare worker the next one is started: the owner's first programs go first."""
MAX_DELAY_S = 30.0
"""Longest delay before a dead worker is replaced. The delay doubles each time, and starts afresh after a worker that
served for longer than this."""
_log = logging.getLogger("djinn.server")


class Supervisor:
    """Keeps a worker running for each tenant that has connected, or for each of its owners.

    Args:
        setup: What the setups of all workers have in common.
        tasks: Where it attends to workers.
        environment: Environment variables of the workers.
        admission: Orders the turns on each device.
        ledger: Collects the workers' reports; the supervisor has its own by default.
        forkserver: Forks workers; without it, each worker starts as a new process.
        exchange: Connects workers to other servers; without it, they reach none.
        models: Gives workers models; without it, there are none.
        uploads: Lets workers share uploads; without it, none do.
        keep_bytes: Bytes of uploads that the workers of a tenant may keep together.
        places: For each device: environment variables of a worker that is to see only this one, and its name there.

    Attributes:
        boundary: Which sessions of a tenant share a worker.
        ledger: The workers' reports.
        offenders: Clients that have to wait because their programs killed a worker.

    Concurrency:
        Tasks of one event loop; any thread calls `why_not_ready` and `load`.
    """

    def __init__(self, setup: Setup, environment: dict[str, str], admission: AdmissionPolicy, tasks: Tasks, *,
                 ledger: MetricsStore | None = None, forkserver: ForkServer | None = None,
                 exchange: Exchange | None = None, models: GatewayModels | None = None,
                 uploads: GatewayUploads | None = None, keep_bytes: int = 0,
                 places: Sequence[tuple[Mapping[str, str], str]] = ()) -> None:
        self.ledger = ledger or MetricsStore()
        self.offenders = Offenders()
        self.boundary = boundary_of(setup.options)
        self._setup = setup
        self._devices = setup.options.device.names
        self._places = places or [({}, device) for device in self._devices]
        self._desk = LeaseManager([
            (TurnSettings(setup.options.fairness.device_turns or places), admission.order_of(device))
            for device, places in zip(self._devices, default_places(
                self._devices, setup.options.device.threads or 0), strict=True)])
        self._environment = environment
        self._forkserver = forkserver
        self._exchange = exchange
        self._models = models
        self._uploads = uploads
        self._tasks = tasks
        self._changes = Changes()
        self._posts = WorkerPosts()
        self._shares = Shares(self._posts, keep_bytes)
        self._keeper = Housekeeping(self._posts, self._shares, tasks, setup.options.workers.idle_s, self._end)
        self._numbers = itertools.count(1)
        self._stopping = False
        self._draining = False

    def begin(self) -> None:
        """Begin to listen to the forkserver, and to look for idle workers."""
        if self._forkserver is not None:
            self._tasks.spawn(self._forkserver.run)
        if self.boundary != "tenant":
            self._tasks.spawn(self._keeper.run)

    async def worker_of(self, tenant: Tenant, place: str = "", *, patience_s: float | None = PATIENCE_S,
                        is_first: bool = False) -> Worker:
        """Return a worker of a tenant as soon as it serves.

        Args:
            tenant: The tenant.
            place: Which of its sessions share the worker; see `djinn_plugins.server.isolation.place_of`.
            patience_s: How long to wait for the worker; ``None`` for no limit.
            is_first: Give up at once if the worker cannot start.

        Raises:
            RefusedError: No worker serves at the moment: a `NoWorkerError` if one may soon.
            LimitError: The tenant has as many as it may have, and none is idle.
            DjinnError: The reason why the worker could not start, if ``is_first``.
        """
        if self._draining:
            raise server_drains()
        post = await self._post_of(tenant, place)
        if post is not None:
            post.handed_s = time.monotonic()
            await self._changes.wait_for(
                lambda: post.is_ready or post.is_ending or self._draining or (
                    is_first and post.problem is not None), patience_s)
            if post.is_ready:
                await self._hand_to(post)
            if post.is_ready and post.worker is not None:
                return post.worker
            if is_first and post.problem is not None:
                raise post.problem
        if self._draining:
            raise server_drains()
        if post is None or post.is_ending:
            raise RefusedError("The tenant's sessions, or the server, are ending.", hint="Try again in a second.",
                               retry_after_s=1.0)
        raise _none_yet(is_starting=post.is_beginning or post.worker is not None)

    async def _post_of(self, tenant: Tenant, place: str) -> WorkerPost | None:
        """Return the post of a place, a new one if there is none; ``None`` when the server stops.

        Raises:
            LimitError: There are as many as there may be, and none is idle.
            NoWorkerError: Too many have been started lately.
        """
        while not self._stopping:
            if (post := self._posts.find(tenant, place)) is not None:
                self._order_spare(tenant)
                return post
            # The workers of an earlier tenant of that name, or this place's last one, end while the new one starts.
            for stranger in self._posts.strangers(tenant):
                stranger.is_ending = True
                self._tasks.spawn(self._end, stranger, DISPLACED_S, token_ended())
            if self._keeper.has_room(tenant):
                if pause_s := self._keeper.pause_before_start(tenant):
                    await anyio.sleep(min(pause_s, MAX_PAUSE_S))
                    raise _none_yet(is_starting=True)
                post = self._begin(tenant, place)
                self._order_spare(tenant)
                return post
            if not await self._keeper.make_room(tenant):
                most = tenant.limits.workers or MAX_WORKERS
                raise LimitError(
                    f"There are {most} processes for owners already, each has sessions, and that is the limit.",
                    hint="Try again when another client has ended. The server's operator may raise --max-workers, or "
                         "let clients share a process with --isolate tenant.", retry_after_s=1.0)
        return None

    def _begin(self, tenant: Tenant, place: str) -> WorkerPost:
        post = WorkerPost(tenant, place, self._setup_for(tenant))
        self._posts.add(post)
        self._tasks.spawn(self._attend, post)
        return post

    def _order_spare(self, tenant: Tenant) -> None:
        if self._is_spare_due(tenant):
            self._tasks.spawn(self._prepare_spare, tenant)

    def _is_spare_due(self, tenant: Tenant) -> bool:
        """Whether a tenant is to have a worker for the next owner: on a CPU, if it is the only tenant."""
        return (self.boundary != "tenant" and not tenant.name and self._keeper.has_room(tenant)
                and are_cpus(self._devices)
                and not any(post.place == SPARE for post in self._posts.of(tenant)))

    async def _prepare_spare(self, tenant: Tenant) -> None:
        await anyio.sleep(SPARE_DELAY_S)
        if not self._stopping and not self._draining and self._is_spare_due(tenant):
            self._begin(tenant, SPARE).is_spare = True

    def present_worker(self, tenant: Tenant, key: bytes) -> Worker:
        """Return the worker of a tenant that a key belongs to that resumes a session, if it is serving now.

        Raises:
            RefusedError: No such worker is serving, so the session is gone, too.
        """
        for post in self._posts.of(tenant):
            if post.is_ready and post.worker is not None and key.startswith(post.worker.mailbox_prefix):
                post.handed_s = time.monotonic()
                return post.worker
        raise no_session()

    async def _hand_to(self, post: WorkerPost) -> None:
        """Note that a client is sent to a post."""
        post.handed_s = time.monotonic()
        if not post.is_used and post.place != SPARE:
            post.is_used = True
            if self.boundary != "tenant":
                await self._shares.divide(post.tenant)

    def worker_with(self, mailbox: bytes) -> Worker:
        """Return the worker that a mailbox belongs to, by the prefix of its key.

        Raises:
            RefusedError: No worker has that prefix.
        """
        for post in self._posts.all():
            if post.worker is not None and post.is_ready and mailbox.startswith(post.worker.mailbox_prefix):
                return post.worker
        raise no_mailbox()

    def _setup_for(self, tenant: Tenant) -> Setup:
        return msgspec.structs.replace(self._setup, tenant=tenant.name, limits=tenant.limits)

    def _new_prefix(self) -> bytes:
        used = {post.worker.mailbox_prefix for post in self._posts.all() if post.worker is not None}
        while (made := secrets.token_bytes(PREFIX_BYTES)) in used:
            pass
        return made

    def why_not_ready(self) -> str:
        """Say why sessions cannot begin: workers are needed, and none serves. Empty if sessions can begin."""
        posts = self._posts.all()
        if self._stopping:
            return "The server is ending."
        if self._draining:
            return "The server is draining: it waits for its sessions to end, and takes no new ones."
        if not posts or any(post.is_ready for post in posts):
            return ""
        return "No worker serves at the moment; the server's log says why."

    def workers(self) -> list[tuple[Tenant, Worker]]:
        """List the workers that are serving."""
        return [(post.tenant, post.worker) for post in self._posts.all()
                if post.is_ready and post.worker is not None]

    def tenants(self) -> list[Tenant]:
        """List the tenants that have workers."""
        return list({(post.tenant.name, post.tenant.key): post.tenant for post in self._posts.all()}.values())

    def load(self, tenant: Tenant) -> ServerLoad:
        """Return the load when a session of a tenant is about to begin."""
        sessions = self.ledger.sessions()
        return ServerLoad(sessions.get(tenant.name, 0), sum(sessions.values()), len(self.workers()),
                          self._desk.waiting())

    async def change(self, tenant: Tenant) -> None:
        """Apply a tenant's new limits and weight to its workers."""
        for post in self._posts.of(tenant):
            if post.tenant == tenant:
                continue
            post.tenant, post.setup = tenant, msgspec.structs.replace(post.setup, limits=tenant.limits)
            if post.customer is not None:
                self._desk.reweigh(post.customer, tenant.weight)
            if post.worker is not None:
                await post.worker.tell(tenant.limits)

    async def tell(self, tenant: Tenant, message: ControlMessage) -> bool:
        """Send a message to a tenant's workers, and return whether it has any."""
        workers = [post.worker for post in self._posts.of(tenant) if post.worker is not None]
        for worker in workers:
            await worker.tell(message)
        return bool(workers)

    async def end(self, tenant: Tenant, timeout_s: float, why: DjinnError | None = None) -> bool:
        """End a tenant's workers and their sessions.

        Args:
            tenant: The tenant.
            timeout_s: How long running programs may continue.
            why: The reason to give to clients.

        Returns:
            Whether the workers exited in time; otherwise they are killed.
        """
        ended: list[bool] = []

        async def end(post: WorkerPost) -> None:
            ended.append(await self._end(post, timeout_s, why))

        async with anyio.create_task_group() as ending:
            for post in self._posts.of(tenant):
                ending.start_soon(end, post)
        return all(ended)

    async def _end(self, post: WorkerPost, timeout_s: float, why: DjinnError | None = None) -> bool:
        post.is_ending = True
        self._changes.notify()
        post.starting.cancel()
        worker = post.worker
        if post.customer is not None:
            # Other tenants need not wait for programs that this worker still runs.
            self._desk.leave(post.customer)
        with anyio.move_on_after(timeout_s + 1):
            if worker is not None:
                if not post.is_ready:
                    worker.kill()
                await worker.tell(Stop(timeout_s) if why is None else Stop(timeout_s, why.code, why.summary, why.hint))
            await post.ended.wait()
            return True
        _log.warning("worker %d does not end: killed", worker.pid if worker is not None else 0)
        if worker is not None:
            worker.kill()
        with anyio.move_on_after(1):
            await post.ended.wait()
        return False

    def renew(self, options: ServeOptions) -> list[Worker]:
        """Use other options for later workers, and return the workers that run now."""
        self._setup = msgspec.structs.replace(self._setup, options=options.without_token())
        for post in self._posts.all():
            post.setup = self._setup_for(post.tenant)
        return [post.worker for post in self._posts.all() if post.worker is not None]

    async def drain(self) -> None:
        """Refuse new sessions. Existing sessions can still be resumed when their connections break."""
        self._draining = True
        self._changes.notify()
        async with anyio.create_task_group() as messages:
            for post in self._posts.all():
                if post.worker is not None:
                    messages.start_soon(post.worker.tell, Drain())

    async def wait_drained(self) -> None:
        """Wait until the last session has ended since `drain`."""
        await self._changes.wait_for(lambda: self.is_drained)

    @property
    def is_drained(self) -> bool:
        """Whether the last session has ended since `drain`."""
        # A worker that is not serving has no sessions.
        return self._draining and all(post.is_drained or not post.is_ready for post in self._posts.all())

    async def stop(self, timeout_s: float) -> bool:
        """End all workers, and return whether all of them exited in time."""
        self._stopping = True
        ended: list[bool] = []

        async def end(tenant: Tenant) -> None:
            ended.append(await self.end(tenant, timeout_s))

        async with anyio.create_task_group() as ending:
            for tenant in self.tenants():
                ending.start_soon(end, tenant)
        self._desk.close()
        return all(ended)

    async def _attend(self, post: WorkerPost) -> None:
        """Run one worker after another until the post ends."""
        try:
            while not post.is_ending:
                served_s = await self._run_once(post)
                self._shares.leave(post)
                if is_of_one_session(post.place) or post.is_ending:
                    break
                if served_s > MAX_DELAY_S or post.is_excused:
                    post.failures = 0
                post.failures, post.is_excused = post.failures + 1, False
                delay_s = min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** min(post.failures - 1, 16))
                _log.warning("%sanother worker starts in %g s", of_tenant(post.tenant), delay_s)
                await self._changes.wait_for(lambda: post.is_ending, delay_s)
        finally:
            self._posts.remove(post)
            post.is_ending = True
            post.ended.set()
            self._changes.notify()

    async def _run_once(self, post: WorkerPost) -> float:
        """Run one worker until it ends, and return how long it served."""
        self._choose_device(post)
        variables, device = self._places[post.device]
        setup = msgspec.structs.replace(post.setup, ticket_key=secrets.token_bytes(KEY_BYTES),
                                        mailbox_prefix=self._new_prefix(), device=device,
                                        shares_use=self.boundary != "tenant", is_spare=post.is_spare)
        worker, post.idle_since_s = None, None
        post.is_beginning = True
        with anyio.CancelScope() as post.starting:
            try:
                use = self._shares.join(post) if setup.shares_use else None
                worker = await Worker.begin(setup, {**self._environment, **variables}, self._forkserver, use)
            except OSError as error:
                self._note(post, TransportError(f"No worker could be started: {error}."))
        post.is_beginning = False
        if worker is None:
            return 0.0
        post.worker = worker
        if post.is_ending:
            worker.kill()
        try:
            await worker.await_ready()
        except DjinnError as error:
            worker.kill()
            await worker.reap()
            self._note(post, error)
            return 0.0
        began = time.monotonic()
        where = f" on {self._devices[post.device]} ({post.device})" if len(self._devices) > 1 else ""
        _log.info("%sworker %d serves%s", of_tenant(post.tenant), worker.pid, where)
        await self._attend_sessions(post, worker, setup)
        # A worker that has closed its standard input will not serve again.
        if not post.is_ending:
            worker.kill()
        status = await worker.reap()
        if not post.is_ending:
            self.ledger.restarted(post.tenant.name, worker.cause or (_told(status) if status < 0 else "exit"))
            post.is_excused = self._blame(post, worker)
        (_log.info if post.is_ending else _log.error)(  # no bug
            "%sworker %d has ended: %s", of_tenant(post.tenant), worker.pid, _told(status))
        post.worker = post.customer = None
        return time.monotonic() - began

    async def _attend_sessions(self, post: WorkerPost, worker: Worker, setup: Setup) -> None:
        """Attend to a worker that serves, until it ends."""
        customer = post.customer = None if worker.turns is None else LeaseClient(
            str(next(self._numbers)), post.tenant.name, post.device, worker.turns, worker.is_stopped)
        if customer is not None:
            self._desk.join(customer, post.tenant.weight)
        self._note(post, None, is_ready=True)
        if self._draining:
            await worker.tell(Drain())
        account = post.account = self.ledger.open(post.tenant.name, setup.limits.memory_bytes, post.device)
        account.is_spare = post.is_spare
        if post.is_spare:
            account.limit_bytes = 0
        if self._uploads is not None:
            account.charged_to_others = partial(worker.charged_to_others, self._uploads)
        try:
            await worker.watch(partial(self._heed, post), lambda: self._drained(post), self._exchange,
                               self._models, self._uploads, lambda: post.tenant, partial(self._keeper.find_named, post))
        finally:
            # Closed before the post stops being ready, so that a reader never sees both a live account and no worker.
            self.ledger.close(account)
            post.account = None
            if customer is not None:
                self._desk.leave(customer)
            self._note(post, None)

    def _heed(self, post: WorkerPost, report: WorkerReport) -> None:
        post.heed(report)
        self._shares.note(post.tenant)

    def _blame(self, post: WorkerPost, worker: Worker) -> bool:
        """Delay the owner of the program that a worker died of, and return whether that owner is known.

        Applies only to the worker that unnamed tenants share. A named tenant has its own worker, and waits for its
        restart.
        """
        running = worker.board.read()
        if running is None or not running.owner_digest or post.tenant.name:
            return False
        delay_s = self.offenders.add(running.owner_digest)
        _log.warning("worker %d has died while it ran a program of session %s, whose client waits %g s", worker.pid,
                     running.session, delay_s)
        return True

    def _drained(self, post: WorkerPost) -> None:
        post.is_drained = True
        self._changes.notify()

    def _choose_device(self, post: WorkerPost) -> None:
        """Choose a device for a worker. A new worker may get another device, since its sessions have no values yet."""
        others = [other.device for other in self._posts.all() if other is not post and other.is_placed]
        post.device = least_loaded(self.ledger.loads([others.count(n) for n in range(len(self._devices))]))
        post.is_placed = True

    def _note(self, post: WorkerPost, problem: DjinnError | None, *, is_ready: bool = False) -> None:
        if problem is not None:
            _log.error("%sa worker could not begin: %s", of_tenant(post.tenant), problem)
            if not post.is_ending:
                self.ledger.restarted(post.tenant.name, "start")
        post.problem, post.is_ready = problem, is_ready
        if problem is not None:
            post.worker = None
        self._changes.notify()


def _none_yet(*, is_starting: bool) -> NoWorkerError:
    error = NoWorkerError("The server has no worker for this session at the moment.",
                          hint="Try again in a few seconds; the server's log says why.")
    error.is_starting = is_starting
    return error


def _told(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"

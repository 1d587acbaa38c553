"""The supervisor: starts a worker for each tenant, and replaces a worker that dies."""

from __future__ import annotations

import logging
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from functools import partial

import anyio
import attrs
import msgspec
from djinn_lib_server.kinds.admission import AdmissionPolicy, ServerLoad
from djinn_lib_server.options import ServeOptions
from djinn_lib_server.tenants import Tenant, token_ended
from djinn_lib_server.turn_queue import TurnSettings
from djinn_lib_service.peer_exchange import no_mailbox
from djinn_lib_service.resumption import no_session

from djinn.errors import DjinnError, RefusedError, TransportError
from djinn_server.authentication import NoWorkerError
from djinn_server.changes import Changes
from djinn_server.control import ControlMessage, Drain, Setup, Stop
from djinn_server.device_leases import LeaseClient, LeaseManager
from djinn_server.dialing import Exchange
from djinn_server.draining import server_drains
from djinn_server.event_loop import Tasks
from djinn_server.metrics_store import MetricsStore
from djinn_server.models import GatewayModels
from djinn_server.oversight import Offenders
from djinn_server.placement import default_places, least_loaded
from djinn_server.shared_uploads import GatewayUploads
from djinn_server.spawning import ForkServer
from djinn_server.tickets import KEY_BYTES
from djinn_server.worker_process import Worker

__all__ = ("Supervisor",)

PATIENCE_S = 30.0
"""How long a client waits for a worker."""
PREFIX_BYTES = 3
"""Length of the prefix in the 16 bytes of a mailbox's key; the other 13 are enough to prevent guessing."""
FIRST_DELAY_S = 0.2
DISPLACED_S = 1.0
"""Time that running programs get after their tenant's name has passed to another tenant."""
MAX_DELAY_S = 30.0
"""Longest delay before a dead worker is replaced. The delay doubles each time, and starts afresh after a worker that
served for longer than this."""
_log = logging.getLogger("djinn.server")


@attrs.define(eq=False)
class _Post:
    """The successive workers of one tenant."""

    tenant: Tenant
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


class Supervisor:
    """Keeps one worker running for each tenant that has connected.

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
        places: For each device: environment variables of a worker that is to see only this one, and its name there.

    Attributes:
        ledger: The workers' reports.
        offenders: Clients that have to wait because their programs killed a worker.

    Concurrency:
        Tasks of one event loop; any thread calls `why_not_ready` and `load`.
    """

    def __init__(self, setup: Setup, environment: dict[str, str], admission: AdmissionPolicy, tasks: Tasks, *,
                 ledger: MetricsStore | None = None, forkserver: ForkServer | None = None,
                 exchange: Exchange | None = None, models: GatewayModels | None = None,
                 uploads: GatewayUploads | None = None,
                 places: Sequence[tuple[Mapping[str, str], str]] = ()) -> None:
        self.ledger = ledger or MetricsStore()
        self.offenders = Offenders()
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
        self._posts: dict[str, _Post] = {}
        self._stopping = False
        self._draining = False

    def begin(self) -> None:
        """Begin to listen to the forkserver."""
        if self._forkserver is not None:
            self._tasks.spawn(self._forkserver.run)

    async def worker_of(self, tenant: Tenant, *, patience_s: float | None = PATIENCE_S, is_first: bool = False
                        ) -> Worker:
        """Return a tenant's worker as soon as it serves.

        Args:
            tenant: The tenant.
            patience_s: How long to wait for the worker; ``None`` for no limit.
            is_first: Give up at once if the worker cannot start.

        Raises:
            RefusedError: No worker serves at the moment: a `NoWorkerError` if one may soon.
            DjinnError: The reason why the worker could not start, if ``is_first``.
        """
        if self._draining:
            raise server_drains()
        post = self._post_of(tenant)
        if post is not None:
            await self._changes.wait_for(
                lambda: post.is_ready or post.is_ending or self._draining or (
                    is_first and post.problem is not None), patience_s)
            if post.is_ready and post.worker is not None:
                return post.worker
            if is_first and post.problem is not None:
                raise post.problem
        if self._draining:
            raise server_drains()
        if post is None or post.is_ending:
            raise RefusedError("The tenant's sessions, or the server, are ending.", hint="Try again in a second.",
                               retry_after_s=1.0)
        error = NoWorkerError("The server has no worker for this session at the moment.",
                              hint="Try again in a few seconds; the server's log says why.")
        error.is_starting = post.is_beginning or post.worker is not None
        raise error

    def _post_of(self, tenant: Tenant) -> _Post | None:
        """Return a tenant's post, a new one if there is none; ``None`` when the server stops."""
        if self._stopping:
            return None
        post = self._posts.get(tenant.name)
        if post is not None and not post.is_ending and post.tenant.key == tenant.key:
            return post
        # The worker of an earlier tenant of that name, or this tenant's last one, ends while the new one starts.
        if post is not None and not post.is_ending:
            self._tasks.spawn(self._end, post, DISPLACED_S, token_ended())
        post = self._posts[tenant.name] = _Post(tenant, self._setup_for(tenant))
        self._tasks.spawn(self._attend, post)
        return post

    def present_worker(self, tenant: Tenant) -> Worker:
        """Return a tenant's worker if it is serving now.

        Raises:
            RefusedError: No worker is serving, so there are no sessions either.
        """
        post = self._posts.get(tenant.name)
        if post is None or post.tenant.key != tenant.key or not post.is_ready or post.worker is None:
            raise no_session()
        return post.worker

    def worker_with(self, mailbox: bytes) -> Worker:
        """Return the worker that a mailbox belongs to, by the prefix of its key.

        Raises:
            RefusedError: No worker has that prefix.
        """
        for post in self._posts.values():
            if post.worker is not None and post.is_ready and mailbox.startswith(post.worker.mailbox_prefix):
                return post.worker
        raise no_mailbox()

    def _setup_for(self, tenant: Tenant) -> Setup:
        return msgspec.structs.replace(self._setup, tenant=tenant.name, limits=tenant.limits)

    def _new_prefix(self) -> bytes:
        used = {post.worker.mailbox_prefix for post in self._posts.values() if post.worker is not None}
        while (made := secrets.token_bytes(PREFIX_BYTES)) in used:
            pass
        return made

    def why_not_ready(self) -> str:
        """Say why sessions cannot begin: workers are needed, and none serves. Empty if sessions can begin."""
        posts = list(self._posts.values())
        if self._stopping:
            return "The server is ending."
        if self._draining:
            return "The server is draining: it waits for its sessions to end, and takes no new ones."
        if not posts or any(post.is_ready for post in posts):
            return ""
        return "No worker serves at the moment; the server's log says why."

    def workers(self) -> list[tuple[Tenant, Worker]]:
        """List the workers that are serving."""
        return [(post.tenant, post.worker) for post in list(self._posts.values())
                if post.is_ready and post.worker is not None]

    def tenants(self) -> list[Tenant]:
        """List the tenants that have workers."""
        return [post.tenant for post in self._posts.values()]

    def load(self, tenant: Tenant) -> ServerLoad:
        """Return the load when a session of a tenant is about to begin."""
        sessions = self.ledger.sessions()
        return ServerLoad(sessions.get(tenant.name, 0), sum(sessions.values()), len(self.workers()),
                          self._desk.waiting())

    async def change(self, tenant: Tenant) -> None:
        """Apply a tenant's new limits and weight to its worker."""
        post = self._posts.get(tenant.name)
        if post is None or post.tenant == tenant or post.tenant.key != tenant.key:
            return
        post.tenant, post.setup = tenant, msgspec.structs.replace(post.setup, limits=tenant.limits)
        if post.customer is not None:
            self._desk.reweigh(post.customer, tenant.weight)
        if post.worker is not None:
            await post.worker.tell(tenant.limits)

    async def tell(self, tenant: Tenant, message: ControlMessage) -> bool:
        """Send a message to a tenant's worker, and return whether it has one."""
        post = self._posts.get(tenant.name)
        worker = post.worker if post is not None and post.tenant.key == tenant.key else None
        if worker is not None:
            await worker.tell(message)
        return worker is not None

    async def end(self, tenant: Tenant, timeout_s: float, why: DjinnError | None = None) -> bool:
        """End a tenant's worker and its sessions.

        Args:
            tenant: The tenant.
            timeout_s: How long running programs may continue.
            why: The reason to give to clients.

        Returns:
            Whether the worker exited in time; otherwise it is killed.
        """
        post = self._posts.get(tenant.name)
        return post is None or post.tenant.key != tenant.key or await self._end(post, timeout_s, why)

    async def _end(self, post: _Post, timeout_s: float, why: DjinnError | None = None) -> bool:
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
        for post in self._posts.values():
            post.setup = self._setup_for(post.tenant)
        return [post.worker for post in self._posts.values() if post.worker is not None]

    async def drain(self) -> None:
        """Refuse new sessions. Existing sessions can still be resumed when their connections break."""
        self._draining = True
        self._changes.notify()
        async with anyio.create_task_group() as messages:
            for post in self._posts.values():
                if post.worker is not None:
                    messages.start_soon(post.worker.tell, Drain())

    async def wait_drained(self) -> None:
        """Wait until the last session has ended since `drain`."""
        await self._changes.wait_for(lambda: self.is_drained)

    @property
    def is_drained(self) -> bool:
        """Whether the last session has ended since `drain`."""
        # A worker that is not serving has no sessions.
        return self._draining and all(post.is_drained or not post.is_ready for post in self._posts.values())

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

    async def _attend(self, post: _Post) -> None:
        """Run one worker after another until the post ends."""
        try:
            while not post.is_ending:
                served_s = await self._run_once(post)
                if post.is_ending:
                    break
                if served_s > MAX_DELAY_S or post.is_excused:
                    post.failures = 0
                post.failures, post.is_excused = post.failures + 1, False
                delay_s = min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** min(post.failures - 1, 16))
                _log.warning("%sanother worker starts in %g s", _for(post.tenant), delay_s)
                await self._changes.wait_for(lambda: post.is_ending, delay_s)
        finally:
            if self._posts.get(post.tenant.name) is post:
                del self._posts[post.tenant.name]
            post.is_ending = True
            post.ended.set()
            self._changes.notify()

    async def _run_once(self, post: _Post) -> float:
        """Run one worker until it ends, and return how long it served."""
        self._choose_device(post)
        variables, device = self._places[post.device]
        setup = msgspec.structs.replace(post.setup, ticket_key=secrets.token_bytes(KEY_BYTES),
                                        mailbox_prefix=self._new_prefix(), device=device)
        worker = None
        post.is_beginning = True
        with anyio.CancelScope() as post.starting:
            try:
                worker = await Worker.begin(setup, {**self._environment, **variables}, self._forkserver)
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
        _log.info("%sworker %d serves%s", _for(post.tenant), worker.pid, where)
        await self._attend_sessions(post, worker, setup)
        # A worker that has closed its standard input will not serve again.
        if not post.is_ending:
            worker.kill()
        status = await worker.reap()
        if not post.is_ending:
            self.ledger.restarted(post.tenant.name, worker.cause or (_told(status) if status < 0 else "exit"))
            post.is_excused = self._blame(post, worker)
        (_log.info if post.is_ending else _log.error)(  # no bug
            "%sworker %d has ended: %s", _for(post.tenant), worker.pid, _told(status))
        post.worker = post.customer = None
        return time.monotonic() - began

    async def _attend_sessions(self, post: _Post, worker: Worker, setup: Setup) -> None:
        """Attend to a worker that serves, until it ends."""
        customer = post.customer = None if worker.turns is None else LeaseClient(
            post.tenant.name, post.device, worker.turns, worker.is_stopped)
        if customer is not None:
            self._desk.join(customer, post.tenant.weight)
        self._note(post, None, is_ready=True)
        if self._draining:
            await worker.tell(Drain())
        account = self.ledger.open(post.tenant.name, setup.limits.memory_bytes, post.device)
        if self._uploads is not None:
            account.charged_to_others = partial(worker.charged_to_others, self._uploads)
        try:
            await worker.watch(account.heed, lambda: self._drained(post), self._exchange, self._models,
                               self._uploads, lambda: post.tenant)
        finally:
            # Closed before the post stops being ready, so that a reader never sees both a live account and no worker.
            self.ledger.close(account)
            if customer is not None:
                self._desk.leave(customer)
            self._note(post, None)

    def _blame(self, post: _Post, worker: Worker) -> bool:
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

    def _drained(self, post: _Post) -> None:
        post.is_drained = True
        self._changes.notify()

    def _choose_device(self, post: _Post) -> None:
        """Choose a device for a worker. A new worker may get another device, since its sessions have no values yet."""
        others = [other.device for other in self._posts.values() if other is not post and other.is_placed]
        post.device = least_loaded(self.ledger.loads([others.count(n) for n in range(len(self._devices))]))
        post.is_placed = True

    def _note(self, post: _Post, problem: DjinnError | None, *, is_ready: bool = False) -> None:
        if problem is not None:
            _log.error("%sa worker could not begin: %s", _for(post.tenant), problem)
            if not post.is_ending:
                self.ledger.restarted(post.tenant.name, "start")
        post.problem, post.is_ready = problem, is_ready
        if problem is not None:
            post.worker = None
        self._changes.notify()


def _for(tenant: Tenant) -> str:
    return f"{tenant.name}: " if tenant.name else ""


def _told(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"

"""The supervisor: starts a worker for each tenant, notices when one dies, and starts another."""

from __future__ import annotations

import logging
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import msgspec

from djinn import errors
from djinn.errors import DjinnError, RefusedError, TransportError
from djinn.kinds.transport import Channel, MovableChannel
from djinn.protocol.messages import Courier, Hello, Redirect
from djinn.protocol.post import no_mailbox
from djinn.protocol.resumption import no_session
from djinn_server.board import Board
from djinn_server.certificates import make_pair, why_none
from djinn_server.control import (
    Ask,
    Control,
    Dial,
    Failed,
    GiveBack,
    Incoming,
    Look,
    Ready,
    Seen,
    SessionState,
    Setup,
    Stop,
)
from djinn_server.counting import Report
from djinn_server.desk import Customer, Desk
from djinn_server.dialing import Exchange
from djinn_server.ledger import Ledger
from djinn_server.limits import memory_limit
from djinn_server.nursery import Child, Nursery
from djinn_server.oversight import Offenders
from djinn_server.placement import least_loaded
from djinn_server.tenants import Tenant
from djinn_server.tickets import KEY_BYTES, issue
from djinn_server.turns import Settings

__all__ = ("Supervisor", "Worker")

START_TIMEOUT_S = 120.0
"""How long a worker may take to begin: a device may have to wake up."""
PATIENCE_S = 30.0
"""How long a client waits for a worker."""
PREFIX_BYTES = 3
"""Of the 16 of a mailbox's key; what is left cannot be guessed either."""
FIRST_DELAY_S = 0.2
MAX_DELAY_S = 30.0
"""Before a worker that died is replaced; each time twice as long, until one has served for as long as the longest."""
_CODES = {kind.code: kind for kind in (getattr(errors, name) for name in errors.__all__)}
_log = logging.getLogger("djinn.server")


class Worker:
    """A worker process.

    Args:
        setup: What it is for.
        environment: Its environment variables.
        nursery: Forks it, if there is one.

    Attributes:
        mailbox_prefix: How the keys of its mailboxes begin.
        board: Whose program it runs.
        cause: Why it was killed, if it was the gateway that did.

    Raises:
        OSError: It could not be started.
    """

    def __init__(self, setup: Setup, environment: dict[str, str], nursery: Nursery | None = None) -> None:
        self._key = setup.ticket_key
        self.mailbox_prefix = setup.mailbox_prefix
        self.board, descriptor = Board.create()
        self.cause = ""
        self._certificate = ""
        if setup.tls_cert and not why_none():
            pair = make_pair()
            self._certificate = pair.certificate
            setup = msgspec.structs.replace(setup, tls_cert="", tls_key="", tls_pair=pair.certificate + pair.key)
        self._port = ""
        self._looking = threading.Lock()
        self._looks = 0
        self._seen: queue.SimpleQueue[Seen] = queue.SimpleQueue()
        try:
            self._process, ours = _begin(environment, nursery)
            self._control = Control(ours)
            self._control.send(setup, descriptor)
        finally:
            os.close(descriptor)

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def await_ready(self) -> None:
        """Wait until it serves.

        Raises:
            DjinnError: It cannot, or died.
        """
        patience = threading.Timer(START_TIMEOUT_S, self._process.kill)
        patience.daemon = True
        patience.start()
        received = self._control.receive()
        patience.cancel()
        message = received[0] if received is not None else None
        if isinstance(message, Failed):
            raise _CODES.get(message.code, DjinnError)(message.summary, hint=message.hint)
        if not isinstance(message, Ready):
            raise TransportError("A worker died before it could begin.", hint="See the server's log for the reason.")
        self._port = message.address.rpartition(":")[2]

    def watch(self, heed: Callable[[Report], None], desk: Desk, customer: Customer,
              exchange: Exchange | None = None) -> None:
        """Wait until it ends, and hear what it tells meanwhile."""
        while (received := self._control.receive()) is not None:
            message = received[0]
            if isinstance(message, Ask):
                desk.ask(customer)
            elif isinstance(message, GiveBack):
                desk.give_back(customer, message.turn, wants_more=message.wants_more)
            elif isinstance(message, Dial) and exchange is not None:
                exchange.connect(message, self._control)
            elif isinstance(message, Report):
                heed(message)
            elif isinstance(message, Seen):
                self._seen.put(message)

    def look(self, timeout_s: float) -> tuple[SessionState, ...] | None:
        """Ask what its sessions do; ``None`` if it does not say so in time."""
        with self._looking:
            self._looks += 1
            self.tell(Look(self._looks))
            deadline = time.monotonic() + timeout_s
            while True:
                try:
                    seen = self._seen.get(timeout=max(0.0, deadline - time.monotonic()))
                except queue.Empty:
                    return None
                if seen.number == self._looks:
                    return seen.sessions

    def is_stopped(self) -> bool:
        """Whether the process stands still, as far as the system tells."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            # Not every system tells; a process that is gone is noticed by whoever waits for it.
            return False
        return state in "TtZX"

    def take(self, channel: Channel, sequence: int, greeting: Hello | Courier) -> None:
        """Give it a client or courier that was let in: the connection itself if that can be, or else the next one.

        Raises:
            TransportError: It is gone.
        """
        try:
            if not self._port and isinstance(channel, MovableChannel):
                if isinstance(greeting, Hello):
                    greeting = msgspec.structs.replace(greeting, token="")
                descriptor, received = channel.detach(sequence, greeting)
                try:
                    self._control.send(Incoming(channel.peer, received), descriptor)
                finally:
                    os.close(descriptor)
            else:
                channel.send(sequence, Redirect(f":{self._port}", issue(self._key), self._certificate))
        except OSError as error:
            raise TransportError(f"The worker {self.pid} takes nobody in: {error}.") from None

    def tell(self, message: msgspec.Struct) -> None:
        """Send it a message, if it is there to receive one."""
        try:
            self._control.send(message)  # type: ignore[arg-type]  # of the kinds that `Control` knows
        except OSError as error:
            _log.info("worker %d receives nothing: %s", self.pid, error)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def end(self, cause: str) -> None:
        """Kill it, for a reason that is counted."""
        self.cause = cause
        self.kill()

    def reap(self) -> int:
        """Wait for its end, and return its status as `subprocess` gives it."""
        status = self._process.wait()
        self._control.close()
        return status


@attrs.define(eq=False)
class _Post:
    """Where a tenant's workers follow each other."""

    tenant: Tenant
    setup: Setup
    thread: threading.Thread | None = None
    worker: Worker | None = None
    customer: Customer | None = None
    device: int = 0
    is_placed: bool = False
    is_ready: bool = False
    is_ending: bool = False
    failures: int = 0
    is_excused: bool = False
    """Whether it is known whose program the last worker died of, so that nobody else need wait."""
    problem: DjinnError | None = None


class Supervisor:
    """Keeps one worker for each tenant that has asked for one.

    Args:
        make_setup: What a tenant's worker is for.
        environment: Its environment variables.
        ledger: What workers tell is entered there; without, in books of its own.
        devices: On which workers compute; without, on that of their setup.
        turns: How they take turns on each of these.
        nursery: Forks workers; without, each is a process that begins from nothing.
        exchange: Connects them to other servers; without, they reach none.

    Attributes:
        ledger: What workers tell.
        offenders: Clients that wait because of what their programs have done.

    Concurrency:
        Any thread.
    """

    def __init__(self, make_setup: Callable[[Tenant], Setup], environment: dict[str, str],
                 ledger: Ledger | None = None, *, devices: Sequence[str] = (),
                 turns: Sequence[Settings] = (), nursery: Nursery | None = None,
                 exchange: Exchange | None = None) -> None:
        self.ledger = ledger or Ledger()
        self.offenders = Offenders()
        self._devices = tuple(devices)
        self._desk = Desk(turns or [Settings()] * max(1, len(self._devices)))
        self._make_setup = make_setup
        self._environment = environment
        self._nursery = nursery
        self._exchange = exchange
        self._changed = threading.Condition()
        self._posts: dict[str, _Post] = {}
        self._stopping = False

    def worker_of(self, tenant: Tenant, *, patience_s: float | None = PATIENCE_S, is_first: bool = False) -> Worker:
        """Return a tenant's worker, once it serves.

        Args:
            tenant: The tenant.
            patience_s: How long to wait for it; ``None``: as long as it takes.
            is_first: Give up at once if it cannot begin.

        Raises:
            RefusedError: It does not, for now.
            DjinnError: Why it could not begin, if ``is_first``.
        """
        with self._changed:
            post = self._posts.get(tenant.name)
            if post is not None and post.tenant.key != tenant.key:
                raise RefusedError("Sessions of an earlier token of that name are still ending.",
                                   hint="Try again in a few seconds.")
            if post is None and not self._stopping:
                post = self._posts[tenant.name] = _Post(tenant, self._make_setup(tenant))
                post.thread = threading.Thread(target=self._attend, args=(post,), name="djinn-supervisor", daemon=True)
                post.thread.start()
            self._changed.wait_for(
                lambda: post is None or post.is_ready or post.is_ending or (is_first and post.problem is not None),
                patience_s)
            if post is not None and post.is_ready and post.worker is not None:
                return post.worker
            if is_first and post is not None and post.problem is not None:
                raise post.problem
            raise RefusedError("The server has no worker for this session at the moment.",
                               hint="Try again in a few seconds; the server's log says why.")

    def present_worker(self, tenant: Tenant) -> Worker:
        """Return a tenant's worker if it serves now.

        Raises:
            RefusedError: None does, so there are no sessions either.
        """
        with self._changed:
            post = self._posts.get(tenant.name)
            if post is None or post.tenant.key != tenant.key or not post.is_ready or post.worker is None:
                raise no_session()
            return post.worker

    def worker_with(self, mailbox: bytes) -> Worker:
        """Return the worker that a mailbox must be at, if it is anywhere.

        Raises:
            RefusedError: It is nowhere.
        """
        with self._changed:
            for post in self._posts.values():
                if post.worker is not None and post.is_ready and mailbox.startswith(post.worker.mailbox_prefix):
                    return post.worker
        raise no_mailbox()

    def _new_prefix(self) -> bytes:
        with self._changed:
            used = {post.worker.mailbox_prefix for post in self._posts.values() if post.worker is not None}
        while (made := secrets.token_bytes(PREFIX_BYTES)) in used:
            pass
        return made

    def why_not_ready(self) -> str:
        """Say why sessions cannot begin: workers are wanted, and none serves. Empty if they can."""
        with self._changed:
            posts = list(self._posts.values())
        if self._stopping:
            return "The server is ending."
        if not posts or any(post.is_ready for post in posts):
            return ""
        return "No worker serves at the moment; the server's log says why."

    def workers(self) -> list[tuple[Tenant, Worker]]:
        """List the workers that serve."""
        with self._changed:
            return [(post.tenant, post.worker) for post in self._posts.values()
                    if post.is_ready and post.worker is not None]

    def tenants(self) -> list[Tenant]:
        """List those who have workers."""
        with self._changed:
            return [post.tenant for post in self._posts.values()]

    def change(self, tenant: Tenant) -> None:
        """Have a tenant's worker keep other limits from now on."""
        with self._changed:
            post = self._posts.get(tenant.name)
            if post is None or post.tenant == tenant or post.tenant.key != tenant.key:
                return
            post.tenant, post.setup = tenant, msgspec.structs.replace(post.setup, limits=tenant.limits)
            worker, customer = post.worker, post.customer
        if worker is not None:
            worker.tell(tenant.limits)
        if customer is not None:
            self._desk.reweigh(customer, tenant.weight)

    def end(self, tenant: Tenant, timeout_s: float) -> bool:
        """End a tenant's worker and its sessions.

        Args:
            tenant: The tenant.
            timeout_s: How long programs that run may go on.

        Returns:
            Whether it ended by itself; it is killed if it does not.
        """
        with self._changed:
            post = self._posts.get(tenant.name)
            if post is None:
                return True
            post.is_ending = True
            self._changed.notify_all()
            worker, thread, customer = post.worker, post.thread, post.customer
        if customer is not None:
            # Others need not wait for what it still runs.
            self._desk.leave(customer)
        if worker is not None:
            worker.tell(Stop(timeout_s))
            if not post.is_ready:
                worker.kill()
        if thread is None:
            return True
        thread.join(timeout_s + 1)
        if ended := not thread.is_alive():
            return ended
        _log.warning("worker %d does not end: killed", worker.pid if worker is not None else 0)
        if worker is not None:
            worker.kill()
        thread.join(1)
        return False

    def stop(self, timeout_s: float) -> bool:
        """End all workers; whether all ended by themselves."""
        with self._changed:
            self._stopping = True
        ended: list[bool] = []
        threads = [threading.Thread(target=lambda tenant=tenant: ended.append(self.end(tenant, timeout_s)))
                   for tenant in self.tenants()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._desk.close()
        return all(ended)

    def _attend(self, post: _Post) -> None:
        """Run one worker after the other until the post ends."""
        while not post.is_ending:
            served_s = self._run_once(post)
            if post.is_ending:
                break
            if served_s > MAX_DELAY_S or post.is_excused:
                post.failures = 0
            post.failures, post.is_excused = post.failures + 1, False
            delay_s = min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** min(post.failures - 1, 16))
            _log.warning("%sanother worker starts in %g s", _for(post.tenant), delay_s)
            with self._changed:
                self._changed.wait_for(lambda: post.is_ending, delay_s)
        with self._changed:
            if self._posts.get(post.tenant.name) is post:
                del self._posts[post.tenant.name]
            self._changed.notify_all()

    def _run_once(self, post: _Post) -> float:
        """Run one worker until it ends, and return for how long it has served."""
        setup = msgspec.structs.replace(post.setup, ticket_key=secrets.token_bytes(KEY_BYTES),
                                        mailbox_prefix=self._new_prefix(), device=self._device_for(post))
        try:
            worker = Worker(setup, self._environment, self._nursery)
        except OSError as error:
            self._note(post, TransportError(f"No worker could be started: {error}."))
            return 0.0
        with self._changed:
            post.worker = worker
        if post.is_ending:
            worker.kill()
        try:
            worker.await_ready()
        except DjinnError as error:
            worker.kill()
            worker.reap()
            self._note(post, error)
            return 0.0
        began = time.monotonic()
        where = f" on {setup.device} ({post.device})" if len(self._devices) > 1 else ""
        _log.info("%sworker %d serves%s", _for(post.tenant), worker.pid, where)
        customer = Customer(post.tenant.name, post.device, worker.tell, worker.is_stopped)
        self._desk.join(customer, post.tenant.weight)
        with self._changed:
            post.customer = customer
        self._note(post, None, is_ready=True)
        account = self.ledger.open(post.tenant.name, memory_limit(setup.memory_bytes, setup.limits), post.device)
        worker.watch(account.heed, self._desk, customer, self._exchange)
        # Before it is said that none serves, so that nobody reads of one that does at the same time.
        self.ledger.close(account)
        self._desk.leave(customer)
        self._note(post, None)
        # Whoever lets go of its standard input is not going to serve any more.
        if not post.is_ending:
            worker.kill()
        status = worker.reap()
        if not post.is_ending:
            self.ledger.restarted(post.tenant.name, worker.cause or (_told(status) if status < 0 else "exit"))
            post.is_excused = self._blame(post, worker)
        (_log.info if post.is_ending else _log.error)(  # no bug
            "%sworker %d has ended: %s", _for(post.tenant), worker.pid, _told(status))
        with self._changed:
            post.worker = post.customer = None
        return time.monotonic() - began

    def _blame(self, post: _Post, worker: Worker) -> bool:
        """Keep out for a while whose program a worker has died of; whether that is known.

        A tenant with a name of his own has a worker of his own, and waits for that.
        """
        running = worker.board.read()
        if running is None or not running.owner_digest or post.tenant.name:
            return False
        delay_s = self.offenders.add(running.owner_digest)
        _log.warning("worker %d has died while it ran a program of session %s, whose client waits %g s", worker.pid,
                     running.session, delay_s)
        return True

    def _device_for(self, post: _Post) -> str:
        """Choose where a worker computes: each anew, since none of its sessions has anything anywhere yet."""
        if not self._devices:
            return post.setup.device
        with self._changed:
            others = [other.device for other in self._posts.values() if other is not post and other.is_placed]
            post.device = least_loaded(self.ledger.loads([others.count(n) for n in range(len(self._devices))]))
            post.is_placed = True
        return self._devices[post.device]

    def _note(self, post: _Post, problem: DjinnError | None, *, is_ready: bool = False) -> None:
        if problem is not None:
            _log.error("%sa worker could not begin: %s", _for(post.tenant), problem)
            if not post.is_ending:
                self.ledger.restarted(post.tenant.name, "start")
        with self._changed:
            post.problem, post.is_ready = problem, is_ready
            if problem is not None:
                post.worker = None
            self._changed.notify_all()


def _begin(
    environment: dict[str, str], nursery: Nursery | None
) -> tuple[Child | subprocess.Popen[bytes], socket.socket]:
    """Begin a worker's process: forked if that can be, since otherwise it takes seconds to import PyTorch.

    Returns:
        The process, and the gateway's end of the channel to it, whose other end no second process ever gets.

    Raises:
        OSError: It could not be started.
    """
    if nursery is not None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                return nursery.spawn(theirs.fileno(), environment), ours
            except OSError as error:
                _log.warning("workers begin more slowly from now on: %s", error)
                # A fork that comes late all the same reads the end of this, and ends.
                ours.shutdown(socket.SHUT_RDWR)
                ours.close()
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            # Its standard output is not this process's, of which callers expect one line. NumPy's threads, which nobody
            # uses there, would stay out of the sandbox.
            process = subprocess.Popen([sys.executable, "-P", "-m", "djinn_server.worker"], stdin=theirs.fileno(),
                                       stdout=2, env=environment | {"OPENBLAS_NUM_THREADS": "1"})
        except OSError:
            ours.close()
            raise
    return process, ours


def _for(tenant: Tenant) -> str:
    return f"{tenant.name}: " if tenant.name else ""


def _told(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"

"""A worker: the process that runs one tenant's operations.

The gateway starts it: ``python -m djinn_plugins.server.worker``.
It receives its orders over its standard input, and exits when that is closed. A crash affects no other tenant.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, TypeAlias, TypeVar

import attrs

from djinn.errors import DjinnError, PluginError, RefusedError, TransportError
from djinn.kinds.transport import Transport
from djinn.wire.messages import Goodbye, Hello
from djinn_plugins.client.upload_dedup import this_machine
from djinn_plugins.common.kernel_warnings import pass_all
from djinn_plugins.common.kinds.executor import Executor, SupportsDeviceMarks, SupportsSettling
from djinn_plugins.common.kinds.guard import Bounds
from djinn_plugins.common.kinds.transport import Channel, Listener, SupportsAdoption
from djinn_plugins.common.memory.kept_memory import KeptMemory
from djinn_plugins.common.net.listening import listen
from djinn_plugins.common.operators.named_values import NamedSession
from djinn_plugins.common.operators.stored_models import provide
from djinn_plugins.common.options import ListenOptions
from djinn_plugins.server.board import Board
from djinn_plugins.server.certificates import placed
from djinn_plugins.server.control import (
    Ask,
    Dialed,
    EndSession,
    Failed,
    FindNamed,
    GiveBack,
    Grant,
    Incoming,
    Look,
    NamedFound,
    Part,
    Ready,
    RenameSession,
    RevokeDevice,
    Seen,
    Setup,
    SharedUse,
    Stop,
    StoreReply,
    Taken,
    TurnChannel,
    ignore_signals,
    name_process,
)
from djinn_plugins.server.control_channel import Control
from djinn_plugins.server.counters import Meters, Reporter
from djinn_plugins.server.dialing import Dialer
from djinn_plugins.server.grants import Grants
from djinn_plugins.server.limits import Allowances
from djinn_plugins.server.log_lines import write_to
from djinn_plugins.server.memory import device_bytes, limit_arenas, memory_plugin
from djinn_plugins.server.models import WorkerModels
from djinn_plugins.server.orders import Orders
from djinn_plugins.server.pending_handshakes import PendingHandshakes
from djinn_plugins.server.pending_replies import PendingReplies
from djinn_plugins.server.run_queue import RunQueue
from djinn_plugins.server.sandbox.fence import Fence
from djinn_plugins.server.server import Server
from djinn_plugins.server.shared_uploads import WorkerUploads
from djinn_plugins.server.tenant_limits import Limits
from djinn_plugins.server.tenant_use import Alone, OthersUse, WorkerUse
from djinn_plugins.server.tickets import TicketCheck
from djinn_plugins.server.upload_messages import UploadReply

__all__ = ("PassedSocketListener", "main")

STOP_TIMEOUT_S = 5.0
"""How long running programs may continue after the gateway has vanished."""
NAMED_TIMEOUT_S = 5.0
"""How long the gateway may take to list the named sessions of the tenant's other workers."""
_listing = threading.Lock()
_Message = TypeVar("_Message", TurnChannel, SharedUse)
_Answers: TypeAlias = dict[type, Callable[[Any, int | None], object]]
"""What handles the gateway's answers and their descriptors, by the type of message."""
_log = logging.getLogger("djinn.server")


class PassedSocketListener:
    """A listener for connections that the gateway hands over, and for clients that it redirects here.

    Args:
        transport: Transport of the connections.
        options: As for `djinn_plugins.common.kinds.transport.ListeningTransport.listen`.
        listener: Where redirected clients connect, if there are any.
        tickets: Checks the tickets of redirected clients.
        meters: Counts refused clients.
        grants: Records the token that each connection was admitted with.

    Concurrency:
        `hand` and `close` are called by any thread, `accept` by one.
    """

    def __init__(
        self, transport: Transport, options: ListenOptions, listener: Listener | None, tickets: TicketCheck,
        meters: Meters, grants: Grants,
    ) -> None:
        self.address = listener.address if listener is not None else ""
        self._transport = transport
        self._options = options
        self.listener = listener
        self.grants = grants
        self._tickets = tickets
        self._queue: queue.SimpleQueue[Channel | None] = queue.SimpleQueue()
        self._meters = meters
        self._room = PendingHandshakes(reject=lambda: meters.reject("waiting_room"))
        self._handed: weakref.WeakKeyDictionary[Channel, bytes] = weakref.WeakKeyDictionary()
        if listener is not None:
            threading.Thread(target=self._accept_from, args=(listener,), name="djinn-inlet", daemon=True).start()

    def hand(self, descriptor: int, incoming: Incoming) -> None:
        """Take over a connection whose client the gateway has admitted."""
        if isinstance(self._transport, SupportsAdoption):
            channel = self._transport.adopt(descriptor, incoming.received, incoming.peer, self._options)
            self._handed[channel] = incoming.token
            self._queue.put(channel)

    def admit(self, channel: Channel, hello: Hello) -> None:
        """Admit a client that the gateway has handed over or redirected here.

        Raises:
            RefusedError: The gateway has not sent this client.
        """
        token = self._handed.get(channel)
        if token is None:
            try:
                token = self._tickets.redeem(hello.ticket)
            except RefusedError:
                self._meters.reject("ticket")
                raise
            self._room.leave(channel)
        self.grants.admit(channel, token)

    def accept(self) -> Channel | None:
        """Wait for a connection; see `djinn_plugins.common.kinds.transport.Listener.accept`."""
        return self._queue.get()

    def close(self) -> None:
        """Stop accepting; see `djinn_plugins.common.kinds.transport.Listener.close`."""
        if self.listener is not None:
            self.listener.close()
            self._room.close()
        self._queue.put(None)

    def _accept_from(self, listener: Listener) -> None:
        while (channel := listener.accept()) is not None:
            self._room.enter(channel)
            self._queue.put(channel)


def main() -> None:
    """Serve until the gateway orders the worker to stop, or is gone."""
    ignore_signals()
    limit_arenas()
    control = Control(socket.socket(fileno=os.dup(0)), takes_descriptors=True)
    with open(os.devnull) as nothing:  # noqa: PTH123  # a device, not a path
        os.dup2(nothing.fileno(), 0)
    received = control.receive()
    if received is None or not isinstance(received[0], Setup):
        sys.exit(1)
    setup, board = received[0], received[1]
    turns = _turns(control) if setup.takes_turns else None
    use = _use(control) if setup.shares_use else Alone()
    if not setup.is_spare:
        name_process("djinn-worker")
    write_to(sys.stderr, setup.options.operator.log_format, role="worker",
             **({"tenant": setup.tenant} if setup.tenant else {}))
    this_machine()  # cached here: its file cannot be read inside the sandbox
    pass_all()
    fence = Fence(setup.options.sandbox, setup.device)
    dialer = Dialer(control.send)
    try:
        server, inlet, allowances, line, answers = _open(setup, turns, _board(board), fence, dialer, control, use)
        fence.seal()
    except Exception as error:  # noqa: BLE001  # plugins may raise anything
        reason = error if isinstance(error, DjinnError) else _plugin_failed(error)
        control.send(Failed(reason.code, reason.summary, reason.hint))
        sys.exit(1)
    if turns is not None:
        threading.Thread(target=turns.run, args=(line,), name="djinn-turns", daemon=True).start()
    server.start()
    control.send(Ready(server.device, inlet.address))
    reporter = Reporter(server.report, control.send)
    reporter.start()
    orders = Orders(control, server, inlet.grants, inlet.listener)
    stop = _obey(control, inlet.hand, allowances, server, answers, orders)
    stopped = server.stop(stop.timeout_s, Goodbye(stop.code, stop.summary, stop.hint))
    reporter.stop()
    logging.shutdown()
    # Running programs cannot be interrupted, and an ordinary exit would tear PyTorch down beneath them.
    os._exit(0 if stopped else 1)


def _plugin_failed(error: Exception) -> PluginError:
    """Return the error for an exception that is not djinn's, with the line that raised it."""
    line = traceback.extract_tb(error.__traceback__)[-1]
    return PluginError(
        f"A worker could not begin: {type(error).__name__}: {error} ({line.filename}, line {line.lineno}).",
        hint="In a worker's sandbox, a plugin opens no files, starts no programs and connects to nothing. Let it log "
             "with Python's logging: the server writes these lines. Or serve with --sandbox off."
        if isinstance(error, OSError) else "Correct the plugin, or switch it off with DJINN_PLUGINS=-NAME.")


class GatewayTurns:
    """Turns on the device, requested from the gateway; see `djinn_plugins.server.run_queue.DeviceLease`."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def run(self, line: RunQueue) -> None:
        """Receive turns until the gateway is gone."""
        while (received := self._control.receive()) is not None:
            message = received[0]
            if isinstance(message, Grant):
                line.granted(message.turn)
            elif isinstance(message, RevokeDevice):
                line.recalled(message.turn, message.left_s)

    def ask(self) -> None:
        """Ask for a turn."""
        self._tell(Ask())

    def give_back(self, turn: int, *, wants_more: bool) -> None:
        """Give a turn back."""
        self._tell(GiveBack(turn, wants_more))

    def _tell(self, message: Ask | GiveBack) -> None:
        try:
            self._control.send(message)
        except OSError as error:
            # The gateway is gone. The thread that reads its orders notices that and ends the waiting sessions.
            _log.info("the gateway hears nothing: %s", error)


def _obey(
    control: Control, hand: Callable[[int, Incoming], None], allowances: Allowances,
    server: Server, answers: _Answers, orders: Orders,
) -> Stop:
    """Carry out the gateway's orders until it orders the worker to stop."""
    while (received := control.receive()) is not None:
        message, descriptor = received
        if isinstance(message, Incoming) and descriptor is not None:
            try:
                # First: if this process dies in between, no other may answer a client that may have got an answer.
                control.send(Taken(message.number))
                hand(descriptor, message)
            except OSError as error:
                _log.info("%s: gone before it was taken over: %s", message.peer, error)
        elif (answered := answers.get(type(message))) is not None:
            answered(message, descriptor)
        elif isinstance(message, Limits):
            allowances.limits = message
            server.limit_memory(message)
        elif isinstance(message, Part):
            name_process("djinn-worker")  # a spare one has an owner from now on
            server.take_part(message)
        elif isinstance(message, Look):
            with suppress(OSError):  # the gateway is gone; the next `receive` notices it
                control.send(Seen(message.number, *server.sessions.states_and_names()))
        elif isinstance(message, EndSession):
            server.sessions.end(message.session, Goodbye(message.code, message.summary, message.hint))
        elif isinstance(message, RenameSession):
            server.sessions.rename(message.name, message.holder)
        elif isinstance(message, Stop):
            return message
        else:
            orders.obey(message, descriptor)
    _log.warning("the gateway has vanished")
    return Stop(STOP_TIMEOUT_S)


def _open(
    setup: Setup, turns: GatewayTurns | None, board: Board | None, fence: Fence, dialer: Dialer,
    control: Control, use: OthersUse,
) -> tuple[Server, PassedSocketListener, Allowances, RunQueue, _Answers]:
    from djinn.plugins import DEFAULTS, Plugins
    from djinn.settings import Config
    from djinn.settings.logs import configure

    plugins = Plugins.configured({}, os.environ, "server")
    configure(plugins.settings(Config))
    transport = plugins.transport_for(setup.options.scheme)
    options = setup.options.tls.for_listening
    with placed(setup.tls_pair) if setup.tls_pair else nullcontext("") as own:
        there = attrs.evolve(options, tls_cert=own, tls_key="") if own else options
        listener = listen(transport, setup.address, there) if setup.address else None
    factory = plugins.find_executor(setup.device).value
    # Before files can no longer grow.
    kept_memory = KeptMemory.opened() if setup.options.memory.keep_bytes != 0 else None
    uploads = WorkerUploads(control.send) if setup.takes_turns and kept_memory is not None else None
    # Before a driver starts its own threads, and after the last file that only the server's user may read.
    fence.enter(lambda: _try(factory.open(setup.device)))
    if setup.options.device.threads:
        import torch

        torch.set_num_threads(setup.options.device.threads)
    executor: Executor = factory.open(setup.device)
    if listener is None and not isinstance(transport, SupportsAdoption):
        raise TransportError(f"The transport {transport.name} can neither hand connections over nor listen.")
    meters, grants = Meters(), Grants()
    named = PendingReplies[FindNamed, NamedFound](control.send, NAMED_TIMEOUT_S)
    inlet = PassedSocketListener(transport, options, listener, TicketCheck(setup.ticket_key), meters, grants)
    allowances = Allowances(setup.limits, meters.reject, use)
    line = RunQueue(turns, limits=lambda: allowances.limits,
                    settle=executor.settle if isinstance(executor, SupportsSettling) else _nothing,
                    reject=meters.reject, board=board, use=use,
                    mark=executor.mark if isinstance(executor, SupportsDeviceMarks) else None)
    program_bytes = setup.options.device.program_bytes
    bounds = Bounds(executor.device, device_bytes(executor) if program_bytes is None else program_bytes,
                    frozenset(setup.options.device.namespaces))
    watch = partial(plugins.choose("guard", "core").watch, bounds, plugins.choose("shapes", "meta"))
    server = Server(inlet, executor, admit=inlet.admit, watch=watch, allowances=allowances,
                    options=setup.options, memory=memory_plugin(plugins), public_digests=setup.public_digests,
                    kept_memory=kept_memory, shared_uploads=uploads,
                    dial=dialer.dial, transport_for=plugins.transport_for, mailbox_prefix=setup.mailbox_prefix,
                    meters=meters, line=line, grants=grants, leave=partial(os._exit, 1),
                    named_in_others=partial(_named_in_others, named) if setup.shares_use else tuple)
    answers: _Answers = {Dialed: dialer.answered, NamedFound: named.answered}
    if uploads is not None:
        answers[UploadReply] = uploads.answered
    if setup.options.models:
        models = WorkerModels(control.send, plugins.choose("store", DEFAULTS["store"]).tensors)
        provide(models)
        answers[StoreReply] = models.answered
    return server, inlet, allowances, line, answers


def _named_in_others(asking: PendingReplies[FindNamed, NamedFound]) -> tuple[NamedSession, ...]:
    with _listing:
        found = asking.ask(FindNamed)
    return () if found is None else found[0].sessions


def _try(executor: Executor) -> None:
    """Try a device: move a value to it and back."""
    import torch

    executor.get(executor.put(torch.ones(1)))


def _received(control: Control, kind: type[_Message]) -> tuple[_Message, int]:
    """Receive a message of a kind that comes with a descriptor.

    Raises:
        SystemExit: The gateway is gone.
    """
    received = control.receive()
    if received is None or not isinstance(received[0], kind) or received[1] is None:
        sys.exit(1)
    return received[0], received[1]


def _turns(control: Control) -> GatewayTurns:
    """Receive the channel for turns; ends the process as `_received` does."""
    _, descriptor = _received(control, TurnChannel)
    return GatewayTurns(Control(socket.socket(fileno=descriptor)))


def _use(control: Control) -> OthersUse:
    """Receive what the tenant's workers use together; ends the process as `_received` does."""
    shared, descriptor = _received(control, SharedUse)
    return WorkerUse.of(descriptor, shared.place)


def _board(descriptor: int | None) -> Board | None:
    if descriptor is None:
        return None
    made = Board(descriptor)
    os.close(descriptor)
    return made


def _nothing() -> None:
    """Do nothing: for devices without a synchronize call, a program is complete when it has run."""


if __name__ == "__main__":
    main()

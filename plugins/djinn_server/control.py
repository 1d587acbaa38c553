"""What the gateway and a worker tell each other, over the worker's standard input: typed messages, and connections."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
from typing import TypeAlias

import msgspec
from djinn_memory_tiered.tiers import CRITICAL, WARNING

from djinn.wire.messages import Courier
from djinn_server.counting import Report
from djinn_server.greeting import LEASE_S
from djinn_server.limits import Limits
from djinn_server.log_lines import LogFormat
from djinn_server.sandbox.fence import SandboxMode

__all__ = ("Ask", "Control", "ControlMessage", "Dial", "Dialed", "Drain", "Drained", "EndSession", "EndSessions",
           "Ended", "Failed", "GiveBack", "Grant", "Incoming", "Look", "Ready", "Recall", "Renew", "Seen",
           "SessionState", "Setup", "Spawn", "Spawned", "Stop", "ignore_signals")

SEND_TIMEOUT_S = 5
"""How long a worker may take to listen; it does nothing else in the thread that does."""
_LENGTH = struct.Struct("<I")
_MAX_BYTES = 2**20


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """To a worker: what it is for.

    Attributes:
        tenant: Whose sessions it serves; empty where everybody is one.
        device: What it computes on.
        transport: Scheme of the connections that it is handed.
        keep_bytes: Room for uploads that are kept.
        looks_ahead: Whether to run ahead of what sessions ask for.
        limits: What the tenant may use.
        threads: Threads of operations on the CPU; 0 for PyTorch's own idea.
        address: Where to listen for clients that were sent here; empty for nowhere.
        ticket_key: What tickets are made with.
        tls_cert, tls_key, tls_client_ca: See `djinn.kinds.transport.ListenOptions`.
        tls_pair: A certificate and a key of its own, as PEM, instead of the first two.
        mailbox_prefix: How the keys of its mailboxes begin, which no other worker's do.
        program_bytes: What one program may hold at a time beside its inputs; ``None`` for the device's memory.
        namespaces: Namespaces of operators, beside PyTorch's own, that may be called.
        memory_warning, memory_critical: Parts of the memory at which tiers of pressure begin.
        public_digests: Contents that every owner may use.
        log_format: See `djinn_server.log_lines.write_to`.
        takes_turns: Whether other workers use the device too.
        lease_s: How long a session stays whose connection broke; 0: not at all.
        sandbox: What is to become of the rights that serving does not need; see `djinn_server.sandbox`.
    """

    tenant: str
    device: str
    transport: str
    keep_bytes: int
    looks_ahead: bool
    limits: Limits
    threads: int = 0
    address: str = ""
    ticket_key: bytes = b""
    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    mailbox_prefix: bytes = b""
    program_bytes: int | None = None
    namespaces: tuple[str, ...] = ()
    log_format: LogFormat = "text"
    takes_turns: bool = False
    lease_s: float = LEASE_S
    memory_warning: float = WARNING
    memory_critical: float = CRITICAL
    public_digests: frozenset[bytes] = frozenset()
    sandbox: SandboxMode = SandboxMode.auto
    tls_pair: str = ""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """From a worker: it serves.

    Attributes:
        device: What it computes on.
        address: Where it listens, if it does.
    """

    device: str
    address: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """From a worker: it cannot begin."""

    code: str
    summary: str
    hint: str


class Incoming(msgspec.Struct, frozen=True, tag="incoming"):
    """To a worker: a connection, whose descriptor comes along.

    Attributes:
        peer: Who is at its other end.
        received: What was read from it already, as `djinn.kinds.transport.MovableChannel.detach` gave it.
        token: By which token its client was let in; see `djinn_server.tokens.Secret.identity`.
    """

    peer: str
    received: bytes
    token: bytes = b""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """To a worker: end all sessions, then yourself.

    Attributes:
        timeout_s: How long programs that run may go on.
        code, summary, hint: Of the error that says why to clients; without a code they hear that the server has ended
            the session.
    """

    timeout_s: float
    code: str = ""
    summary: str = ""
    hint: str = ""


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """To a worker: begin no more sessions, and answer with `Drained` when the last one has ended."""


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """From a worker that drains: it has no session any more."""


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """To a worker that listens: use another certificate for connections from now on.

    A descriptor comes along. It is of a file with the certificate, its chain and its key, because a worker need not be
    able to open the files that the gateway has read.

    Attributes:
        tls_client_ca: Certificates of the authorities that have to vouch for clients, as PEM; empty to ask for none.
    """

    tls_client_ca: str


class EndSessions(msgspec.Struct, frozen=True, tag="end_sessions"):
    """To a worker: end the sessions that were let in by a token.

    Attributes:
        token: Its identity; see `djinn_server.tokens.Secret.identity`.
        code, summary, hint: Of the error that says why to clients.
    """

    token: bytes
    code: str
    summary: str
    hint: str


class Look(msgspec.Struct, frozen=True, tag="look"):
    """To a worker: say what your sessions do."""

    number: int


class SessionState(msgspec.Struct, frozen=True, array_like=True):
    """What a session does.

    Attributes:
        session: Its name.
        key_digest: Of the key to take it up again.
        peer: Who is at the other end.
        age_s: Since when it is there.
        idle_s: Since when nothing has come from its client; 0 while it has anything to do.
        queued: Programs of the last message that are not through.
        running_s: For how long its program has run; 0 if none runs.
        held_bytes: What it holds.
        handles: Values that it holds.
    """

    session: str
    key_digest: bytes
    peer: str
    age_s: float
    idle_s: float
    queued: int
    running_s: float
    held_bytes: int
    handles: int


class Seen(msgspec.Struct, frozen=True, tag="seen"):
    """From a worker: the answer to a `Look`."""

    number: int
    sessions: tuple[SessionState, ...]


class EndSession(msgspec.Struct, frozen=True, tag="end_session"):
    """To a worker: end a session, and let its client hear why.

    Attributes:
        session: Its name; empty for all.
        code, summary, hint: Of the error.
    """

    session: str
    code: str
    summary: str
    hint: str


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """From a worker: it wants a turn on the device."""


class Grant(msgspec.Struct, frozen=True, tag="grant"):
    """To a worker: it may use the device until this turn is recalled."""

    turn: int


class Recall(msgspec.Struct, frozen=True, tag="recall"):
    """To a worker: others want the device.

    Attributes:
        turn: Its turn, which it is to give back as soon as nothing is to be run.
        left_s: After so much time, it is not to begin anything before either.
    """

    turn: int
    left_s: float


class GiveBack(msgspec.Struct, frozen=True, tag="give_back"):
    """From a worker: it has nothing on the device any more.

    Attributes:
        turn: Its turn.
        wants_more: Whether it wants another one.
    """

    turn: int
    wants_more: bool


class Dial(msgspec.Struct, frozen=True, tag="dial"):
    """From a worker: it wants a connection to another server.

    Attributes:
        number: Tells the answer from others.
        address: Where to.
        courier: What to greet it with.
    """

    number: int
    address: str
    courier: Courier


class Dialed(msgspec.Struct, frozen=True, tag="dialed"):
    """To a worker: the connection, whose descriptor comes along, or why there is none.

    Attributes:
        number: Of the `Dial`.
        code, summary, hint: Of the error.
        received: What was read from the connection already.
    """

    number: int
    code: str = ""
    summary: str = ""
    hint: str = ""
    received: bytes = b""


class Spawn(msgspec.Struct, frozen=True, tag="spawn"):
    """To a nursery: fork a worker, whose standard input comes along.

    Attributes:
        number: Of this request.
        environment: Environment variables of the worker.
    """

    number: int
    environment: dict[str, str]


class Spawned(msgspec.Struct, frozen=True, tag="spawned"):
    """From a nursery: a worker was forked. A descriptor that stands for its process (pidfd) comes along.

    Attributes:
        number: Of the request.
        pid: Its process.
    """

    number: int
    pid: int


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """From a nursery: a worker has ended.

    Attributes:
        number: Of the request that it was forked for.
        status: As `subprocess.Popen.returncode`.
    """

    number: int
    status: int


ControlMessage: TypeAlias = (
    Setup | Ready | Failed | Incoming | Limits | Stop | Drain | Drained | Renew | EndSessions | Report
    | Ask | Grant | Recall | GiveBack | Dial | Dialed | Spawn | Spawned | Ended | Look | Seen | EndSession)


def ignore_signals() -> None:
    """Leave signals to the gateway.

    Ctrl-C, a terminal that is closed and service managers send them to all processes of a group. It is the gateway that
    decides what becomes of sessions then; they end when it says so, or is gone.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


class Control:
    """One end of the channel between the gateway and a worker.

    Args:
        sock: One of a pair of stream sockets.
        takes_descriptors: Whether descriptors may come; those that come all the same are closed.

    Concurrency:
        Any thread sends; one receives.
    """

    def __init__(self, sock: socket.socket, *, takes_descriptors: bool = False) -> None:
        self._socket = sock
        self._takes_descriptors = takes_descriptors
        self._lock = threading.Lock()
        self._decoder = msgspec.msgpack.Decoder(ControlMessage)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", SEND_TIMEOUT_S, 0))

    def send(self, message: ControlMessage, descriptor: int | None = None) -> None:
        """Send a message, and a descriptor with it, which stays the caller's.

        Raises:
            OSError: Nobody receives.
        """
        header = msgspec.msgpack.encode(message)
        data = _LENGTH.pack(len(header)) + header
        with self._lock:
            sent = 0 if descriptor is None else socket.send_fds(self._socket, [data], [descriptor])
            self._socket.sendall(data[sent:])

    def receive(self) -> tuple[ControlMessage, int | None] | None:
        """Wait for a message, and the descriptor that comes with it; ``None`` once the other end is gone, or mad."""
        try:
            head, descriptor = self._read_head()
            if len(head) < _LENGTH.size:
                return None
            (length,) = _LENGTH.unpack(head)
            data = b"" if length > _MAX_BYTES else self._read(length)
            return None if len(data) < length else (self._decoder.decode(data), descriptor)
        except (OSError, msgspec.DecodeError):
            return None

    def close(self) -> None:
        """Close this end and wake whoever waits at it. Never raises."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            # The other end is gone already, which is what is wanted.
            pass
        finally:
            self._socket.close()

    def _read_head(self) -> tuple[bytes, int | None]:
        head, found = b"", []
        while len(head) < _LENGTH.size:
            part, descriptors, _, _ = socket.recv_fds(self._socket, _LENGTH.size - len(head), 1)
            found += descriptors
            if not part:
                break
            head += part
        if not self._takes_descriptors:
            while found:
                os.close(found.pop())
        for descriptor in found:
            os.set_inheritable(descriptor, False)
        return head, found[0] if found else None

    def _read(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            part = self._socket.recv(length - len(data))
            if not part:
                break
            data += part
        return data

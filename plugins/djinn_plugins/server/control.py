"""Messages between the gateway and a worker, sent over the worker's standard input together with connections."""

from __future__ import annotations

import ctypes
import signal
import sys
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from djinn.wire.messages import PeerHello
from djinn_plugins.common.operators.named_values import NamedSession
from djinn_plugins.common.operators.stored_models import KeepReply, StoredModel
from djinn_plugins.server.counters import MAX_NAMED, WorkerReport
from djinn_plugins.server.options import ServeOptions
from djinn_plugins.server.tenant_limits import Limits
from djinn_plugins.server.upload_messages import DropUpload, FindUpload, MakeUpload, SealUpload, UploadReply

__all__ = (
    "MAX_LISTED",
    "Ask",
    "CanFork",
    "ControlMessage",
    "Dial",
    "Dialed",
    "Drain",
    "Drained",
    "EndSession",
    "EndSessions",
    "Ended",
    "Failed",
    "FindNamed",
    "FromStore",
    "FromWorker",
    "GiveBack",
    "Grant",
    "Incoming",
    "Look",
    "NamedFound",
    "Part",
    "Ready",
    "RenameSession",
    "Renew",
    "RevokeDevice",
    "Seen",
    "SessionState",
    "Setup",
    "SharedUse",
    "Spawn",
    "Spawned",
    "Stop",
    "StoreReply",
    "Taken",
    "TurnChannel",
    "TurnRequest",
    "ignore_signals",
    "name_process",
)

_Seconds = Annotated[float, Meta(ge=-1e12, le=1e12)]
"""A number: others would be no JSON, so that one session would hide all others from the operator."""
MAX_LISTED = 2048
"""Maximum number of sessions in a report of a worker, the busiest first."""


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """To a worker: its configuration.

    Attributes:
        options: The server's options, without the clients' token.
        tenant: The tenant whose sessions it serves; empty if all clients are one tenant.
        limits: The tenant's limits.
        device: The device that it runs on, one of the server's.
        address: Where to listen for redirected clients; empty for nowhere.
        ticket_key: Key that tickets are made with.
        mailbox_prefix: Prefix of the keys of its mailboxes, unique to this worker.
        public_digests: Digests of contents that every owner may use.
        takes_turns: Whether other workers use the device too.
        shares_use: Whether its tenant may have other workers.
        is_spare: Whether it waits for the first owner.
        tls_pair: The worker's own certificate and key, as PEM, in place of the server's.
    """

    options: ServeOptions
    tenant: str = ""
    limits: Limits = Limits()
    device: str = ""
    address: str = ""
    ticket_key: bytes = b""
    mailbox_prefix: bytes = b""
    public_digests: frozenset[bytes] = frozenset()
    takes_turns: bool = False
    shares_use: bool = False
    is_spare: bool = False
    tls_pair: str = ""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """From a worker: it is ready to serve.

    Attributes:
        device: The device that it runs on.
        address: Where it listens, if it does.
    """

    device: str
    address: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """From a worker: it could not start."""

    code: str
    summary: str
    hint: str


class Incoming(msgspec.Struct, frozen=True, tag="incoming"):
    """To a worker: a connection, with its descriptor.

    Attributes:
        peer: The address at the other end.
        received: The bytes already read from it, as returned by
            `djinn_plugins.common.kinds.transport.SupportsHandover.detach`.
        token: The token that admitted its client; see `djinn_plugins.server.tokens.tokens.Secret.identity`.
        number: Identifies the connection in its `Taken`.
    """

    peer: str
    received: bytes
    token: bytes = b""
    number: int = 0


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """From a worker: it takes a connection over, and may then answer its client."""

    number: int


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """To a worker: end all sessions, then exit.

    Attributes:
        timeout_s: How long running programs may continue.
        code, summary, hint: The error that clients receive as the reason; without a code, clients are informed that the
            server has ended the session.
    """

    timeout_s: float
    code: str = ""
    summary: str = ""
    hint: str = ""


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """To a worker: refuse new sessions, and answer with `Drained` when the last session has ended."""


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """From a draining worker: its last session has ended."""


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """To a worker that listens: use another certificate for new connections.

    Comes with the descriptor of a file that holds the certificate, its chain and its key, because a worker may not be
    able to open the files that the gateway has read.

    Attributes:
        tls_client_ca: Certificates of the authorities that clients' certificates must be signed by, as PEM; empty if
            clients need no certificate.
    """

    tls_client_ca: str


class EndSessions(msgspec.Struct, frozen=True, tag="end_sessions"):
    """To a worker: end the sessions that were admitted with a token.

    Attributes:
        token: The token's identity; see `djinn_plugins.server.tokens.tokens.Secret.identity`.
        code, summary, hint: The error that clients receive as the reason.
    """

    token: bytes
    code: str
    summary: str
    hint: str


class Look(msgspec.Struct, frozen=True, tag="look"):
    """To a worker: report the state of all sessions."""

    number: int


class SessionState(msgspec.Struct, frozen=True, array_like=True):
    """The state of a session.

    Attributes:
        session: Its name.
        key_digest: Digest of the key that resumes it.
        peer: The client's address.
        age_s: Time since it began.
        idle_s: Time since the last message from its client; 0 while it is busy.
        queued: Programs of the last message that have not finished.
        running_s: How long its program has been running; 0 if none is.
        held_bytes: Bytes that it holds.
        handles: Number of values that it holds.
        name: The name that its client has given; empty if it has none.
        left_s: How long it stays, if it has a name and no client has it open; 0 for all others.
        program: Name of the program that it runs, or has run last; empty if it has run none.
    """

    session: str
    key_digest: bytes
    peer: str
    age_s: _Seconds
    idle_s: _Seconds
    queued: int
    running_s: _Seconds
    held_bytes: int
    handles: int
    name: str = ""
    left_s: _Seconds = 0.0
    program: str = ""


class Seen(msgspec.Struct, frozen=True, tag="seen"):
    """From a worker: the answer to a `Look`.

    Attributes:
        number: Number of the `Look`.
        sessions: Its sessions.
        named: Its named sessions, as clients see them.
    """

    number: int
    sessions: Annotated[tuple[SessionState, ...], Meta(max_length=MAX_LISTED)]
    named: Annotated[tuple[NamedSession, ...], Meta(max_length=MAX_NAMED)] = ()


class FindNamed(msgspec.Struct, frozen=True, tag="find_named"):
    """From a worker: a request for the named sessions in the other workers of its tenant."""

    number: int


class NamedFound(msgspec.Struct, frozen=True, tag="named_found"):
    """To a worker: the answer to a `FindNamed`."""

    number: int
    sessions: tuple[NamedSession, ...] = ()


class EndSession(msgspec.Struct, frozen=True, tag="end_session"):
    """To a worker: end a session, and give its client the reason.

    Attributes:
        session: Its name; empty for all sessions.
        code, summary, hint: The error that the client receives.
    """

    session: str
    code: str
    summary: str
    hint: str


class RenameSession(msgspec.Struct, frozen=True, tag="rename_session"):
    """To a worker: another server of the cluster has a later session of a name.

    Attributes:
        name: The name.
        holder: Address of that server.
    """

    name: str
    holder: str


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """From a worker: a request for a turn on the device."""


class Grant(msgspec.Struct, frozen=True, tag="grant"):
    """To a worker: it may use the device until this turn is recalled."""

    turn: int


class RevokeDevice(msgspec.Struct, frozen=True, tag="recall"):
    """To a worker: other workers are waiting for the device.

    Attributes:
        turn: Its turn, to be given back as soon as the worker has nothing to run.
        left_s: Time after which it may not start another program.
    """

    turn: int
    left_s: float


class TurnChannel(msgspec.Struct, frozen=True, tag="turns"):
    """To a worker that takes turns: comes with the descriptor of the channel for them, right after the `Setup`."""


class SharedUse(msgspec.Struct, frozen=True, tag="shared_use"):
    """To a worker of a tenant that may have several: comes with the descriptor of the memory for their amounts.

    Attributes:
        place: Where the worker writes its amounts.
    """

    place: int


class Part(msgspec.Struct, frozen=True, tag="part"):
    """To a worker: its part of what the tenant's workers have together.

    Attributes:
        of: Its memory is one of so many equal parts of the tenant's limits.
        keep_bytes: Bytes of uploads that it may keep; ``None`` for as many as before.
    """

    of: int
    keep_bytes: int | None = None


class GiveBack(msgspec.Struct, frozen=True, tag="give_back"):
    """From a worker: it has finished using the device.

    Attributes:
        turn: Its turn.
        wants_more: Whether it requests another turn.
    """

    turn: int
    wants_more: bool


class Dial(msgspec.Struct, frozen=True, tag="dial"):
    """From a worker: a request for a connection to another server.

    Attributes:
        number: Identifies the request in its answer.
        address: The server's address.
        peer: The greeting to send.
    """

    number: int
    address: str
    peer: PeerHello


class Dialed(msgspec.Struct, frozen=True, tag="dialed"):
    """To a worker: the connection, with its descriptor, or the error that prevented it.

    Attributes:
        number: Number of the `Dial`.
        code, summary, hint: The error.
        received: The bytes already read from the connection.
    """

    number: int
    code: str = ""
    summary: str = ""
    hint: str = ""
    received: bytes = b""


class FromStore(msgspec.Struct, frozen=True, tag="from_store"):
    """From a worker: a request for a file of the model store, or for a list of its models.

    Attributes:
        number: Identifies the request in its answer.
        digest: The file's digest; empty for the list.
        piece: A piece of that file, if it is sent to be kept.
        writer: Names the client that sends it.
        begin: Where the piece begins.
        size_bytes: Size of the file.
    """

    number: int
    digest: str = ""
    piece: bytes | None = None
    writer: str = ""
    begin: int = 0
    size_bytes: int = 0


class StoreReply(msgspec.Struct, frozen=True, tag="store_reply"):
    """To a worker: the answer, with the descriptor of the file if there is one.

    Attributes:
        number: Number of the `FromStore`.
        models: The models.
        problem: Why there is no answer.
        keeps_bytes: Size of the largest file that is kept.
        kept: The answer to a piece.
    """

    number: int
    models: tuple[StoredModel, ...] = ()
    problem: str = ""
    keeps_bytes: int = 0
    kept: KeepReply | None = None


class CanFork(msgspec.Struct, frozen=True, tag="can_fork"):
    """From a forkserver: it has imported what workers need, and then forks at once."""


class Spawn(msgspec.Struct, frozen=True, tag="spawn"):
    """To a forkserver: fork a worker, whose standard input comes with this message.

    Attributes:
        number: Number of this request.
        environment: Environment variables of the worker.
    """

    number: int
    environment: dict[str, str]


class Spawned(msgspec.Struct, frozen=True, tag="spawned"):
    """From a forkserver: a worker was forked. Comes with a descriptor of its process (pidfd).

    Attributes:
        number: Number of the request.
        pid: Its process ID.
    """

    number: int
    pid: int


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """From a forkserver: a worker has ended.

    Attributes:
        number: Number of the request that forked it.
        status: Its exit status, as in `subprocess.Popen.returncode`.
    """

    number: int
    status: int


ControlMessage: TypeAlias = (
    Setup | Ready | Failed | Incoming | Taken | Limits | Stop | Drain | Drained | Renew | EndSessions | WorkerReport
    | TurnChannel | Ask | Grant | RevokeDevice | GiveBack | Dial | Dialed | CanFork | Spawn | Spawned | Ended | Look
    | Seen | SharedUse | Part | FindNamed | NamedFound | EndSession | RenameSession | FromStore | StoreReply
    | FindUpload | MakeUpload | SealUpload | DropUpload | UploadReply)
FromWorker: TypeAlias = (
    Ready | Failed | Taken | Drained | WorkerReport | Dial | FromStore | Seen | FindNamed | FindUpload | MakeUpload
    | SealUpload | DropUpload)
"""What a worker says to the gateway, besides its requests for turns, which have a channel of their own."""
TurnRequest: TypeAlias = Ask | GiveBack
_NAME_PROCESS = 15
"""``PR_SET_NAME`` of prctl(2)."""


def name_process(text: str) -> None:
    """Name this process, as lists of processes show it; nothing happens elsewhere than on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_NAME_PROCESS, text.encode(), 0, 0, 0)


def ignore_signals() -> None:
    """Ignore the signals that the gateway handles.

    Ctrl-C, a closed terminal and service managers signal all processes of a group. The gateway decides what happens to
    sessions; the workers end when it orders them to, or when it is gone.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)

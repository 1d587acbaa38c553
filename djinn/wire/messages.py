"""The messages, as typed structures.

A session is a sequence of batches. The client numbers its values itself, so nothing waits to learn a name; a batch is
answered only if it asks for something (``fetch`` or ``describe``).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from djinn.ir.phase import ExecutionPhase
from djinn.ir.program import Program

PROTOCOL_VERSION = 8
GENERATOR_HANDLE = 0
"""Reserved handle: the state of the session's random generator, a ``uint8`` tensor whose form the executor defines."""
MARKS_HANDLE = 2**64 - 1
"""Reserved handle: the marks of what the server keeps for the session's owner, a list of bytes."""
DIGESTS_HANDLE = 2**64 - 2
"""Reserved handle: the digests of the same; what a session has been told of is kept until it ends."""
MARK_BYTES = 16
MAILBOX_BYTES = 16
DIGEST_BYTES = 32
RESUME_BYTES = 16

Handle: TypeAlias = Annotated[int, Meta(ge=0)]
Size: TypeAlias = Annotated[int, Meta(ge=0)]
Text: TypeAlias = Annotated[str, Meta(max_length=4096)]
MailboxKey: TypeAlias = Annotated[bytes, Meta(min_length=MAILBOX_BYTES, max_length=MAILBOX_BYTES)]
ResumeKey: TypeAlias = Annotated[bytes, Meta(max_length=RESUME_BYTES)]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of a client."""

    protocol: int
    torch: Text
    python: Text
    byte_order: Text
    token: Text = ""
    owner: Text = ""
    """A secret that sessions of one owner share; empty if the server is to keep nothing."""
    machine: Text = ""
    """Where the client runs, if nothing is to be kept in case that the server runs there too."""
    ticket: Text = ""
    """What a `Redirect` gave, instead of the token."""
    resumes: bool = False
    """Whether the client would take its session up again, so that it is kept for a while if its connection breaks."""
    resume: ResumeKey = b""
    """`Welcome.resume` of a session to take up again; empty for a new one."""
    answered: Size = 0
    """Number of the last answer that the client has of that session."""
    cancelled: Size = 0
    """Programs of its batches up to this number are not wanted any more."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Answer to `Hello`: the session is open.

    Attributes:
        kept: How many uploads the server has kept for the owner so far; -1 if it keeps none.
        mailbox: Whoever knows it may deliver values into this session; empty if it takes none.
        memory_bytes: How much all sessions together should hold; 0 if nobody said.
        held_bytes: What all sessions hold now.
        sessions: How many others are connected now.
        resume: Whoever knows it may take this session up again on another connection; empty if nobody may.
        lease_s: How long after its connection broke, in seconds.
        taken: Number of the last batch that has come; of a new session, of its greeting.
    """

    protocol: int
    torch: Text
    python: Text
    byte_order: Text
    device: Text
    session: Text
    kept: int = -1
    mailbox: Annotated[bytes, Meta(max_length=MAILBOX_BYTES)] = b""
    memory_bytes: Size = 0
    held_bytes: Size = 0
    sessions: Size = 0
    resume: ResumeKey = b""
    lease_s: float = 0.0
    taken: Size = 0


class Courier(msgspec.Struct, frozen=True, tag="courier"):
    """First message of another server that delivers values; answered by a `Welcome` without a session.

    Attributes:
        mailbox: Where to: `Welcome.mailbox` of a session.
        session: Where from: `Welcome.session` of the session that sends.
    """

    protocol: int
    byte_order: Text
    mailbox: MailboxKey
    session: Text


class Redirect(msgspec.Struct, frozen=True, omit_defaults=True, tag="redirect"):
    """Answer to `Hello`: the client may come in, elsewhere; the connection is about to be closed.

    Attributes:
        address: Where to greet again, of the scheme that the client came by; ``:PORT`` for another port of the host
            that it came to.
        ticket: What to say there, once and soon: `Hello.ticket`.
        certificate: The one that is shown there, as PEM, whatever authorities the client trusts; empty for one that
            those vouch for.
    """

    address: Text
    ticket: Text
    certificate: Text = ""


class Starting(msgspec.Struct, frozen=True, tag="starting"):
    """Before the answer to `Hello`: the client may come in, and the process that is to serve it is starting.

    It comes again every second or so until the answer does.

    Attributes:
        waited_s: How long the client has waited, in seconds.
    """

    waited_s: Annotated[float, Meta(ge=0)] = 0.0


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """The connection is about to be closed, and why.

    Attributes:
        code, summary, hint: Of the error.
        retry_after_s: When to try again, if that makes sense; else 0.
    """

    code: Text
    summary: Text
    hint: Text = ""
    retry_after_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0


class TensorHeader(msgspec.Struct, frozen=True, array_like=True, tag="tensor"):
    """Describes one tensor of the frame's body. The bytes are those of the storage, in memory order.

    Attributes:
        dtype: Name as in ``torch.<name>``, from the closed table of `djinn.wire.tensors`.
        size: Extents.
        stride: Strides in elements; together with ``size`` they must be dense and free of overlap.
    """

    dtype: Text
    size: Annotated[tuple[Size, ...], Meta(max_length=64)]
    stride: Annotated[tuple[Size, ...], Meta(max_length=64)]


class Define(msgspec.Struct, frozen=True, array_like=True, tag="define"):
    """Teach the executor a program under a number of the client's choice."""

    program: Handle
    body: Program


class Forget(msgspec.Struct, frozen=True, array_like=True, tag="forget"):
    """Programs that will not be used again."""

    programs: tuple[Handle, ...]


class Upload(msgspec.Struct, frozen=True, array_like=True, tag="upload"):
    """Store the frame's next tensor under a handle."""

    handle: Handle
    tensor: TensorHeader


class Recall(msgspec.Struct, frozen=True, array_like=True, tag="recall"):
    """Store a copy of what was uploaded before under a handle.

    Attributes:
        handle: The handle.
        digest: One of those that fetching `DIGESTS_HANDLE` gave to this session.
    """

    handle: Handle
    digest: Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class Run(msgspec.Struct, frozen=True, array_like=True, tag="run"):
    """Run a program.

    Attributes:
        program: Its number.
        inputs: Handles of the values it reads.
        numbers: Lifted numbers, step by step.
        outputs: Handles to give to the kept results.
        released: Values that nobody names any more once it has run.
    """

    program: Handle
    inputs: tuple[Handle, ...]
    numbers: list[Any]
    outputs: tuple[Handle, ...]
    released: tuple[Handle, ...] = ()


class Rerun(msgspec.Struct, frozen=True, array_like=True, tag="rerun"):
    """Run a program as its last two runs let expect, except for what is said here; see `djinn.wire.forecast`.

    Attributes:
        program: Its number.
        inputs, numbers, outputs, released: By position, what is not as expected.
    """

    program: Handle
    inputs: dict[Size, Handle] = {}
    numbers: dict[Size, Any] = {}
    outputs: dict[Size, Handle] = {}
    released: dict[Size, Handle] = {}


class Copy(msgspec.Struct, frozen=True, array_like=True, tag="copy"):
    """Give values again, under other handles, that nothing has written since they were computed.

    Each is a copy with the same size, strides and offset. Those of one command whose sources share a storage share one.

    Attributes:
        handles: For each value: what to copy; the handle of the copy; and 0, or the handle of the value whose storage
            it is a view of: then nothing is copied, and only the metadata is taken over.
    """

    handles: tuple[tuple[Handle, Handle, Handle], ...]


class Seed(msgspec.Struct, frozen=True, array_like=True, tag="seed"):
    """Seed the session's random generator."""

    seed: int


class Free(msgspec.Struct, frozen=True, array_like=True, tag="free"):
    """Values nobody names any more."""

    handles: tuple[Handle, ...]


class Peer(msgspec.Struct, frozen=True, array_like=True, tag="peer"):
    """Reach another session, on this server or another, under a number of the client's choice.

    The server connects at once: if it cannot, that is a failure of the batch.

    Attributes:
        peer: The number.
        address: Address of that session's server.
        mailbox: `Welcome.mailbox` of that session.
    """

    peer: Handle
    address: Text
    mailbox: MailboxKey


class Send(msgspec.Struct, frozen=True, array_like=True, tag="send"):
    """Send a value to a peer; if it is poisoned, its failure.

    Attributes:
        handle: The value, or `GENERATOR_HANDLE`.
        peer: Number of a `Peer`.
        parcel: Number of the client's choice; no two values that one session sends to another have the same.
        family: If there are any: values that share memory, the value itself among them. Then that memory travels whole.
    """

    handle: Handle
    peer: Handle
    parcel: Handle
    family: tuple[Handle, ...] = ()


class Receive(msgspec.Struct, frozen=True, array_like=True, tag="receive"):
    """Wait for a value that another session sends, and store it under a handle.

    Attributes:
        handle: The handle, or `GENERATOR_HANDLE`.
        parcel: Number in the `Send` of the other session.
        sender: `Welcome.session` of the other session.
        family: As in the `Send`; the values share memory here as they did there.
    """

    handle: Handle
    parcel: Handle
    sender: Text
    family: tuple[Handle, ...] = ()


Command: TypeAlias = Define | Forget | Upload | Recall | Run | Rerun | Copy | Seed | Free | Peer | Send | Receive


class Batch(msgspec.Struct, frozen=True, omit_defaults=True, tag="batch"):
    """Commands to carry out in order.

    Attributes:
        commands: What to do.
        fetch: Handles whose data to send back.
        describe: Handles whose metadata to send back.
        synchronize: Answer even if nothing is fetched, so that failures become known.
        timed: From here on, tell with every answer when the commands were carried out.
        phase: What the programs are part of from here on, as far as the client knows; ``None`` for the same as before,
            which at first is `ExecutionPhase.UNKNOWN`.
        metered: From here on, tell with every answer how long programs ran.
    """

    commands: list[Command] = []
    fetch: tuple[Handle, ...] = ()
    describe: tuple[Handle, ...] = ()
    synchronize: bool = False
    timed: bool = False
    phase: ExecutionPhase | None = None
    metered: bool = False

    @property
    def wants_reply(self) -> bool:
        """Whether the client is going to wait."""
        return bool(self.fetch or self.describe or self.synchronize)


class Description(msgspec.Struct, frozen=True, array_like=True, tag="spec"):
    """Metadata of a value: any stride and offset, no data."""

    dtype: Text
    size: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int


class Plain(msgspec.Struct, frozen=True, array_like=True, tag="plain"):
    """A result that is not a tensor: ``None``, a bool, a number, or a list of these."""

    value: Any


class Poisoned(msgspec.Struct, frozen=True, array_like=True, tag="poisoned"):
    """The value could not be computed; ``failure`` is the `Failure.identity` that says why."""

    failure: int


Item: TypeAlias = TensorHeader | Description | Plain | Poisoned


class Failure(msgspec.Struct, frozen=True):
    """Something went wrong while a batch was carried out.

    Attributes:
        identity: Number within the session, from 1.
        kind: Name of the exception, from the closed table of `djinn.wire.failures`.
        message: Its text.
        operator: Operator that raised, if one did.
        run: Handle-independent position: the program's number, or -1.
        step: Position of the step within the program, or -1.
        source: `Welcome.session` of the session in which it happened, if the failure came with a value from there.
        source_identity: Its identity there.
    """

    identity: int
    kind: Text
    message: str
    operator: str = ""
    run: int = -1
    step: int = -1
    source: Text = ""
    source_identity: Size = 0


class Timing(msgspec.Struct, frozen=True, array_like=True):
    """When a command was carried out, by the monotonic clock of the server.

    Attributes:
        kind: What it was.
        number: Of the program, of the parcel, or the handle of an upload.
        begin_ns: Before.
        end_ns: After. A device that computes on its own may not be through with it.
    """

    kind: Literal["run", "send", "receive", "upload"]
    number: Handle
    begin_ns: int
    end_ns: int


class Result(msgspec.Struct, frozen=True, omit_defaults=True, tag="result"):
    """Answer to a `Batch` that asked.

    Attributes:
        items: One per handle in ``fetch``, then one per handle in ``describe``.
        failures: What went wrong since the last answer.
        timings: When the commands since the last answer were carried out, if the session has asked.
        now_ns: Now, by the same clock; 0 if it has not.
        run_ns: How long programs of this session ran since the last answer, if it has asked; waiting for turns does
            not count.
    """

    items: tuple[Item, ...] = ()
    failures: tuple[Failure, ...] = ()
    timings: tuple[Timing, ...] = ()
    now_ns: int = 0
    run_ns: Size = 0


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """The server has all batches up to the number of this frame; an answer says the same of those before it."""


class Goodbye(msgspec.Struct, frozen=True, omit_defaults=True, tag="goodbye"):
    """This side ends the session; nothing of it is kept.

    Attributes:
        code, summary, hint: Of the error that says why, if there is one.
    """

    code: Text = ""
    summary: Text = ""
    hint: Text = ""


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """How a value lies in memory whose own tensor travels as another; see `djinn_lib_service.parcels`.

    Attributes:
        size: Extents of the value.
        stride: Its strides in elements.
        is_packed: Whether the elements travel side by side, rather than the memory that they lie in.
    """

    size: Annotated[tuple[Size, ...], Meta(max_length=64)]
    stride: Annotated[tuple[Size, ...], Meta(max_length=64)]
    is_packed: bool = False


class Member(msgspec.Struct, frozen=True, array_like=True):
    """One of several values that share memory which travels whole.

    Attributes:
        dtype, size, stride: Of the value.
        storage_offset: Where it begins in that memory, in its elements.
        is_conjugated, is_negated: What PyTorch is to do to its elements when it reads them.
        failure: Why there is no value; then the rest means nothing.
    """

    dtype: Text = ""
    size: Annotated[tuple[Size, ...], Meta(max_length=64)] = ()
    stride: Annotated[tuple[Size, ...], Meta(max_length=64)] = ()
    storage_offset: Size = 0
    is_conjugated: bool = False
    is_negated: bool = False
    failure: Failure | None = None


class Parcel(msgspec.Struct, frozen=True, omit_defaults=True, tag="parcel"):
    """A value on its way from session to session; a tensor's bytes are the frame's body.

    Attributes:
        parcel: Number in the `Send`.
        item: The value; ``None`` if there is a failure instead.
        layout: How the tensor lies in memory, if not as it travels.
        failure: Why there is no value; its source is set.
        members: What lies in the memory that ``item`` is the bytes of, in the order of `Send.family`.
        told: What else has failed where it comes from and its client has not heard of; their sources are set.
    """

    parcel: Handle
    item: TensorHeader | Plain | None = None
    layout: Layout | None = None
    failure: Failure | None = None
    members: tuple[Member, ...] = ()
    told: tuple[Failure, ...] = ()


Message: TypeAlias = (
    Hello | Welcome | Redirect | Starting | Refusal | Courier | Batch | Result | Taken | Goodbye | Parcel)


class _Complex(msgspec.Struct, frozen=True):
    real: float
    imag: float


def to_wire(value: Any) -> Any:
    """Make a lifted number (int, float, complex, or list of these) representable in msgpack."""
    if isinstance(value, complex):
        return {"real": value.real, "imag": value.imag}
    if isinstance(value, (list, tuple)):
        return [item if type(item) is int or type(item) is float else to_wire(item) for item in value]
    return value


def from_wire(value: Any) -> Any:
    """Undo `to_wire`."""
    if isinstance(value, dict):
        parts = msgspec.convert(value, _Complex)
        return complex(parts.real, parts.imag)
    if isinstance(value, list):
        return [from_wire(item) for item in value]
    return value


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Encode a message as msgpack."""
    return _encoder.encode(message)


def decode(data: bytes | bytearray | memoryview) -> Message:
    """Decode and type-check a message.

    Raises:
        msgspec.DecodeError, RecursionError, ValueError: It is not a message; callers turn this into a
            `djinn.ProtocolError`.
    """
    message: Message = _decoder.decode(data)
    return message

"""The messages, as typed structures.

A session is a sequence of batches. The client numbers its values itself, so it never waits for the server to name one.
The server answers a batch only if the batch requests something (``fetch`` or ``describe``).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from djinn.ir.phase import ExecutionPhase
from djinn.ir.program import Program

PROTOCOL_VERSION = 17
GENERATOR_HANDLE = 0
"""Reserved handle: the state of the session's random generator, a ``uint8`` tensor whose format the executor
defines.
"""
MARKS_HANDLE = 2**64 - 1
"""Reserved handle: the marks of the contents that the server keeps for the session's owner, a list of bytes."""
DIGESTS_HANDLE = 2**64 - 2
"""Reserved handle: the digests of the same contents. Every listed content is kept until the session ends."""
MARK_BYTES = MAILBOX_BYTES = RESUME_BYTES = 16
DIGEST_BYTES = 32
MAX_TEXT = 4096
MAX_FACTS_BYTES = 1024
MAX_WARNINGS = 64
"""Most warnings in an answer."""

Handle: TypeAlias = Annotated[int, Meta(ge=0)]
Size: TypeAlias = Annotated[int, Meta(ge=0)]
Text: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT)]
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
    """A secret shared by the sessions of one owner; empty if the server should keep no uploads."""
    machine: Text = ""
    """The client's machine, if the server should keep no uploads when it runs on the same machine."""
    ticket: Text = ""
    """The ticket from a `Redirect`, instead of the token."""
    resumes: bool = False
    """Whether the client can resume its session; the server then keeps the session for a while if the connection
    breaks.
    """
    resume: ResumeKey = b""
    """`Welcome.resume` of the session to resume; empty for a new session."""
    answered: Size = 0
    """Number of the last answer that the client has received in that session."""
    cancelled: Size = 0
    """Programs in batches up to this number are cancelled."""
    takes_early: bool = False
    """Whether the server may answer batches before it receives them; see `Result.assumes`."""
    name: Text = ""
    """Name of the session that the client is going to open, so that it reaches the process that has its values."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Answer to `Hello`: the session is open.

    Attributes:
        kept: How many uploads the server has kept for the owner so far; -1 if it keeps none.
        mailbox: Key that authorizes others to deliver values into this session; empty if it accepts none.
        memory_bytes: How much all sessions together should hold; 0 if no limit is set.
        held_bytes: How much all sessions hold now.
        sessions: How many other sessions are connected now.
        resume: Key that allows a client to resume this session on another connection; empty if it cannot be resumed.
        lease_s: How long after its connection broke the session can be resumed, in seconds.
        received: Number of the last batch received; for a new session, of its greeting.
        facts: Properties of the device, encoded by `djinn_plugins.common.device_report`; empty if there are none.
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
    received: Size = 0
    facts: Annotated[bytes, Meta(max_length=MAX_FACTS_BYTES)] = b""


class PeerHello(msgspec.Struct, frozen=True, tag="peer_hello"):
    """First message of another server that delivers values; answered by a `Welcome` without a session.

    Attributes:
        mailbox: Destination: `Welcome.mailbox` of a session.
        session: Origin: `Welcome.session` of the sending session.
    """

    protocol: int
    byte_order: Text
    mailbox: MailboxKey
    session: Text


class Redirect(msgspec.Struct, frozen=True, omit_defaults=True, tag="redirect"):
    """Answer to `Hello`: the client is accepted, but at another address; the connection is about to be closed.

    Attributes:
        address: Where to greet again, with the same scheme; ``:PORT`` for another port of the same host.
        ticket: Sent there as `Hello.ticket`, once and soon.
        certificate: The server certificate used there, as PEM, regardless of the authorities that the client trusts;
            empty if one of these authorities has signed it.
    """

    address: Text
    ticket: Text
    certificate: Text = ""


class Starting(msgspec.Struct, frozen=True, tag="starting"):
    """Sent before the answer to `Hello`: the client is accepted, and the process that will serve it is starting.

    It is repeated about every second until the answer is sent.

    Attributes:
        waited_s: How long the client has waited, in seconds.
    """

    waited_s: Annotated[float, Meta(ge=0)] = 0.0


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """The server refuses the client, and is about to close the connection.

    Attributes:
        code, summary, hint: Of the error.
        retry_after_s: When to try again, in seconds; 0 if that would not help.
    """

    code: Text
    summary: Text
    hint: Text = ""
    retry_after_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0


class TensorHeader(msgspec.Struct, frozen=True, array_like=True, tag="tensor"):
    """Describes one tensor of the frame's body. The bytes are those of the storage, in memory order.

    Attributes:
        dtype: Name as in ``torch.<name>``, from the closed table of `djinn.wire.tensors`.
        size: Sizes of the dimensions.
        stride: Strides in elements; together with ``size`` they must be dense and free of overlap.
    """

    dtype: Text
    size: Annotated[tuple[Size, ...], Meta(max_length=64)]
    stride: Annotated[tuple[Size, ...], Meta(max_length=64)]


class Define(msgspec.Struct, frozen=True, array_like=True, tag="define"):
    """Define a program under a number that the client chooses."""

    program: Handle
    body: Program


class Forget(msgspec.Struct, frozen=True, array_like=True, tag="forget"):
    """Forget programs that will not run again."""

    programs: tuple[Handle, ...]


class Upload(msgspec.Struct, frozen=True, array_like=True, tag="upload"):
    """Store the frame's next tensor under a handle."""

    handle: Handle
    tensor: TensorHeader


class UploadByDigest(msgspec.Struct, frozen=True, array_like=True, tag="digest"):
    """Store a copy of an earlier upload under a handle.

    Attributes:
        handle: The handle.
        digest: One of the digests that this session received by fetching `DIGESTS_HANDLE`.
    """

    handle: Handle
    digest: Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class Run(msgspec.Struct, frozen=True, array_like=True, tag="run"):
    """Run a program.

    Attributes:
        program: Its number.
        inputs: Handles of the values it reads.
        numbers: Lifted numbers, step by step.
        outputs: Handles for the kept results.
        released: Handles to free after the run.
    """

    program: Handle
    inputs: tuple[Handle, ...]
    numbers: list[Any]
    outputs: tuple[Handle, ...]
    released: tuple[Handle, ...] = ()


class RunDelta(msgspec.Struct, frozen=True, array_like=True, tag="delta"):
    """Run a program as predicted from its earlier runs, with the given differences.

    See `djinn_plugins.common.wire.delta`.

    Attributes:
        program: Its number.
        inputs, numbers, outputs, released: By position, the fields that differ from the prediction.
    """

    program: Handle
    inputs: dict[Size, Handle] = {}
    numbers: dict[Size, Any] = {}
    outputs: dict[Size, Handle] = {}
    released: dict[Size, Handle] = {}


class Copy(msgspec.Struct, frozen=True, array_like=True, tag="copy"):
    """Copy values, which nothing has written to since they were computed, to new handles.

    Each copy has the same size, strides and offset. Values of one command whose sources share a storage also share one.

    Attributes:
        handles: For each value: the source; the handle of the copy; and 0, or the handle of the value whose storage the
            result views. In that case no data is copied, only the metadata.
    """

    handles: tuple[tuple[Handle, Handle, Handle], ...]


class Seed(msgspec.Struct, frozen=True, array_like=True, tag="seed"):
    """Seed the session's random generator."""

    seed: int


class Free(msgspec.Struct, frozen=True, array_like=True, tag="free"):
    """Free values that the client no longer uses."""

    handles: tuple[Handle, ...]


class Peer(msgspec.Struct, frozen=True, array_like=True, tag="peer"):
    """Connect to another session, on this server or another, under a number that the client chooses.

    The server connects at once; if that fails, the batch reports a failure.

    Attributes:
        peer: The number.
        address: Address of that session's server.
        mailbox: `Welcome.mailbox` of that session.
    """

    peer: Handle
    address: Text
    mailbox: MailboxKey


class Send(msgspec.Struct, frozen=True, array_like=True, tag="send"):
    """Send a value to a peer, or its failure if it is poisoned.

    Attributes:
        handle: The value, or `GENERATOR_HANDLE`.
        peer: Number of a `Peer`.
        transfer: Number that the client chooses, unique among the values that one session sends to another.
        family: If not empty: values that share memory, including the value itself. The whole shared memory is then
            sent.
    """

    handle: Handle
    peer: Handle
    transfer: Handle
    family: tuple[Handle, ...] = ()


class Receive(msgspec.Struct, frozen=True, array_like=True, tag="receive"):
    """Wait for a value from another session and store it under a handle.

    Attributes:
        handle: The handle, or `GENERATOR_HANDLE`.
        transfer: Number in the `Send` of the other session.
        sender: `Welcome.session` of the other session.
        family: As in the `Send`; the values share memory here as they did in the other session.
    """

    handle: Handle
    transfer: Handle
    sender: Text
    family: tuple[Handle, ...] = ()


Command: TypeAlias = (
    Define | Forget | Upload | UploadByDigest | Run | RunDelta | Copy | Seed | Free | Peer | Send | Receive)


class Batch(msgspec.Struct, frozen=True, omit_defaults=True, tag="batch"):
    """Commands to execute in order.

    Attributes:
        commands: The commands.
        fetch: Handles whose data the server sends back.
        describe: Handles whose metadata the server sends back.
        synchronize: Whether to answer even if nothing is fetched, so that the client learns of failures.
        timed: Whether every answer, starting with this batch, reports when the commands were executed.
        phase: The execution phase of the programs, starting with this batch, as far as the client knows; ``None`` keeps
            the current one. A session starts with `ExecutionPhase.UNKNOWN`.
        metered: Whether every answer, starting with this batch, reports how long programs ran.
        later: Handles whose data the server sends as soon as it has it, while the client continues. If the connection
            breaks, the values are lost; the client asks again.
        settled: Whether, in this batch, the device finishes each program before the next command; for timings.
    """

    commands: list[Command] = []
    fetch: tuple[Handle, ...] = ()
    describe: tuple[Handle, ...] = ()
    synchronize: bool = False
    timed: bool = False
    phase: ExecutionPhase | None = None
    metered: bool = False
    settled: bool = False
    later: tuple[Handle, ...] = ()

    @property
    def wants_reply(self) -> bool:
        """Whether the client waits for an answer."""
        return bool(self.fetch or self.describe or self.synchronize)


class Description(msgspec.Struct, frozen=True, array_like=True, tag="spec"):
    """Metadata of a value, with any stride and offset, without data."""

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
    """A failure during the execution of a batch.

    Attributes:
        identity: Number within the session, from 1.
        kind: Name of the exception, from the closed table of `djinn.wire.failures`.
        message: Its text.
        operator: Operator that raised, if one did.
        run: The program's number, which does not depend on handles, or -1.
        step: Position of the step within the program, or -1.
        source: `Welcome.session` of the session where it happened, if it arrived with a value from another session.
        source_identity: Its identity in that session.
    """

    identity: int
    kind: Text
    message: str
    operator: str = ""
    run: int = -1
    step: int = -1
    source: Text = ""
    source_identity: Size = 0


class Warned(msgspec.Struct, frozen=True, array_like=True):
    """A warning that a kernel gave.

    Attributes:
        category: Name of the warning's class, from the closed table of `djinn.wire.failures`.
        text: What it says.
    """

    category: Text
    text: Text


class Timing(msgspec.Struct, frozen=True, array_like=True):
    """When a command was executed, by the server's monotonic clock.

    Attributes:
        kind: Kind of the command.
        number: Number of the program or transfer, or handle of the upload.
        begin_ns: Start time.
        end_ns: End time. An asynchronous device that cannot tell may still be working at that time.
    """

    kind: Literal["run", "send", "receive", "upload"]
    number: Handle
    begin_ns: int
    end_ns: int


class Result(msgspec.Struct, frozen=True, omit_defaults=True, tag="result"):
    """Answer to a `Batch` that requested one.

    Attributes:
        items: One per handle in ``fetch``, then one per handle in ``describe``.
        failures: Failures since the last answer.
        timings: When the commands since the last answer were executed, if the session has requested timings.
        now_ns: Current time, by the same clock; 0 if the session has not requested timings.
        run_ns: How long programs of this session ran since the last answer, if requested; excludes waiting for turns.
        warnings: Warnings that kernels gave since the last answer.
        assumes: If not empty, the answer was sent before its batch: it is the answer only if this is the digest of the
            batches up to that one; see `djinn_plugins.executor.early_answers`.
        since: Number of the last batch that the server had received then; the digest begins with the next one.
        others: What it also assumes of other sessions, encoded by `djinn_plugins.common.wire.assumptions`.
        is_later: Whether ``items`` are the values of ``Batch.later``: then it reports and answers nothing else.
    """

    items: tuple[Item, ...] = ()
    failures: tuple[Failure, ...] = ()
    timings: tuple[Timing, ...] = ()
    now_ns: int = 0
    run_ns: Size = 0
    warnings: Annotated[tuple[Warned, ...], Meta(max_length=MAX_WARNINGS)] = ()
    assumes: Annotated[bytes, Meta(max_length=DIGEST_BYTES)] = b""
    since: Size = 0
    others: Annotated[bytes, Meta(max_length=MAX_TEXT)] = b""
    is_later: bool = False


class Ack(msgspec.Struct, frozen=True, tag="ack"):
    """The server has received all batches up to this frame's number; an answer implies the same for its batch."""


class Goodbye(msgspec.Struct, frozen=True, omit_defaults=True, tag="goodbye"):
    """The sender ends the session and keeps nothing of it.

    Attributes:
        code, summary, hint: Of the error that ended the session, if there was one.
    """

    code: Text = ""
    summary: Text = ""
    hint: Text = ""


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """Memory layout of a value that is sent in another layout; see `djinn_plugins.executor.transfers`.

    Attributes:
        size: Sizes of the value's dimensions.
        stride: Its strides in elements.
        is_packed: Whether the elements are sent contiguously, instead of the memory that contains them.
    """

    size: Annotated[tuple[Size, ...], Meta(max_length=64)]
    stride: Annotated[tuple[Size, ...], Meta(max_length=64)]
    is_packed: bool = False


class AliasedTensor(msgspec.Struct, frozen=True, array_like=True):
    """One of several values whose shared memory is sent whole.

    Attributes:
        dtype, size, stride: Of the value.
        storage_offset: Where the value begins in that memory, in its elements.
        is_conjugated, is_negated: Whether PyTorch conjugates or negates the elements on reading (lazy conj and neg
            bits).
        failure: Why there is no value; the other fields are then meaningless.
    """

    dtype: Text = ""
    size: Annotated[tuple[Size, ...], Meta(max_length=64)] = ()
    stride: Annotated[tuple[Size, ...], Meta(max_length=64)] = ()
    storage_offset: Size = 0
    is_conjugated: bool = False
    is_negated: bool = False
    failure: Failure | None = None


class ValueTransfer(msgspec.Struct, frozen=True, omit_defaults=True, tag="value_transfer"):
    """A value in transit between sessions; the frame's body holds the bytes of a tensor.

    Attributes:
        transfer: Number in the `Send`.
        item: The value; ``None`` if there is a failure instead.
        layout: Memory layout of the tensor, if it differs from the one sent.
        failure: Why there is no value; its source is set.
        members: The values that lie in the memory sent as ``item``, in the order of `Send.family`.
        told: Other failures in the sending session that its client does not know yet; their sources are set.
        ahead: If not empty, the client had not requested it, or had requested what was sent ahead; see
            `djinn_plugins.common.wire.assumptions`.
    """

    transfer: Handle
    item: TensorHeader | Plain | None = None
    layout: Layout | None = None
    failure: Failure | None = None
    members: tuple[AliasedTensor, ...] = ()
    told: tuple[Failure, ...] = ()
    ahead: Annotated[bytes, Meta(max_length=MAX_TEXT)] = b""


Message: TypeAlias = (
    Hello | Welcome | Redirect | Starting | Refusal | PeerHello | Batch | Result | Ack | Goodbye | ValueTransfer)


class _Complex(msgspec.Struct, frozen=True):
    real: float
    imag: float


def to_wire(value: Any) -> Any:
    """Convert a lifted number (int, float, complex, or list of these) to a form that msgpack can represent."""
    if isinstance(value, complex):
        return {"real": value.real, "imag": value.imag}
    if isinstance(value, (list, tuple)):
        return [item if type(item) is int or type(item) is float else to_wire(item) for item in value]
    return value


def from_wire(value: Any) -> Any:
    """Undo `to_wire`."""
    if isinstance(value, dict):
        return complex(*msgspec.structs.astuple(msgspec.convert(value, _Complex)))
    return [from_wire(item) for item in value] if isinstance(value, list) else value


_encoder = msgspec.msgpack.Encoder()
# msgspec crashes if several threads work out the form of a structure at once.
msgspec.msgpack.Decoder(_Complex)
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Encode a message as msgpack."""
    return _encoder.encode(message)


def decode(data: bytes | bytearray | memoryview) -> Message:
    """Decode and type-check a message.

    Raises:
        msgspec.DecodeError, RecursionError, ValueError: The data is not a message; callers convert this to a
            `djinn.errors.ProtocolError`.
    """
    return _decoder.decode(data)

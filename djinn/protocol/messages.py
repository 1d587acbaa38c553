"""The messages, as typed structures.

A session is a sequence of batches. The client numbers its values itself, so nothing waits to learn a name; a batch is
answered only if it asks for something (``fetch`` or ``describe``).
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from djinn.model.program import Program

PROTOCOL_VERSION = 3
GENERATOR_HANDLE = 0
"""Reserved handle: the state of the session's random generator, a ``uint8`` tensor whose form the executor defines."""
MARKS_HANDLE = 2**64 - 1
"""Reserved handle: the marks of what the server keeps for the session's owner, a list of bytes."""
DIGESTS_HANDLE = 2**64 - 2
"""Reserved handle: the digests of the same; what a session has been told of is kept until it ends."""
MARK_BYTES = 16
DIGEST_BYTES = 32

Handle: TypeAlias = Annotated[int, Meta(ge=0)]
Size: TypeAlias = Annotated[int, Meta(ge=0)]
Text: TypeAlias = Annotated[str, Meta(max_length=4096)]


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


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Answer to `Hello`: the session is open.

    Attributes:
        kept: How many uploads the server has kept for the owner so far; -1 if it keeps none.
    """

    protocol: int
    torch: Text
    python: Text
    byte_order: Text
    device: Text
    session: Text
    kept: int = -1


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """The connection is about to be closed, and why."""

    code: Text
    summary: Text
    hint: Text = ""


class TensorHeader(msgspec.Struct, frozen=True, array_like=True, tag="tensor"):
    """Describes one tensor of the frame's body. The bytes are those of the storage, in memory order.

    Attributes:
        dtype: Name as in ``torch.<name>``, from the closed table of `djinn.protocol.tensors`.
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
    """Run a program as its last two runs let expect, except for what is said here; see `djinn.protocol.forecast`.

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


Command: TypeAlias = Define | Forget | Upload | Recall | Run | Rerun | Copy | Seed | Free


class Batch(msgspec.Struct, frozen=True, omit_defaults=True, tag="batch"):
    """Commands to carry out in order.

    Attributes:
        commands: What to do.
        fetch: Handles whose data to send back.
        describe: Handles whose metadata to send back.
        synchronize: Answer even if nothing is fetched, so that failures become known.
    """

    commands: list[Command] = []
    fetch: tuple[Handle, ...] = ()
    describe: tuple[Handle, ...] = ()
    synchronize: bool = False

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
        kind: Name of the exception, from the closed table of `djinn.protocol.failures`.
        message: Its text.
        operator: Operator that raised, if one did.
        run: Handle-independent position: the program's number, or -1.
        step: Position of the step within the program, or -1.
    """

    identity: int
    kind: Text
    message: str
    operator: str = ""
    run: int = -1
    step: int = -1


class Result(msgspec.Struct, frozen=True, omit_defaults=True, tag="result"):
    """Answer to a `Batch` that asked.

    Attributes:
        items: One per handle in ``fetch``, then one per handle in ``describe``.
        failures: What went wrong since the last answer.
    """

    items: tuple[Item, ...] = ()
    failures: tuple[Failure, ...] = ()


Message: TypeAlias = Hello | Welcome | Refusal | Batch | Result


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

"""The greeting: who connects, whether both sides understand each other, and whether it may come in."""

from __future__ import annotations

import platform
import secrets
import sys

import attrs
import msgspec
import torch
from djinn_lib_service.contents import Contents, ContentStore
from djinn_lib_service.reuse import this_machine
from djinn_lib_service.steady import SteadyChannel

from djinn.errors import ProtocolError, ProtocolVersionError, RefusedError
from djinn.kinds.transport import Channel
from djinn.wire.messages import PROTOCOL_VERSION, Courier, Hello, Welcome

__all__ = ("LEASE_S", "Load", "answer_again", "answer_client", "check_versions", "courier_welcome", "receive_greeting")


LEASE_S = 30.0
"""How long a session stays whose connection broke, if nobody says otherwise."""


@attrs.frozen
class Load:
    """How much a server has to do.

    Attributes:
        memory_bytes: What all sessions together should hold at most; 0 if nobody said.
        held_bytes: What they hold.
        sessions: How many there are.
    """

    memory_bytes: int
    held_bytes: int
    sessions: int


def receive_greeting(channel: Channel) -> tuple[int, Hello | Courier] | None:
    """Receive the first message of a new connection.

    Returns:
        The number of its frame, and the greeting; ``None`` if the other side left without a word.

    Raises:
        ProtocolError: What it said is no greeting.
        TransportError: The connection broke.
    """
    received = channel.receive()
    if received is None:
        return None
    sequence, greeting, _ = received
    if not isinstance(greeting, (Hello, Courier)):
        raise ProtocolError(f"A {type(greeting).__name__} where a greeting was expected.")
    return sequence, greeting


def answer_client(
    channel: Channel, sequence: int, hello: Hello, device: str, store: ContentStore, mailbox: bytes, load: Load,
    resume: bytes = b"", lease_s: float = 0.0,
) -> tuple[str, Contents | None]:
    """Answer the greeting of a client that may come in.

    Args:
        channel: Its connection.
        sequence: Number of the greeting's frame.
        hello: The greeting.
        device: What the client is going to use.
        store: Keeps what clients upload that ask for it.
        mailbox: Where others may deliver values for the session.
        load: What the client is told of the server.
        resume: With what the session may be taken up again.
        lease_s: How long after its connection broke.

    Returns:
        The identifier of the session that begins, and what is kept for its owner, if anything is.

    Raises:
        TransportError: The connection broke.
    """
    session = secrets.token_hex(16)
    # From one process to another on the same machine, bytes travel as fast as they can be digested.
    keeps = bool(hello.owner) and store.limit_bytes > 0 and hello.machine != this_machine()
    channel.send(sequence, msgspec.structs.replace(
        courier_welcome(device), session=session, kept=store.count(hello.owner) if keeps else -1, mailbox=mailbox,
        memory_bytes=load.memory_bytes, held_bytes=load.held_bytes, sessions=load.sessions, resume=resume,
        lease_s=lease_s, taken=sequence))
    channel.greeted()
    return session, Contents(store, hello.owner) if keeps else None


def answer_again(channel: Channel, sequence: int, hello: Hello, device: str, steady: SteadyChannel, taken: int) -> None:
    """Answer the greeting of a client that takes up its session again, of which so many batches have come.

    Raises:
        TransportError: The connection broke.
    """
    channel.send(sequence, msgspec.structs.replace(
        courier_welcome(device), resume=hello.resume, lease_s=steady.lease_s, taken=taken))
    channel.greeted()


def courier_welcome(device: str) -> Welcome:
    """Say what this server is, to whoever begins no session."""
    return Welcome(PROTOCOL_VERSION, str(torch.__version__), platform.python_version(), sys.byteorder, device, "")


def check_versions(hello: Hello) -> None:
    """Make sure that both sides understand each other.

    Raises:
        ProtocolVersionError, RefusedError: They do not.
    """
    if hello.protocol != PROTOCOL_VERSION:
        raise ProtocolVersionError(f"The client speaks protocol {hello.protocol}, this server {PROTOCOL_VERSION}.",
                                   hint="Install the same djinn release on both.")
    if hello.byte_order != sys.byteorder:
        raise RefusedError(f"The client is a {hello.byte_order[:20]!r} endian machine, this server a "
                           f"{sys.byteorder!r} endian one, and tensors travel as they lie in memory.",
                           hint="Use a client and a server of the same byte order.")

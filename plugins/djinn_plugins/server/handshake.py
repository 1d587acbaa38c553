"""The greeting: identifies the peer, and checks that versions match and that it may connect."""

from __future__ import annotations

import logging
import platform
import secrets
import sys

import anyio
import anyio.to_thread
import attrs
import msgspec
import torch

from djinn.errors import DjinnError, ProtocolError, RefusedError, TransportError
from djinn.wire.messages import PROTOCOL_VERSION, Hello, Message, PeerHello, Refusal, Welcome
from djinn_plugins.client.upload_dedup import this_machine
from djinn_plugins.common.device_report import facts_of_device
from djinn_plugins.common.kinds.executor import Executor
from djinn_plugins.common.kinds.transport import Channel, SupportsAsyncHandshake
from djinn_plugins.common.net.stranger_log import StrangerLog
from djinn_plugins.executor.content_store import Contents, ContentStore
from djinn_plugins.server.abilities import supports
from djinn_plugins.server.log_lines import printable
from djinn_plugins.transport.resumable_channel import ResumableChannel

__all__ = ("HeldMemory", "answer_again", "answer_client", "greeting_of", "peer_welcome", "receive_from", "refuse",
           "refuse_async", "send_to")

_log = logging.getLogger("djinn.server")
_strangers = StrangerLog(_log)


@attrs.frozen
class HeldMemory:
    """What a server holds for its sessions.

    Attributes:
        memory_bytes: Memory limit of all sessions together; 0 if there is none.
        held_bytes: Bytes that they hold.
        sessions: Number of sessions.
    """

    memory_bytes: int
    held_bytes: int
    sessions: int


def greeting_of(
    received: tuple[int, Message, list[torch.Tensor]] | None
) -> tuple[int, Hello | PeerHello] | None:
    """Return the greeting that a connection begins with.

    Args:
        received: The first message.

    Returns:
        The number of its frame, and the greeting; ``None`` if the other side left without a greeting.

    Raises:
        ProtocolError: The message is no greeting.
    """
    if received is None:
        return None
    sequence, greeting, _ = received
    if not isinstance(greeting, (Hello, PeerHello)):
        raise ProtocolError(f"A {type(greeting).__name__} where a greeting was expected.")
    return sequence, greeting


async def receive_from(
    channel: Channel, threads: anyio.CapacityLimiter
) -> tuple[int, Message, list[torch.Tensor]] | None:
    """Wait for a connection's first message in an event loop.

    Args:
        channel: The connection. One that cannot be awaited occupies a thread.
        threads: Limits these threads.

    Raises:
        ProtocolError: The message is malformed.
        TransportError: The connection broke.
    """
    if supports(channel, SupportsAsyncHandshake):
        return await channel.receive_async()
    return await anyio.to_thread.run_sync(channel.receive, limiter=threads, abandon_on_cancel=True)


async def send_to(channel: Channel, sequence: int, message: Message) -> None:
    """Send a message without tensors in an event loop, or in a thread if the connection cannot be awaited.

    Raises:
        TransportError: The connection broke.
    """
    if supports(channel, SupportsAsyncHandshake):
        await channel.send_async(sequence, message)
    else:
        await anyio.to_thread.run_sync(channel.send, sequence, message, abandon_on_cancel=True)


def refuse(channel: Channel, error: Exception) -> None:
    """Log why a connection ends, and inform the other side if it is still connected."""
    refusal = refusal_for(channel, error)
    if refusal is not None:
        try:
            channel.send(0, refusal)
        except TransportError as left:
            _note_left(channel, left)


async def refuse_async(channel: Channel, error: Exception) -> None:
    """As `refuse`, in an event loop."""
    refusal = refusal_for(channel, error)
    if refusal is not None:
        try:
            await send_to(channel, 0, refusal)
        except TransportError as left:
            _note_left(channel, left)


def _note_left(channel: Channel, error: TransportError) -> None:
    _strangers.write(logging.INFO, "left before they could be told", "%s: left before it could be told: %s",
                     channel.peer, error)


def refusal_for(channel: Channel, error: Exception) -> Refusal | None:
    """Log why a connection ends, and return what to tell the other side; ``None`` if the connection broke."""
    if isinstance(error, TransportError) and not isinstance(error, RefusedError):
        _strangers.write(logging.INFO, f"connections that broke ({error.code})", "%s: %s", channel.peer,
                         printable(error))
        return None
    if isinstance(error, DjinnError):
        _strangers.write(logging.WARNING, f"refused ({error.code})", "%s: refused: %s", channel.peer, printable(error))
        return Refusal(error.code, error.summary[:4000], error.hint[:4000], error.retry_after_s)
    return Refusal(DjinnError.code, "The session failed inside the server.",
                   "See the server's log; report it if it happens again.")


def answer_client(
    channel: Channel, sequence: int, hello: Hello, executor: Executor, store: ContentStore, mailbox: bytes,
    load: HeldMemory, resume: bytes = b"", lease_s: float = 0.0,
) -> tuple[str, Contents | None]:
    """Answer the greeting of an admitted client.

    Args:
        channel: Its connection.
        sequence: Number of the greeting's frame.
        hello: The greeting.
        executor: The executor that the client will use.
        store: Caches uploads for clients that request it.
        mailbox: Key of the mailbox where others may deliver values for the session.
        load: The server's load, which is reported to the client.
        resume: Key that resumes the session.
        lease_s: How long the session can be resumed after its connection breaks.

    Returns:
        The identifier of the new session, and the cached contents of its owner, if there are any.

    Raises:
        TransportError: The connection broke.
    """
    session = secrets.token_hex(16)
    # On the same machine, sending bytes is as fast as computing their digest, so the cache is not used.
    keeps = bool(hello.owner) and store.limit_bytes > 0 and hello.machine != this_machine()
    channel.send(sequence, msgspec.structs.replace(
        _described(executor), session=session, kept=store.count(hello.owner) if keeps else -1, mailbox=mailbox,
        memory_bytes=load.memory_bytes, held_bytes=load.held_bytes, sessions=load.sessions, resume=resume,
        lease_s=lease_s, received=sequence))
    channel.greeted()
    return session, Contents(store, hello.owner) if keeps else None


def answer_again(
    channel: Channel, sequence: int, hello: Hello, executor: Executor, steady: ResumableChannel, received: int
) -> None:
    """Answer the greeting of a client that resumes its session; ``received`` is the number of batches already received.

    Raises:
        TransportError: The connection broke.
    """
    channel.send(sequence, msgspec.structs.replace(
        _described(executor), resume=hello.resume, lease_s=steady.lease_s, received=received))
    channel.greeted()


def _described(executor: Executor) -> Welcome:
    return msgspec.structs.replace(peer_welcome(executor.device), facts=facts_of_device(executor))


def peer_welcome(device: str) -> Welcome:
    """Describe this server to a peer that begins no session."""
    return Welcome(PROTOCOL_VERSION, str(torch.__version__), platform.python_version(), sys.byteorder, device, "")

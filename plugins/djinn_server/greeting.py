"""The greeting: who connects, whether both sides understand each other, and whether it may come in."""

from __future__ import annotations

import platform
import secrets
import sys
from collections.abc import Callable

import torch

from djinn.errors import ProtocolError, ProtocolVersionError, RefusedError
from djinn.kinds.executor import Executor
from djinn.kinds.transport import Channel
from djinn.protocol.contents import Contents, ContentStore
from djinn.protocol.messages import PROTOCOL_VERSION, Hello, Welcome
from djinn.protocol.reuse import this_machine

__all__ = ("check_versions", "greet")


def greet(
    channel: Channel, executor: Executor, admit: Callable[[Channel, Hello], None], store: ContentStore
) -> tuple[str, Contents | None] | None:
    """Receive a client's greeting and answer it.

    Args:
        channel: A new connection.
        executor: What the client is going to use.
        admit: Raises if the client may not come in.
        store: Keeps what clients upload that ask for it.

    Returns:
        The identifier of the session that begins, and what is kept for its owner, if anything is; ``None`` if the
        client left without a word.

    Raises:
        ProtocolError: What it said is no greeting.
        ProtocolVersionError, RefusedError: The client cannot or may not use this server.
        TransportError: The connection broke.
    """
    received = channel.receive()
    if received is None:
        return None
    sequence, hello, _ = received
    if not isinstance(hello, Hello):
        raise ProtocolError(f"A {type(hello).__name__} where a greeting was expected.")
    check_versions(hello)
    admit(channel, hello)
    session = secrets.token_hex(16)
    # From one process to another on the same machine, bytes travel as fast as they can be digested.
    keeps = bool(hello.owner) and store.limit_bytes > 0 and hello.machine != this_machine()
    channel.send(sequence, Welcome(PROTOCOL_VERSION, str(torch.__version__), platform.python_version(), sys.byteorder,
                                   executor.device, session, store.count(hello.owner) if keeps else -1))
    channel.greeted()
    return session, Contents(store, hello.owner) if keeps else None


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

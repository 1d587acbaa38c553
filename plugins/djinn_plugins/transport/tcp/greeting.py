"""The greeting at a client's end: its content, and the answers that are accepted."""

from __future__ import annotations

import logging
import platform
import sys
from collections.abc import Callable
from time import monotonic

import attrs
import msgspec
import torch

from djinn.errors import ConfigurationError, ProtocolError, ProtocolVersionError, TransportError
from djinn.wire.messages import PROTOCOL_VERSION, Hello, Message, PeerHello, Redirect, Starting, Welcome
from djinn_plugins.client.upload_dedup import introduce
from djinn_plugins.common.device_report import device_of
from djinn_plugins.common.net.terminal_text import harmless
from djinn_plugins.common.net.waits import now_waiting
from djinn_plugins.transport.tcp.sockets import ByteStream

__all__ = ("Wish", "check_token", "hello", "welcomed")

MAX_STARTING_S = 600.0
"""How long a server may say that a worker is starting; it gives up much earlier."""
_log = logging.getLogger("djinn.transport")


@attrs.frozen
class Wish:
    """The part of a greeting that says which session is wanted.

    Attributes:
        resumes, resume, answered, cancelled, takes_early, name: See `djinn.wire.messages.Hello`.
    """

    resumes: bool = False
    resume: bytes = b""
    answered: int = 0
    cancelled: int = 0
    takes_early: bool = False
    name: str = ""


def check_token(token: str) -> None:
    """Check that a token can be sent.

    Raises:
        ConfigurationError: It is no text, as a variable of the environment need not be.
    """
    try:
        token.encode()
    except UnicodeEncodeError:
        raise ConfigurationError("The token is no text: it contains something else than UTF-8.",
                                 hint="Correct DJINN_TOKEN, or djinn.init(token=...).") from None


def hello(token: str, owner: str, secret: str, ticket: str, wish: Wish) -> Hello:
    """Build the greeting; see `djinn_plugins.transport.tcp.connection.SocketConnection.greet`."""
    return Hello(
        PROTOCOL_VERSION, str(torch.__version__), platform.python_version(), sys.byteorder, token,
        *introduce(owner, token or secret), ticket, wish.resumes, wish.resume, wish.answered,
        wish.cancelled, wish.takes_early, wish.name)


def welcomed(
    address: str, greeting: Hello | PeerHello, read: Callable[[], Message], stream: ByteStream, silence_s: float,
) -> Welcome | Redirect:
    """Wait for the answer to a greeting, while the server reports that a worker is starting.

    Args:
        address: Address of the server.
        greeting: The greeting that was sent.
        read: Receives a message.
        stream: The stream that carries the messages.
        silence_s: How long the server may be silent after each message.

    Raises:
        ProtocolError: The message is no answer.
        ProtocolVersionError: The other side does not understand this one.
    """
    answer = read()
    if isinstance(answer, Starting):
        _log.warning("%s is starting a worker for this session: waiting for it", address)
        now_waiting(f"{address} is starting a worker")
    until = monotonic() + MAX_STARTING_S
    while isinstance(answer, Starting):
        if monotonic() > until:
            raise TransportError(f"{address} has said for {MAX_STARTING_S:g} s that a worker is starting.",
                                 hint="See the server's log for the reason.")
        stream.deadline = monotonic() + silence_s
        answer = read()
    if isinstance(answer, Redirect) and isinstance(greeting, Hello):
        return answer
    if not isinstance(answer, Welcome):
        raise ProtocolError(f"It answered the greeting with a {type(answer).__name__}.")
    answer = msgspec.structs.replace(answer, **{name: harmless(getattr(answer, name)) for name in (
        "torch", "python", "byte_order", "device", "session")})
    _check(answer)
    return answer


def _check(welcome: Welcome) -> None:
    """Check that the server and this client have compatible versions, and the description of the device.

    Raises:
        ProtocolError: The device is not described as it should be.
        ProtocolVersionError: They do not.
    """
    if welcome.protocol != PROTOCOL_VERSION or welcome.byte_order != sys.byteorder:
        raise ProtocolVersionError(
            f"The server speaks protocol {welcome.protocol} and is {welcome.byte_order}-endian, this client protocol "
            f"{PROTOCOL_VERSION} and {sys.byteorder}-endian.",
            hint="Install the same djinn release on both, on machines of the same byte order.")
    device_of(welcome)

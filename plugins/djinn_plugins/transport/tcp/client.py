"""Connecting as a client: over the different kinds of sockets, and following a redirect."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, sleep

import attrs

from djinn.errors import ConfigurationError, TransportError
from djinn.kinds.transport import ConnectOptions
from djinn_plugins.common.settings.connection import ResumeSettings, UploadSettings
from djinn_plugins.common.settings.named import NamedSettings
from djinn_plugins.transport.tcp.address import parse_address, redirected
from djinn_plugins.transport.tcp.connection import SocketConnection
from djinn_plugins.transport.tcp.greeting import Wish, check_token
from djinn_plugins.transport.tcp.opening import open_tcp, open_tls, open_unix
from djinn_plugins.transport.tcp.stream import FrameStream
from djinn_plugins.transport.tcp.tls import client_context

__all__ = ("SocketConnection", "Wish", "connect", "connect_tls", "connect_unix", "open_tcp", "open_unix", "reach")

PAUSES_S = (0.02, 0.2)
"""How long to wait before asking a server again where to go, after a worker that has died."""


def connect(address: str, options: ConnectOptions) -> SocketConnection:
    """Connect to a server over TCP and greet it; see `djinn.kinds.transport.Transport.connect`."""
    return _connect(address, open_tcp, options)


def connect_tls(address: str, options: ConnectOptions) -> SocketConnection:
    """Connect to a server over TLS and greet it; see `djinn.kinds.transport.Transport.connect`."""
    parse_address(address, scheme="tls")
    context = client_context(options)

    def opened(target: str, options: ConnectOptions) -> FrameStream:
        return open_tls(target, client_context(options) if options.tls_pin else context, options)

    return _connect(address, opened, options)


def connect_unix(address: str, options: ConnectOptions) -> SocketConnection:
    """Connect to a server on this machine and greet it; see `djinn.kinds.transport.Transport.connect`."""
    return _connect(address, open_unix, options)


def _connect(address: str, opened: Callable[[str, ConnectOptions], FrameStream],
             options: ConnectOptions) -> SocketConnection:
    connection = reach(address, opened, options)
    connection.take_up_again(lambda options, wish: reach(address, opened, options, wish), options)
    return connection


def reach(
    address: str, opened: Callable[[str, ConnectOptions], FrameStream], options: ConnectOptions,
    wish: Wish | None = None,
) -> SocketConnection:
    """Connect and greet, following a redirect if there is one; again, if it leads to a worker that has just died.

    Args:
        address: The server's address.
        opened: Opens the connection.
        options: As for `djinn.kinds.transport.Transport.connect`.
        wish: The session to resume, if there is one.

    Raises:
        TransportError: As for `djinn.kinds.transport.Transport.connect`.
    """
    resuming = options.settings(ResumeSettings)
    wish = wish or Wish(resuming.resume, takes_early=resuming.resume and resuming.early_answers,
                        name=options.settings(NamedSettings).name)
    pauses_s = iter(PAUSES_S)
    while True:
        try:
            return _reach(address, opened, options, wish)
        except _NoWorkerError as error:
            pause_s = next(pauses_s, None)
            if pause_s is None:
                raise TransportError(error.summary, hint=error.hint) from None
            sleep(pause_s)


class _NoWorkerError(TransportError):
    """No worker answers at the address that a server leads to."""

    code = TransportError.code


def _reach(
    address: str, opened: Callable[[str, ConnectOptions], FrameStream], options: ConnectOptions, wish: Wish
) -> SocketConnection:
    check_token(options.token)
    deadline = monotonic() + options.connect_timeout_s
    connection = SocketConnection(address, opened(address, options), options.request_timeout_s)
    owner = options.settings(UploadSettings).owner
    redirect = connection.greet(options.token, deadline, owner, wish=wish)
    if redirect is None:
        return connection
    expires_s = connection.certificate_expires_s
    connection.close()
    try:
        target = redirected(address, redirect.address)
    except ConfigurationError as error:
        raise TransportError(f"{address} leads to {redirect.address[:100]!r}, where nobody should go: {error.summary}",
                             hint="See how the server was started.") from None
    try:
        opened_there = opened(target, attrs.evolve(options, tls_pin=redirect.certificate))
    except ConfigurationError as error:
        raise TransportError(f"{address} leads to {target}, which cannot be trusted: {error.summary}",
                             hint="See how the server was started.") from None
    except TransportError as error:
        raise _gone(error) from None
    # A new deadline: the worker may have taken longer to start than the first connection could stay silent.
    deadline = monotonic() + options.connect_timeout_s
    connection = SocketConnection(address, opened_there, options.request_timeout_s)
    # The user is interested in the expiry of the server's own certificate, which vouches for the worker's.
    connection.vouched_until_s = expires_s
    try:
        again = connection.greet("", deadline, owner, secret=options.token, ticket=redirect.ticket, wish=wish)
    except TransportError as error:
        raise _gone(error) from None
    if again is not None:
        connection.close()
        raise TransportError(f"{address} leads to {target}, and that leads elsewhere again.",
                             hint="See how the server was started.")
    return connection


def _gone(error: TransportError) -> TransportError:
    """Return the error of a worker: one that may have died, if it has neither refused the client nor been too slow."""
    if type(error) is not TransportError:
        return error
    return _NoWorkerError(error.summary, hint=error.hint)

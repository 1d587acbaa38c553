"""The directory's endpoint: servers join it, and clients ask it."""

from __future__ import annotations

import hmac
import logging
import ssl
from collections.abc import Callable

import anyio
import anyio.to_thread
import msgspec
from anyio.abc import ByteStream, SocketAttribute, SocketListener, SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream
from anyio.streams.tls import TLSStream

from djinn.errors import ConfigurationError, DjinnError, LimitError, ProtocolError, RefusedError
from djinn_plugins.cluster.directory.choosing import STALE_S, ServerListing
from djinn_plugins.cluster.directory.ordering import ServerOrders
from djinn_plugins.cluster.messages import (
    MAX_LINE_BYTES,
    MAX_LOAD_BYTES,
    Accepted,
    DirectoryProblem,
    Draining,
    Join,
    ListServers,
    LoadReport,
    RenameOrder,
    Resolve,
    ServerList,
    decoded,
    encoded,
)
from djinn_plugins.common.net.accepting import Visit, accept_forever
from djinn_plugins.common.net.stranger_log import StrangerLog
from djinn_plugins.server.tenants import session_digest

__all__ = ("DirectoryEndpoint",)

TIMEOUT_S = 5.0
"""How long a connection may take to greet with TLS, to ask, and to read an answer."""
MAX_SERVERS = 1000
MAX_CONNECTIONS = 2000
MAX_CHECKS = 8
"""How many tokens are checked at a time."""
_LEFT = (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, anyio.IncompleteRead)
_log = logging.getLogger("djinn.directory")
_strangers = StrangerLog(_log)


class DirectoryEndpoint:
    """Answers servers, clients and operators.

    Malformed input of a connection ends that connection, and no other.

    Args:
        name: The cluster's name.
        key: The secret of its servers.
        tenant_of: Returns the name of a token's tenant, and raises unless it is valid; called in threads.
        context: For encrypted connections; ``None`` for plain ones.

    Attributes:
        listing: The servers that have joined.

    Concurrency:
        Tasks of one event loop.
    """

    def __init__(self, name: str, key: str, tenant_of: Callable[[str], str], context: ssl.SSLContext | None) -> None:
        self._name = name
        self._key = key.encode()
        self._tenant_of = tenant_of
        self._context = context
        self.listing = ServerListing()
        self._checks = anyio.CapacityLimiter(MAX_CHECKS)

    async def run(self, listener: SocketListener) -> None:
        """Answer until cancelled."""
        await accept_forever(listener, self._attend, MAX_CONNECTIONS)

    async def drain(self, address: str) -> str:
        """Ask a server to drain, and return the outcome.

        Raises:
            ConfigurationError: There is no such server, or it cannot do that.
            TransportError: It does not answer.
        """
        member = self.listing.find(address)
        if member is None or member.orders is None:
            raise ConfigurationError(f"No server {address[:512]!r} is listed.", hint="It may have ended; look again.")
        return await member.orders.drain()

    async def _attend(self, plain: SocketStream, visit: Visit) -> None:
        try:
            with anyio.fail_after(TIMEOUT_S):
                stream: ByteStream = plain if self._context is None else await TLSStream.wrap(
                    plain, server_side=True, ssl_context=self._context, standard_compatible=False)
            await self._serve(stream, visit, str(plain.extra(SocketAttribute.remote_address)))  # noqa: S610  # no part of Django
        except (*_LEFT, ssl.SSLError) as error:
            _strangers.write(logging.INFO, "connections that ended", "a connection ended: %s",
                             str(error) or type(error).__name__)

    async def _serve(self, stream: ByteStream, visit: Visit, peer: str) -> None:
        lines = BufferedByteReceiveStream(stream)
        try:
            with anyio.fail_after(TIMEOUT_S):
                message = _read(await lines.receive_until(b"\n", MAX_LINE_BYTES))
            with visit.busy():
                if isinstance(message, Join):
                    await self._list(stream, lines, message)
                    return
                answer = await self._answer(message)
        except anyio.DelimiterNotFound:
            problem = ProtocolError("The first line is too long.")
            await _send(stream, encoded(DirectoryProblem(problem.code, problem.summary)))
        except DjinnError as error:
            _strangers.write(logging.WARNING, f"refused ({error.code})", "%s: refused: %s", peer, error.summary)
            await _send(stream, encoded(DirectoryProblem(error.code, error.summary[:4000], error.hint[:4000])))
        else:
            await _send(stream, encoded(answer))

    async def _answer(self, message: object) -> ServerList:
        if isinstance(message, Resolve):
            tenant = await anyio.to_thread.run_sync(self._tenant_of, message.token, limiter=self._checks)
            self._check_name(message.name)
            digest = session_digest(tenant, message.session) if message.session else ""
            if digest:
                await anyio.sleep(self.listing.names.unsettled_s(digest))
            chosen = self.listing.choose(message, digest)
            if not chosen:
                problems = {server.load.problem for server in self.listing.all() if server.load is not None}
                raise RefusedError(f"The cluster {self._name} has no server where a session can begin: "
                                   f"{' '.join(sorted(filter(None, problems))) or 'none has joined.'}",
                                   hint="Try again later; `djinn cluster status` shows the servers.")
            return ServerList(chosen)
        if isinstance(message, ListServers):
            self._check_key(message.key)
            return ServerList(tuple(self.listing.all()))
        raise ProtocolError(f"A {type(message).__name__} where a question was expected.")

    async def _list(self, stream: ByteStream, lines: BufferedByteReceiveStream, join: Join) -> None:
        """List a server for as long as it reports its load, and let it answer orders."""
        self._check_key(join.key)
        self._check_name(join.name)
        if len(self.listing) >= MAX_SERVERS:
            raise LimitError(f"A directory lists {MAX_SERVERS} servers at most.", hint="Start another one.")
        member, orders = self.listing.join(join.address), ServerOrders(join.address, stream)
        try:
            await _send(stream, encoded(Accepted()))
            member.orders = orders
            _log.info("%s has joined", join.address)
            while True:
                with anyio.fail_after(STALE_S):
                    message = _read(await lines.receive_until(b"\n", MAX_LOAD_BYTES))
                if isinstance(message, LoadReport):
                    self.listing.report(member, message)
                    for named, holder in self.listing.names.superseded(join.address):
                        await orders.send(RenameOrder(named, holder))
                elif isinstance(message, Draining | DirectoryProblem):
                    orders.answered(message)
                else:
                    raise ProtocolError(f"A {type(message).__name__} where a load was expected.")
        finally:
            orders.answered(None)
            self.listing.leave(member)
            _log.info("%s has left", join.address)

    def _check_key(self, key: str) -> None:
        if not hmac.compare_digest(key.encode("utf-8", "surrogateescape"), self._key):
            raise RefusedError("The key is wrong.", hint="Give the file that the directory was started with.")

    def _check_name(self, name: str) -> None:
        if name not in ("", self._name):
            raise RefusedError(f"This is the directory of another cluster than {name[:64]!r}.",
                               hint="Correct the name at the end of the address.")


def _read(line: bytes) -> object:
    try:
        return decoded(line)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"That is no message of a directory: {error}.") from None


async def _send(stream: ByteStream, data: bytes) -> None:
    with anyio.fail_after(TIMEOUT_S):
        await stream.send(data)

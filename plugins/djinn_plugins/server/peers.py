"""Decides which servers values may be sent to, and opens the connections."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from typing import Any

import attrs

from djinn.errors import ConfigurationError, PeerError
from djinn.kinds.transport import ConnectOptions, Transport
from djinn.wire.messages import PeerHello
from djinn_plugins.common.kinds.transport import PeerConnection, SupportsPeerRelay, SupportsPeers
from djinn_plugins.executor.mailbox import InboxRegistry
from djinn_plugins.executor.peer_exchange import LocalPeer

__all__ = ("PeerConnector", "PeerPolicy")

CONNECT_TIMEOUT_S = 10.0
UNIX = "unix"
"""The entry that permits all Unix-domain sockets of this machine."""
_NO_BRACKETS = str.maketrans("", "", "[]")
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_LOOPBACK: tuple[_Network, ...] = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))


@attrs.frozen
class PeerPolicy:
    """The servers that this one may connect to.

    Without such rules, any client with a session could make this server connect to any address that it can reach.

    Attributes:
        names: Names of hosts, in lower case.
        networks: Networks of permitted addresses.
        unix: Whether Unix-domain sockets of this machine are permitted.
    """

    names: frozenset[str] = frozenset()
    networks: tuple[_Network, ...] = ()
    unix: bool = False

    @classmethod
    def parse(cls, text: str, *, is_private: bool, listens_on_path: bool = False) -> PeerPolicy:
        """Parse the option ``--peers``.

        Args:
            text: Names, addresses and networks, with commas between.
            is_private: The server itself can be reached from this machine only, so it may reach this machine, too.
            listens_on_path: The server listens on a Unix-domain socket, so it may connect to others.

        Raises:
            ConfigurationError: An entry is neither a host nor a network.
        """
        names: set[str] = set()
        networks: list[_Network] = list(_LOOPBACK) if is_private else []
        for entry in filter(None, (part.strip() for part in text.split(","))):
            try:
                networks.append(ipaddress.ip_network(entry.translate(_NO_BRACKETS), strict=False))
            except ValueError as error:
                if "/" in entry or ":" in entry or any(map(str.isspace, entry)):
                    raise ConfigurationError(f"{entry!r} in --peers is no host and no network: {error}.",
                                             hint="Write names, addresses or networks such as 10.0.0.0/8, without "
                                                  "ports, with commas between.") from None
                names.add(entry.lower())
        return cls(frozenset(names - {UNIX}), tuple(networks), listens_on_path or UNIX in names)

    def permit(self, address: str) -> str:
        """Return the address to connect to. A host that is permitted by its network is resolved to an IP address.

        Raises:
            PeerError: It is not permitted, or there is no such host.
        """
        scheme, _, rest = address.partition("://")
        if scheme == UNIX:
            if self.unix:
                return address
            raise _refused(address, UNIX)
        host, _, port = rest.rstrip("/").rpartition(":")
        host = host.strip("[]")
        if host.lower() in self.names:
            return address
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host else []
        except (OSError, ValueError) as error:
            raise PeerError(f"{address} cannot be reached from here: {error}.",
                            hint="Give the address that the servers have for each other.") from None
        numbers = [str(entry[4][0]) for entry in found]
        if not numbers or not all(map(self._is_permitted, numbers)):
            raise _refused(address, host)
        # Connect to the address that was checked: the name may resolve to another one the next time.
        return f"{scheme}://[{numbers[0]}]:{port}" if ":" in numbers[0] else f"{scheme}://{numbers[0]}:{port}"

    def _is_permitted(self, number: str) -> bool:
        address: Any = ipaddress.ip_address(number.partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None)
        return any((mapped or address) in network for network in self.networks)


class PeerConnector:
    """Opens connections to the mailboxes of other sessions, on this server or on others.

    Args:
        room: This server's mailboxes.
        rules: Which servers may be connected to.
        transport_for: Returns the transport of a scheme.
        dial: Lets another process connect, which enforces the rules; by default, this process connects.

    Concurrency:
        Any thread.
    """

    def __init__(self, room: InboxRegistry, rules: PeerPolicy, transport_for: Callable[[str], Transport],
                 dial: Callable[[str, PeerHello], tuple[int, bytes]] | None = None) -> None:
        self._room = room
        self._dial = dial
        self._rules = rules
        self._transport_for = transport_for

    def open(self, address: str, peer: PeerHello, is_gone: Callable[[], bool]) -> PeerConnection:
        """Connect to a mailbox.

        Args:
            address: Its server's address; ignored if the mailbox is on this server.
            peer: The mailbox, and the sending session.
            is_gone: Whether the sending session has ended.

        Raises:
            PeerError: The server may not be connected to.
            DjinnError: The connection failed.
        """
        here = self._room.find(peer.mailbox)
        if here is not None:
            return LocalPeer(here, peer.session, is_gone)
        transport = self._transport_for(address.partition("://")[0])
        options = ConnectOptions(connect_timeout_s=CONNECT_TIMEOUT_S, is_gone=is_gone)
        if self._dial is not None and isinstance(transport, SupportsPeerRelay):
            return transport.adopt_peer(*self._dial(address, peer), address, options)
        if not isinstance(transport, SupportsPeers):
            raise PeerError(f"{address} is reached by transport {transport.name!r}, which carries no values between "
                            "servers.", hint="Bring the value home and upload it there.")
        return transport.connect_peer(self._rules.permit(address), peer, options)


def _refused(address: str, host: str) -> PeerError:
    return PeerError(f"This server may not connect to {address}.",
                     hint=f"Start it with `djinn serve --peers {host or 'HOST'}`, or bring the value home and upload "
                          "it there.")


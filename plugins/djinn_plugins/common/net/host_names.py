"""Names by which browsers and programs may ask this machine for pages."""

from __future__ import annotations

import ipaddress
import socket

__all__ = ("HostNames",)


class HostNames:
    """The names of this machine. Another name may be a stranger's, whose web page leads here by it.

    Args:
        host: The host that is listened on.
        others: Further names that the operator gives, separated by commas.
    """

    def __init__(self, host: str, others: str = "") -> None:
        self._names = {name.strip().lower() for name in (
            host, "localhost", socket.gethostname(), socket.getfqdn(), *filter(None, others.split(",")))}

    def has(self, host: str) -> bool:
        """Whether a request's header ``Host`` has an address, or a name of this machine."""
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return name.lower() in self._names
        return True

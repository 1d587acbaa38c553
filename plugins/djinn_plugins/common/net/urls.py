"""URLs of what listens on a host and a port."""

from __future__ import annotations

__all__ = ("url_of",)


def url_of(scheme: str, host: str, port: int) -> str:
    """Build a URL. An IPv6 address is put into brackets."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

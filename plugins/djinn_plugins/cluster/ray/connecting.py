"""The connection to a Ray cluster, of which this machine is a node."""

from __future__ import annotations

import logging
import os
import re
import socket
from typing import Any

from djinn.errors import ConfigurationError

__all__ = ("HeadGoneError", "connected", "ray_package")

TIMEOUT_S = 5.0
_ADDRESS = re.compile(r"(?P<host>\[[^]]+\]|[^:/]+):(?P<port>\d+)")


class HeadGoneError(ConfigurationError):
    """There is no connection to the Ray cluster."""


def ray_package() -> Any:
    """Import Ray.

    Raises:
        ConfigurationError: It is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigurationError(f"The engine ray needs the package ray: {error}.",
                                 hint="Run: python3 -m pip install 'djinn-torch[ray]'") from None
    return ray


def connected(address: str = "") -> Any:
    """Return Ray's package, connected to a cluster. This process never starts one.

    Args:
        address: Where its head is; empty for that of RAY_ADDRESS, or else the cluster that this machine is a node of.

    Raises:
        HeadGoneError: There is no connection.
        ConfigurationError: This process is connected to another cluster, or Ray is not installed.
    """
    ray = ray_package()
    if ray.is_initialized():
        present = ray.get_runtime_context().gcs_address
        if address in ("", present):
            return ray
        raise ConfigurationError(f"This process is connected to the Ray cluster at {present}, and the programs run in "
                                 f"that at {address}.", hint="Use a separate process, such as `djinn cluster`.")
    address = address or os.environ.get("RAY_ADDRESS", "") or "auto"
    try:
        _check(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        where = "on this machine" if address == "auto" else f"at {address}"
        raise HeadGoneError(
            f"There is no connection to a Ray cluster {where}: {' '.join(str(error).split())}",
            hint="Start Ray's node on this machine with `ray start`, or set RAY_ADDRESS to HOST:PORT of its head.",
        ) from None
    return ray


def _check(address: str) -> None:
    """Connect to the head: Ray itself would try for a minute, and then end this process."""
    if address == "auto":
        return
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise ValueError(f"{address} is not HOST:PORT")
    with socket.create_connection((found["host"].strip("[]"), int(found["port"])), timeout=TIMEOUT_S):
        pass

"""Waiting until the directory of a cluster leads clients to its servers."""

from __future__ import annotations

import time
from pathlib import Path

from djinn_lib_cluster.asking import ask
from djinn_lib_cluster.messages import ListServers
from djinn_lib_server.secret_files import key_in
from djinn_lib_service.settings import client_authorities

from djinn.errors import DjinnError

__all__ = ("await_servers",)

JOINING_S = 30.0
"""How long servers that accept connections may take to be listed."""
TICK_S = 0.1


def await_servers(directory: str, key: Path, count: int) -> str:
    """Wait until a directory lists so many servers where sessions can begin, for 30 s at most.

    Args:
        directory: Its address.
        key: The file with the key that servers know it by.
        count: How many servers there are.

    Returns:
        Empty, or why clients do not find all of them.

    Raises:
        ConfigurationError: The key cannot be read.
    """
    known_by = key_in(key)
    authorities = client_authorities()
    deadline = time.monotonic() + JOINING_S
    while why := _missing(directory, known_by, authorities, count):
        if time.monotonic() > deadline:
            return why
        time.sleep(TICK_S)
    return ""


def _missing(directory: str, key: str, authorities: str, count: int) -> str:
    try:
        listed = ask(directory, lambda _: ListServers(key), authorities=authorities)
    except DjinnError as error:
        return str(error)
    problems = [server.load.problem for server in listed if server.load is not None]
    led = problems.count("")
    return "" if led >= count else " ".join([
        f"The directory leads clients to {led} of {count} servers.", *sorted(filter(None, problems))])

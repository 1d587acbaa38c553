"""Waiting until the directory of a cluster leads clients to its servers."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from djinn.errors import ConfigurationError, DjinnError
from djinn_plugins.cluster.asking import ask
from djinn_plugins.cluster.kinds import SupportsHosts
from djinn_plugins.cluster.messages import ListServers
from djinn_plugins.common.files.secret_files import key_in

__all__ = ("await_servers", "await_servers_apart", "main")

JOINING_S = 30.0
"""How long servers that accept connections may take to be listed."""
TICK_S = 0.1
_THERE = ("from djinn_plugins.postponing import postpone; postpone('djinn'); "
          "from djinn_plugins.cluster.joining import main; main()")
"""The program that waits beside a directory. It needs no PyTorch."""


def await_servers(directory: str, key: Path, count: int, authorities: str) -> str:
    """Wait until a directory lists so many servers where sessions can begin, for 30 s at most.

    Args:
        directory: Its address.
        key: The file with the key that servers know it by.
        count: How many servers there are.
        authorities: File with the authorities that are trusted; empty for the system's.

    Returns:
        Empty, or why clients do not find all of them.

    Raises:
        ConfigurationError: The key cannot be read.
    """
    known_by = key_in(key)
    deadline = time.monotonic() + JOINING_S
    while why := _missing(directory, known_by, authorities, count):
        if time.monotonic() > deadline:
            return why
        time.sleep(TICK_S)
    return ""


def await_servers_apart(engine: SupportsHosts, program: str, directory: str, key: Path, count: int,
                        authorities: str) -> str:
    """Wait as `await_servers` does, beside the directory's program: perhaps nothing leads from here to it."""
    words: Sequence[str] = ("-c", _THERE, directory, str(key), str(count), authorities)
    try:
        return engine.run(program, words).strip()
    except ConfigurationError as error:
        return f"It is not known whether the directory leads clients to its servers: {error.summary}"


def main() -> None:
    """Wait beside a directory, and print the outcome."""
    directory, key, count, authorities = sys.argv[1:]
    try:
        why = await_servers(directory, Path(key), int(count), authorities)
    except ConfigurationError as error:
        why = str(error)
    print(why)  # noqa: T201  # read by the command


def _missing(directory: str, key: str, authorities: str, count: int) -> str:
    try:
        listed = ask(directory, lambda _: ListServers(key), authorities=authorities)
    except DjinnError as error:
        return str(error)
    problems = [server.load.problem for server in listed if server.load is not None]
    led = problems.count("")
    return "" if led >= count else " ".join([
        f"The directory leads clients to {led} of {count} servers.", *sorted(filter(None, problems))])

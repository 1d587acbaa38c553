"""The process that keeps the programs of a local cluster running. It is started with the cluster, and ends with it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from djinn_plugins.cluster.keeping import keep
from djinn_plugins.cluster.kinds import ClusterSpec
from djinn_plugins.cluster.records import Records

__all__ = ("KEPT", "OTHER_KEEPER", "main")

KEPT = b"kept\n"
"""What a keeper announces when it holds the lock."""
OTHER_KEEPER = 3
"""Exit status of a keeper if there is another one."""


def main(folder: str, announce: Callable[[bytes], object]) -> int:
    """Read the specification from standard input, and run its programs until a signal asks to stop.

    Args:
        folder: Where the records are.
        announce: Called with `KEPT` once this process is the keeper.

    Returns:
        The exit status.
    """
    records = Records(Path(folder))
    spec = _decoder.decode(sys.stdin.buffer.read())
    lock = records.acquire()
    if lock is None:
        return OTHER_KEEPER
    keep(records, spec, announce=lambda: announce(KEPT))
    records.remove()
    os.close(lock)
    return 0


_decoder = msgspec.json.Decoder(ClusterSpec)

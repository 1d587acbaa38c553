"""The programs of a cluster: its directory, and its servers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise

from djinn_lib_cluster.asking import IN_FILE, DirectoryAddress, reachable
from djinn_lib_cluster.kinds import EngineProgram

from djinn_cluster.clusters import Cluster

__all__ = ("DIRECTORY", "programs_of")

DIRECTORY = "directory"
"""Name of the directory among the programs."""
_DJINN = (sys.executable, "-c", "from djinn_start import main; main()")
_SHARED = ("--host", "--token", "--tokens", "--tls-cert", "--tls-key")
"""Options of servers that hold for the directory, too: who may reach it, and with what."""


def programs_of(cluster: Cluster, gpus: Sequence[int], ports: Sequence[int], options: Sequence[str],
                page: int | None = None) -> list[EngineProgram]:
    """Return the programs of a cluster.

    Args:
        cluster: The cluster.
        gpus: The number of GPUs of each server.
        ports: The port of the directory, and then that of each server.
        options: Options of ``djinn serve`` for each server.
        page: The port of the directory's dashboard; ``None`` for none.
    """
    key, shared = str(cluster.key_file), dict(_shared(options))
    host = reachable(shared.get("--host", "127.0.0.1"))
    address = str(DirectoryAddress("tls" if "--tls-cert" in shared else "tcp", host, ports[0], cluster.name))
    written = str(cluster.folder / "address")
    if cluster.moves:
        address = IN_FILE + written
    found = [EngineProgram(DIRECTORY, (
        *_DJINN, DIRECTORY, "--name", cluster.name, "--port", str(ports[0]), "--key", key, "--with-parent",
        *(("--address-file", written) if cluster.moves else ()),
        *(word for pair in shared.items() for word in pair),
        *(() if page is None else ("--dashboard-port", str(page)))))]
    for number, (own, port) in enumerate(zip(gpus, ports[1:], strict=True)):
        found.append(EngineProgram(f"server-{number}", (
            *_DJINN, "serve", "--device", "cuda:0" if own else "cpu", "--port", str(port), "--with-parent",
            "--directory", address, "--directory-key", key, *options), gpus=own))
    return found


def _shared(options: Sequence[str]) -> Iterator[tuple[str, str]]:
    """List the options that hold for the directory, in either of their two forms."""
    for word, following in pairwise([*options, ""]):
        name, is_whole, value = word.partition("=")
        if name in _SHARED:
            yield name, value if is_whole else following

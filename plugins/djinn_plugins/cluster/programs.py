"""The programs of a cluster: its directory, and its servers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from djinn.errors import ConfigurationError
from djinn_plugins.cluster.asking import IN_FILE, DirectoryAddress, reachable
from djinn_plugins.cluster.clusters import Cluster
from djinn_plugins.cluster.kinds import EngineProgram
from djinn_plugins.common.settings.connection import client_authorities

__all__ = ("DIRECTORY", "programs_of")

DIRECTORY = "directory"
"""Name of the directory among the programs."""
_DJINN = (sys.executable, "-c", "from djinn_plugins.start import main; main()")
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

    Raises:
        ConfigurationError: No other machine could reach them, or a setting is invalid.
    """
    key, shared = str(cluster.key_file), dict(_shared(options))
    if cluster.is_apart and "--host" not in shared:
        raise ConfigurationError(f"Servers of the engine {cluster.engine_name} would be reached by nobody.",
                                 hint="Add -- --host 0.0.0.0 with --tls-cert and --tls-key, and set DJINN_TOKEN.")
    djinn, files = (("djinn",), _files(key, options)) if cluster.is_apart else (_DJINN, ())
    scheme = "tls" if "--tls-cert" in shared else "tcp"
    host = cluster.host_of(DIRECTORY) or reachable(shared.get("--host", "127.0.0.1"))
    address = str(DirectoryAddress(scheme, host, ports[0], cluster.name))
    written = str(cluster.folder / "address")
    if cluster.moves:
        address = IN_FILE + written
    found = [EngineProgram(DIRECTORY, (
        *djinn, DIRECTORY, "--name", cluster.name, "--port", str(ports[0]), "--key", key, "--with-parent",
        *(("--address-file", written) if cluster.moves else ()),
        *(word for pair in shared.items() for word in pair),
        *(() if page is None else ("--dashboard-port", str(page)))), files=files)]
    for number, (own, port) in enumerate(zip(gpus, ports[1:], strict=True)):
        name = f"server-{number}"
        announced = str(DirectoryAddress(scheme, cluster.host_of(name), port)) if cluster.is_apart else ""
        found.append(EngineProgram(name, (
            *djinn, "serve", "--device", "cuda:0" if own else "cpu", "--port", str(port), "--with-parent",
            "--directory", address, "--directory-key", key, *(("--announce", announced) if announced else ()),
            *options), gpus=own, files=files))
    return found


def _shared(options: Sequence[str]) -> Iterator[tuple[str, str]]:
    """List the options that hold for the directory, in either of their two forms."""
    for word, following in pairwise([*options, ""]):
        name, is_whole, value = word.partition("=")
        if name in _SHARED:
            yield name, value if is_whole else following


def _files(key: str, options: Sequence[str]) -> tuple[str, ...]:
    """List the key, and the files that options, djinn's variables and its file of settings name by absolute paths."""
    words = [word.partition("=")[2] if word.startswith("--") else word for word in options]
    words += [*(value for name, value in os.environ.items() if name.startswith("DJINN_")), client_authorities()]
    return tuple(dict.fromkeys([key, *(word for word in words if Path(word).is_absolute() and Path(word).is_file())]))

"""Guarded servers for the tested sessions: ``djinn serve``, each in a separate process.

A server ends with the process that started it, even if that process is killed.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol, Self

import attrs
import torch

__all__ = ("ServerProcess", "Servers", "StartProcess")

_START_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 60.0
_PROGRAM = "from djinn_plugins.start import main; main()"
_SAYS = "djinn serving "
_OF_CLIENTS = ("DJINN_SERVER", "DJINN_SERVERS", "DJINN_TOKEN", "DJINN_OWNER")
_SHOWN = 4000


class ServerProcess(Protocol):
    """What `Servers` needs of a process; `subprocess.Popen` has it."""

    @property
    def stdout(self) -> IO[str] | None:
        """Where its standard output is read."""

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status; `subprocess.TimeoutExpired` is raised if there is none in time."""

    def terminate(self) -> None:
        """Ask the process to end."""

    def kill(self) -> None:
        """End the process by force."""


class StartProcess(Protocol):
    """Starts ``python -c program arguments``; what it writes to standard error goes to ``log``."""

    def __call__(self, program: str, arguments: list[str], environment: dict[str, str], log: Path) -> ServerProcess:
        """Start the process."""


def _start_interpreter(program: str, arguments: list[str], environment: dict[str, str], log: Path) -> ServerProcess:
    with log.open("w") as errors:
        return subprocess.Popen(  # noqa: S603  # this interpreter and this project's program
            [sys.executable, "-c", program, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=errors, text=True, env=environment)


@attrs.frozen
class _Server:
    address: str
    process: ServerProcess
    log: Path


class Servers:
    """Servers of one test process, started on first use, within a ``with`` statement.

    Attributes:
        start_process: How their processes are started. This project's own tests fork them from an interpreter that has
            imported PyTorch, which saves 2 s of processor time each.

    Concurrency:
        One thread.
    """

    start_process: StartProcess = staticmethod(_start_interpreter)

    def __init__(self) -> None:
        self._running: dict[tuple[str, str, int], _Server] = {}
        self._folder: Path | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def address(self, device: str, plugins: str = "", threads: int | None = None) -> str:
        """Return the address of a server.

        Args:
            device: Device of its executor.
            plugins: Its plugins if they are not the defaults, in the form of ``DJINN_PLUGINS``.
            threads: Threads for operations on the CPU; ``None`` for as many as this process has, because sums depend on
                the number.

        Raises:
            RuntimeError: The server did not start; the message contains its log.
        """
        key = (device, plugins, threads or torch.get_num_threads())
        if key not in self._running:
            self._running[key] = self._start(*key)
        return self._running[key].address

    def close(self) -> None:
        """End all of them.

        Raises:
            RuntimeError: A server did not end properly.
        """
        faults = []
        for server in self._running.values():
            server.process.terminate()
            try:
                status = server.process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                status = _kill(server.process)
            if status:
                faults.append(f"djinn serve ended with {status}:\n"
                              f"{server.log.read_text(errors='replace')[-_SHOWN:]}")
            if server.process.stdout is not None:
                server.process.stdout.close()
        self._running.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        if faults:
            raise RuntimeError("\n".join(faults))

    def _start(self, device: str, plugins: str, threads: int) -> _Server:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="djinn-"))
        name = str(len(self._running))
        log = self._folder / f"{name}.log"
        # Without Unix-domain sockets, it uses a free port of the loopback interface.
        where = ["--unix", str(self._folder / name)] if hasattr(socket, "AF_UNIX") else []
        environment = {name: value for name, value in os.environ.items() if name not in _OF_CLIENTS}
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, sys.path)))
        environment["DJINN_PLUGINS"] = ",".join(filter(None, [environment.get("DJINN_PLUGINS", ""), plugins]))
        process = self.start_process(_PROGRAM, ["serve", "--with-parent", "--threads", str(threads), "--device", device,
                                                *where], environment, log)
        patience = threading.Timer(_START_TIMEOUT_S, process.kill)
        patience.start()
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        patience.cancel()
        if not line.startswith(_SAYS):
            _kill(process)
            raise RuntimeError(f"djinn serve --device {device} did not start; it said {line!r}:\n"
                               f"{log.read_text(errors='replace')[-_SHOWN:]}")
        return _Server(line.removeprefix(_SAYS), process, log)


def _kill(process: ServerProcess) -> int:
    process.kill()
    return process.wait()

"""Servers in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import attrs
import pytest

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
# On Linux the server is told to end with the process that started it, however that ends.
PROGRAM = """
import ctypes, signal, sys
if sys.platform.startswith("linux"):
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
from djinn.cli import main
main()
"""


@attrs.frozen
class ServerProcess:
    """A running ``djinn serve``."""

    address: str
    process: subprocess.Popen[str]
    log: Path

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def stop(self) -> int:
        """Stop it as an operator would, and return its exit status."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            if self.process.stdout is not None:
                self.process.stdout.close()


class StartServer(Protocol):
    def __call__(self, *arguments: str, **environment: str) -> ServerProcess: ...


def _start(log: Path, arguments: tuple[str, ...], environment: dict[str, str]) -> ServerProcess:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DJINN_")}
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "serve", "--threads", "1", *arguments],
            env=clean | environment, stdout=subprocess.PIPE, stderr=errors, text=True)
    patience = threading.Timer(START_TIMEOUT_S, process.kill)
    patience.start()
    assert process.stdout is not None
    line = process.stdout.readline()
    patience.cancel()
    started, _, address = line.strip().partition("djinn serving ")
    server = ServerProcess(address, process, log)
    if started or not address:
        status = server.stop()
        pytest.fail(f"djinn serve ended with {status} and said {line!r}:\n{log.read_text()}")
    return server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that all tests share. A test that harms it fails, and so do others."""
    running = _start(tmp_path_factory.mktemp("server") / "log", (), {})
    yield running
    assert running.stop() == 0, running.log.read_text()


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Starts servers of a test's own: ``start_server("--port", "7070", DJINN_TOKEN="secret")``."""
    started: list[ServerProcess] = []

    def start(*arguments: str, **environment: str) -> ServerProcess:
        started.append(_start(tmp_path / f"server-{len(started)}.log", arguments, environment))
        return started[-1]

    yield start
    for running in started:
        running.stop()

"""A server whose surroundings are not those of the tests: another clock, another user, a full disk, an older kernel."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Self

from support.processes.warm import clean_environment
from support.servers.serving import PROGRAM, children_of, workers_of

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 30.0


class ColdServer:
    """``djinn serve`` as a fresh process, not a fork of one that has PyTorch, within a ``with`` statement.

    Args:
        log: Where it writes its log.
        arguments: Of ``djinn serve``.
        within: What starts it: the beginning of a command line.
        prelude: What its Python does first.
        log_to: Another place for its log.
        environment: Its environment variables.

    Attributes:
        address: Where it listens; empty if it has ended instead.
        status: Its exit status, once it has ended.
    """

    def __init__(self, log: Path, *arguments: str, within: Sequence[str] = (), prelude: str = "",
                 log_to: IO[bytes] | None = None, **environment: str) -> None:
        self.log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [*within, sys.executable, "-c", prelude + PROGRAM, "serve", "--device", "cpu", "--threads", "1",
                 "--drain-s", "0", *arguments],
                stdout=subprocess.PIPE, stderr=log_to or errors, text=True, env=clean_environment(**environment))
        assert self.process.stdout is not None
        patience = threading.Timer(START_TIMEOUT_S, self.process.kill)
        patience.start()
        self.address = self.process.stdout.readline().strip().removeprefix("djinn serving ")
        patience.cancel()
        self.status: int | None = None if self.address else self.process.wait(STOP_TIMEOUT_S)

    @property
    def text(self) -> str:
        """Its log."""
        return self.log.read_text(errors="replace")

    @property
    def workers(self) -> list[int]:
        """The processes that run operations."""
        return workers_of(self.process.pid)

    @property
    def processes(self) -> list[int]:
        """All of its processes."""
        found = [self.process.pid]
        for each in found:
            found += children_of(each)
        return found

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of its processes."""
        for each in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        assert self.process.stdout is not None
        try:
            if self.status is None:
                self.process.terminate()
                self.status = self.process.wait(STOP_TIMEOUT_S)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()


class MovedClock:
    """The clocks of servers that are started with `environment`.

    Args:
        folder: For its files.
    """

    def __init__(self, folder: Path) -> None:
        self._file, library = folder / "moved", folder / "clock.so"
        compiler = shutil.which("cc") or "cc"
        subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(library),
                        str(Path(__file__).with_name("clock.c"))], check=True)
        self.move()
        self.environment = {"LD_PRELOAD": str(library), "MOVED_CLOCK": str(self._file)}

    def move(self, day_s: int = 0, monotonic_s: int = 0) -> None:
        """Move the time of day, and the monotonic clock, from where the machine's are."""
        if not self._file.exists():
            self._file.write_bytes(bytes(16))
        with self._file.open("r+b") as file:
            file.write(struct.pack("qq", day_s, monotonic_s))

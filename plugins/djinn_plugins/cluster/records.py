"""The records of a keeper: one file with the states of its programs, their logs, and the lock that it may hold."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from djinn_plugins.cluster.kinds import ProgramReport, ProgramState

__all__ = ("APART_S", "KeeperRecord", "ProgramRecord", "Records", "born", "end_group", "has_group", "is_running",
           "replace_file")

TICK_S = 0.05
APART_S = 0.3
"""Shortest time between two signals to a process or a job."""
MAX_LOG_BYTES = 32 * 2**20
"""Size of a log beyond which its older half is dropped."""


class ProgramRecord(msgspec.Struct):
    """A program, as its keeper sees it.

    Attributes:
        born: When its process was started, as the system writes it.
    """

    name: str
    state: ProgramState = "starting"
    address: str = ""
    pid: int = 0
    born: str = ""
    restarts: int = 0
    problem: str = ""

    def report(self) -> ProgramReport:
        """Return it as an engine reports it."""
        place = f"process {self.pid}" if self.pid else ""
        return ProgramReport(self.name, self.state, self.address, place, self.pid, self.restarts, self.problem)


class KeeperRecord(msgspec.Struct):
    """The content of the file: the process that keeps the programs running, the programs, and the machine's name."""

    pid: int
    born: str
    programs: list[ProgramRecord] = []
    host: str = ""


class Records:
    """The files of a cluster.

    Args:
        folder: Where they are.

    Concurrency:
        The keeper writes; any process reads.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / "programs.json"
        self._lock = folder / "keeper.lock"

    def log_of(self, program: str) -> Path:
        """Return the file that a program's standard error goes to."""
        return self.folder / f"{program}.log"

    def read(self) -> KeeperRecord | None:
        """Read what the last keeper has written; ``None`` if there was none."""
        try:
            return _decoder.decode(self._file.read_bytes())
        except FileNotFoundError:
            return None

    def write(self, keeper: KeeperRecord) -> None:
        """Replace the file, so that readers see either the previous content or this one."""
        replace_file(self._file, msgspec.json.encode(keeper))

    def acquire(self) -> int | None:
        """Take the keeper's lock, which the system releases when this process ends.

        Returns:
            The lock's descriptor; ``None`` if another keeper holds it.
        """
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # Others hold it for a moment when they look whether there is a keeper.
        for _ in _ticks(1.0):
            if _locked(descriptor, fcntl.LOCK_EX):
                return descriptor
        os.close(descriptor)
        return None

    @property
    def is_kept(self) -> bool:
        """Whether there is a keeper."""
        try:
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            return not _locked(descriptor, fcntl.LOCK_SH)
        finally:
            os.close(descriptor)

    def left(self) -> list[ProgramRecord]:
        """List the programs that still run on this machine although their keeper has ended."""
        keeper = self.read()
        return [] if keeper is None or keeper.host != socket.gethostname() else [
            msgspec.structs.replace(record, state="stopping") for record in keeper.programs
            if is_running(record.pid, record.born)]

    def remove(self) -> None:
        """Remove all files of the cluster."""
        for path in (self._file, self._lock, *self.folder.glob("*.log")):
            path.unlink(missing_ok=True)

    def tail(self, program: str, lines: int) -> list[str]:
        """Return the last lines of a program's log."""
        try:
            with self.log_of(program).open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 2**20))
                return file.read().decode("utf-8", "replace").splitlines()[-lines:] if lines else []
        except FileNotFoundError:
            return []

    def shorten(self, program: str) -> None:
        """Drop the older half of a log that has become too long. The program appends to it all the while."""
        path = self.log_of(program)
        with contextlib.suppress(FileNotFoundError):
            size = path.stat().st_size
            if size > MAX_LOG_BYTES:
                with path.open("r+b") as file:
                    file.seek(size - MAX_LOG_BYTES // 2)
                    kept = file.read(MAX_LOG_BYTES // 2)
                    file.truncate(0)
                    file.seek(0)
                    file.write(kept)


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file that only this user can read, so that readers see either the previous content or this one."""
    new = path.with_suffix(".new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:  # noqa: PTH123  # a mode
        file.write(content)
    new.replace(path)


def _locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def born(pid: int) -> str:
    """Return when a process was started, as the system writes it; empty if it has ended."""
    if not sys.platform.startswith("linux"):
        asked = subprocess.run(["/bin/ps", "-o", "lstart=", "-p", str(pid)],  # noqa: S603  # a number
                               capture_output=True, text=True, check=False)
        return asked.stdout.strip()
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def is_running(pid: int, since: str) -> bool:
    """Whether a process is still the one that was started then."""
    return bool(pid and since) and born(pid) == since


def has_group(group: int) -> bool:
    """Whether a process group has members, dead ones that nothing waits for included."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def end_group(record: ProgramRecord, drain_s: float) -> None:
    """End a program without a keeper: SIGTERM, once more after ``drain_s``, then SIGKILL to its whole group."""
    for number, patience_s in ((signal.SIGTERM, drain_s), (signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
        if not is_running(record.pid, record.born):
            return
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(record.pid, number)
            else:
                os.kill(record.pid, number)
        for _ in _ticks(max(patience_s, APART_S)):
            if not is_running(record.pid, record.born):
                return


def _ticks(seconds: float) -> Iterator[None]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield
        time.sleep(TICK_S)


_decoder = msgspec.json.Decoder(KeeperRecord)

"""``djinn serve`` in a process of its own, for programs that are no tests of pytest's."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Self

from support.processes.warm import WarmPython, clean_environment

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0
_NO_WORKERS = ("djinn-spare", "djinn-forksrv")
"""Names of processes that wait for their first owner, and that were forked just now."""
# On Linux the server is told to end with the process that started it, however that ends.
PROGRAM = """
import ctypes, signal, sys
if sys.platform.startswith("linux"):
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
from djinn_plugins.cli.app import main
main()
"""


def workers_of(gateway: int) -> list[int]:
    """The processes of a gateway that run operations: its children, and those of the forkserver that forks some.

    Those that were started for an owner that has not come yet do not count.
    """
    return [worker for child in children_of(gateway) for worker in (
        children_of(child) if _is_forkserver(child) else [child]) if _name_of(worker) not in _NO_WORKERS]


def children_of(process: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found += map(int, (task / "children").read_text().split())
    return found


def has_ended(process: int) -> bool:
    """Whether a process has ended, though it may still have to be waited for. It can do so between open and read."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _name_of(process: int) -> str:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        return Path(f"/proc/{process}/comm").read_text().strip()
    return ""


def _is_forkserver(process: int) -> bool:
    """Whether a process forks workers: by its name, or by its command line before it has taken that name."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        folder = Path(f"/proc/{process}")
        return "djinn-forksrv" in (folder / "comm").read_text() or b"djinn_plugins.server.forkserver" in (
            folder / "cmdline").read_bytes()
    return False


class Serving:
    """A server, within a ``with`` statement; options are environment variables.

    Args:
        log: Where it writes its log.
        arguments: Of ``djinn serve``.
        prelude: What the process does first.
        environment: Its environment variables.

    Raises:
        AssertionError: It did not begin, or did not end as it should.
    """

    def __init__(self, log: Path, *arguments: str, prelude: str = "", **environment: str) -> None:
        self.log = log
        command = ["serve", "--device", "cpu", "--threads", "1", "--drain-s", "0", *arguments]
        self.process = WarmPython(prelude + PROGRAM, command, environment=clean_environment(**environment), log=log,
                                  has_djinn=True)
        patience = threading.Timer(START_TIMEOUT_S, self.process.kill)
        patience.start()
        line = self.process.stdout.readline()
        patience.cancel()
        self.address = line.strip().removeprefix("djinn serving ")
        if self.address == line.strip():
            self.process.stdout.close()
            self.process.wait(STOP_TIMEOUT_S)
            raise AssertionError(f"it said {line!r}:\n{log.read_text()}")
        self.port = int(self.address.rpartition(":")[2])

    @property
    def workers(self) -> list[int]:
        """The processes that run operations, on Linux."""
        return workers_of(self.process.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *details: object) -> None:
        self.process.terminate()
        try:
            status = self.process.wait(STOP_TIMEOUT_S)
        finally:
            self.process.kill()
            self.process.stdout.close()
        assert kind is not None or status == 0, self.log.read_text()[-4000:]

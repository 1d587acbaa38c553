"""Processes that judge units of PyTorch's operator database, because a kernel may end or block a process.

Such a process runs `main` with the argument ``SETTINGS``: it starts the session that ``SETTINGS`` (JSON)
describes, reads one unit per line from standard input, and writes one verdict per line to standard output.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import IO, Any, Protocol

import attrs
import cattrs
import torch

from djinn.errors import TransportError
from djinn_conformance.database import Difference, Unit, Verdict, judge

__all__ = ("THREADS", "JudgeProcess", "Pool", "StartJudge", "Task")

THREADS = 1
"""Threads of each process for operations on the CPU."""
LONGEST_UNIT_S = 240.0
"""How long a unit may take before its process counts as hung."""
_PROGRAM = "from djinn_conformance.workers import main; main()"


@attrs.frozen
class Task:
    """A unit, and which of its samples: the very first, and every ``every``-th starting with the ``first``."""

    unit: Unit
    first: int = 0
    every: int = 1

    def chooses(self, index: int) -> bool:
        """Whether the sample at a position is chosen."""
        return index == 0 or index % self.every == self.first % self.every


class JudgeProcess(Protocol):
    """What `Pool` needs of a process; `subprocess.Popen` has it."""

    @property
    def pid(self) -> int:
        """Its process id."""

    @property
    def stdin(self) -> IO[str] | None:
        """Where its standard input is written."""

    @property
    def stdout(self) -> IO[str] | None:
        """Where its standard output is read."""

    def wait(self) -> int:
        """Return the exit status when the process has ended."""

    def kill(self) -> None:
        """End the process by force."""


class StartJudge(Protocol):
    """Starts ``python -c program arguments`` with pipes for its standard input and output."""

    def __call__(self, program: str, arguments: list[str], environment: dict[str, str]) -> JudgeProcess:
        """Start the process."""


def _start_interpreter(program: str, arguments: list[str], environment: dict[str, str]) -> JudgeProcess:
    return subprocess.Popen(  # noqa: S603  # this interpreter and this module
        [sys.executable, "-c", program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, env=environment)


class Pool:
    """Processes that work through tasks in the order of submission.

    Attributes:
        start_process: How they are started. This project's own tests fork them from an interpreter that has loaded the
            database, which saves 8 s of processor time each.

    Concurrency:
        Any thread may call `submit`; a separate thread manages each process.
    """

    start_process: StartJudge = staticmethod(_start_interpreter)

    def __init__(self, settings: dict[str, Any], processes: int) -> None:
        self._settings = settings
        self._tasks: SimpleQueue[tuple[Task, Future[Verdict]] | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(processes)]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Task) -> Future[Verdict]:
        """Submit a task."""
        future: Future[Verdict] = Future()
        self._tasks.put((task, future))
        return future

    def close(self) -> None:
        """Drop pending tasks, and end the processes."""
        try:
            while True:
                waiting = self._tasks.get_nowait()
                if waiting is not None:
                    waiting[1].cancel()
        except Empty:
            pass
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        process = _Process(self._settings)
        try:
            while (received := self._tasks.get()) is not None:
                task, future = received
                try:
                    future.set_result(process.judge(task))
                except Exception as error:  # noqa: BLE001  # not swallowed: the future delivers it
                    future.set_exception(error)
        finally:
            process.end()


class _Process:
    """One process, started when there is a task, and again after it has ended."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = json.dumps(settings)
        self._running: JudgeProcess | None = None

    def judge(self, task: Task) -> Verdict:
        running = self._running or self._start()
        assert running.stdin is not None
        assert running.stdout is not None
        hung = threading.Event()

        def give_up() -> None:
            hung.set()
            running.kill()

        timer = threading.Timer(LONGEST_UNIT_S, give_up)
        timer.start()
        try:
            running.stdin.write(json.dumps(cattrs.unstructure(task)) + "\n")
            running.stdin.flush()
            answer = running.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            timer.cancel()
        if answer:
            return cattrs.structure(json.loads(answer), Verdict)
        status = running.wait()
        self.end()
        if hung.is_set():
            return Verdict(1, 0, [Difference(0, "hung", f"no answer after {LONGEST_UNIT_S:g} s")])
        return Verdict(1, 0, [Difference(0, "aborted", f"the process ended with {status}")])

    def end(self) -> None:
        """Let the process end, and release its pipes."""
        running, self._running = self._running, None
        if running is None:
            return
        assert running.stdin is not None
        assert running.stdout is not None
        # Data written to an ended process cannot be flushed.
        with contextlib.suppress(BrokenPipeError):
            running.stdin.close()
        running.stdout.read()
        running.wait()
        running.stdout.close()

    def _start(self) -> JudgeProcess:
        path = os.pathsep.join(dict.fromkeys(filter(None, sys.path)))
        self._running = Pool.start_process(_PROGRAM, [self._settings], {
            **os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(THREADS)})
        return self._running


def serve(lines: Iterable[str], settings: dict[str, Any]) -> Iterator[str]:
    """Judge one task per line.

    Args:
        lines: Tasks as JSON.
        settings: Settings of `djinn.init`.

    Yields:
        Verdicts as JSON.
    """
    import djinn
    from djinn.record import devices

    torch.set_num_threads(THREADS)
    djinn.init(**settings)
    device = devices.logical_device()
    for line in lines:
        task = cattrs.structure(json.loads(line), Task)
        verdict = judge(task.unit, device, task.chooses)
        if not _is_alive(device):
            # Sessions share a server. If another session's unit ended it, this one passes when repeated.
            djinn.init(**settings)
            verdict = judge(task.unit, device, task.chooses)
            if not _is_alive(device):
                djinn.init(**settings)
                verdict = Verdict(1, 0, [Difference(0, "aborted", "it ended the server's process, twice")])
        yield json.dumps(cattrs.unstructure(verdict))


def _is_alive(device: torch.device) -> bool:
    try:
        return bool(torch.ones((), device=device).item())
    except TransportError:
        return False


def main() -> None:
    """Judge the units that arrive on standard input. Output of kernels is no answer."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for verdict in serve(sys.stdin, json.loads(sys.argv[1])):
        answers.write(verdict + "\n")

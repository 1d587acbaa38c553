"""The process that keeps programs running, on the machine where they run.

Each program leads a separate session and process group. When it ends, the rest of its group is killed, so that none of
its processes keeps a device. The keeper is the subreaper of all of them: it also waits for those whose parent has died.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

import anyio
import anyio.to_thread
import attrs

from djinn_plugins.cluster.ending import ending_signals
from djinn_plugins.cluster.kinds import ClusterSpec, EngineProgram
from djinn_plugins.cluster.records import KeeperRecord, ProgramRecord, Records, born, has_group

__all__ = ("ENDING_S", "GROUP_S", "KeptPrograms", "become_subreaper", "keep")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 30.0
STEADY_S = 10.0
"""A program that has served for so long is started again at once when it ends."""
ENDING_S = 10.0
"""How long a program may take to end after a second request to stop."""
GROUP_S = 2.0
"""How long the other processes of a program may take to end after it."""
TICK_S = 0.02
LOOK_S = 10.0
MAX_LINE_BYTES = 4096
_PR_SET_CHILD_SUBREAPER = 36


@attrs.define(eq=False)
class _Kept:
    """A program, and the process that runs it now."""

    program: EngineProgram
    gpus: str
    record: ProgramRecord
    process: subprocess.Popen[bytes] | None = None
    serving_since: float = 0.0
    """When it announced its address; 0 if it has not since it was last started."""


class KeptPrograms:
    """Starts programs, starts them again, and stops them.

    Args:
        records: Where their states and logs go.
        spec: The programs.
        environment: Their environment variables, in addition to those of each.
        before: The record of a keeper that has ended, and whose programs these were.

    Concurrency:
        Tasks of one event loop.
    """

    def __init__(self, records: Records, spec: ClusterSpec, environment: Mapping[str, str],
                 before: KeeperRecord | None) -> None:
        self._records = records
        self._environment = environment
        gpus = iter(_gpus())
        self._kept = [_Kept(program, ",".join(next(gpus, "none") for _ in range(program.gpus)),
                            _next(program.name, before)) for program in spec.programs]
        self._stopping = anyio.Event()
        self._hurry = anyio.Event()
        self._threads = anyio.CapacityLimiter(len(self._kept))
        self._record = KeeperRecord(os.getpid(), born(os.getpid()), [kept.record for kept in self._kept],
                                    socket.gethostname())
        self._is_behind = False
        """Whether the file lacks the last change."""
        records.write(self._record)

    async def run(self) -> None:
        """Run the programs until `stop` is called, and until all have ended."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._tidy)
            async with anyio.create_task_group() as running:
                for kept in self._kept:
                    running.start_soon(self._keep, kept)
            tasks.cancel_scope.cancel()

    def stop(self) -> None:
        """Send SIGTERM to the programs. A second call is for haste."""
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()
        for kept in self._kept:
            kept.record.state = "stopping"
            if kept.process is not None:
                kept.process.send_signal(signal.SIGTERM)
        self._write()

    async def _tidy(self) -> None:
        while True:
            await anyio.sleep(LOOK_S)
            if self._is_behind:
                self._write()
            for kept in self._kept:
                with contextlib.suppress(OSError):
                    self._records.shorten(kept.program.name)

    async def _keep(self, kept: _Kept) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._stopping.is_set():
            kept.serving_since = 0.0
            await self._run_once(kept)
            is_steady = kept.serving_since and time.monotonic() - kept.serving_since > STEADY_S
            pause_s = FIRST_PAUSE_S if is_steady else min(2 * pause_s, LONGEST_PAUSE_S)
            with anyio.move_on_after(pause_s):
                await self._stopping.wait()
            kept.record.restarts += not self._stopping.is_set()

    async def _run_once(self, kept: _Kept) -> None:
        """Run a program until it ends, and the rest of its group with it."""
        reader, writer = os.pipe()
        try:
            kept.process = process = self._start(kept, writer)
        except OSError as error:
            os.close(reader)
            self._changed(kept.record, state="failed",
                          problem=f"{kept.program.command[0]} cannot be started: {error.strerror or error}")
            return
        finally:
            os.close(writer)
        self._changed(kept.record, pid=process.pid, born=born(process.pid))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._hear, kept, reader)
            tasks.start_soon(self._end_in_time, process.pid)
            status = await anyio.to_thread.run_sync(process.wait, limiter=self._threads)
            kept.process = None
            await self._sweep(process.pid)
            tasks.cancel_scope.cancel()
        said = "\n".join(self._records.tail(kept.program.name, 5))
        self._changed(kept.record, state="starting" if kept.record.address else "failed", pid=0, born="", address="",
                      problem=f"it ended with {f'signal {-status}' if status < 0 else f'status {status}'}: {said}")

    def _start(self, kept: _Kept, writer: int) -> subprocess.Popen[bytes]:
        program = kept.program
        environment = {**self._environment, **program.variables}
        if program.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = kept.gpus
        with self._records.log_of(program.name).open("ab") as log:
            return subprocess.Popen(  # noqa: S603  # what the user of this machine has given
                program.command, stdin=subprocess.DEVNULL, stdout=writer, stderr=log, env=environment,
                start_new_session=True)

    async def _hear(self, kept: _Kept, reader: int) -> None:
        """Read the address, and then drop the rest, so that the program never waits for a reader."""
        said, record = b"", kept.record
        try:
            while True:
                await anyio.wait_readable(reader)
                part = os.read(reader, MAX_LINE_BYTES)
                if not part:
                    return
                said = (said + part)[:MAX_LINE_BYTES]
                line, end, _ = said.partition(b"\n")
                if end and not record.address and (words := line.decode("utf-8", "replace").split()):
                    kept.serving_since = time.monotonic()
                    self._changed(record, state="serving", address=words[-1])
        finally:
            os.close(reader)

    async def _end_in_time(self, group: int) -> None:
        """End a program that takes too long to stop."""
        await self._hurry.wait()
        await anyio.sleep(ENDING_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)

    async def _sweep(self, group: int) -> None:
        """Wait for the other processes of a program that has ended, and kill those that remain."""
        deadline = time.monotonic() + GROUP_S
        while _reap(group):
            if time.monotonic() >= deadline:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
            await anyio.sleep(TICK_S)

    def _changed(self, record: ProgramRecord, **changes: object) -> None:
        if self._stopping.is_set():
            changes["state"] = "stopping"
        for name, value in changes.items():
            setattr(record, name, value)
        self._write()

    def _write(self) -> None:
        """Write the states down. A full disk must not end the programs; it is tried again later."""
        try:
            self._records.write(self._record)
        except OSError:
            self._is_behind = True
        else:
            self._is_behind = False


def _reap(group: int) -> bool:
    """Wait for dead processes of a group that are children of this one; return whether the group has members left."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    return has_group(group)


def _next(name: str, before: KeeperRecord | None) -> ProgramRecord:
    """Return the record of a program, which continues that of a keeper that has ended."""
    last = next((record for record in before.programs if record.name == name), None) if before is not None else None
    return ProgramRecord(name) if last is None else ProgramRecord(
        name, restarts=last.restarts + 1, problem="the process that kept it running has ended")


def _gpus() -> list[str]:
    """Name the GPUs that programs get one after the other."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(number) for number in range(64)]
    return [name.strip() for name in visible.split(",") if name.strip()]


def keep(records: Records, spec: ClusterSpec, *, announce: Callable[[], object] | None = None,
         before: KeeperRecord | None = None) -> None:
    """Run programs until SIGTERM or SIGINT asks to stop, and until all have ended. A second signal is for haste.

    Afterwards both are ignored.

    Args:
        records: Where their states and logs go.
        spec: The programs.
        announce: Called once the records exist.
        before: The record of a keeper that has ended, and whose programs these were.
    """
    become_subreaper()

    async def run() -> None:
        kept = KeptPrograms(records, spec, os.environ, before)
        if announce is not None:
            announce()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_heed, kept)
            await kept.run()
            tasks.cancel_scope.cancel()

    anyio.run(run)


async def _heed(kept: KeptPrograms) -> None:
    with ending_signals() as signals:
        async for _ in signals:
            kept.stop()


def become_subreaper() -> None:
    """Make this process the parent of those processes of its programs whose parent has died."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

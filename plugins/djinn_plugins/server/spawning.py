"""Worker processes as the gateway starts them: forked by the forkserver, or started as new programs."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Protocol

import anyio
import anyio.to_thread

from djinn_plugins.server.changes import Changes
from djinn_plugins.server.control import CanFork, Ended, Spawn, Spawned
from djinn_plugins.server.control_channel import AwaitedControl

__all__ = ("ForkServer", "WorkerProcess", "start_process")

PREPARE_TIMEOUT_S = 120.0
"""How long a forkserver may import what workers need: a worker that is started without it has the same to import."""
SPAWN_TIMEOUT_S = 30.0
"""How long a prepared forkserver may take to fork a worker, before the gateway starts the worker without it."""
STATUS_TIMEOUT_S = 1.0
"""How long a forkserver may take to report the status of a worker that has ended."""
_log = logging.getLogger("djinn.server")


class WorkerProcess(Protocol):
    """A process that was started."""

    @property
    def pid(self) -> int:
        """Its process ID."""

    def kill(self) -> None:
        """Kill it, if it has not ended."""

    async def wait(self) -> int:
        """Wait for its end, and return its status as `subprocess` does."""


class Child:
    """A process forked by a forkserver.

    Args:
        pid: Its process ID, which the system may reuse.
        process: A descriptor (pidfd) that always refers to this process; the `Child` owns it.
        status_of: Waits until the forkserver has reported the status; ``None`` if it does not.

    Concurrency:
        Tasks of one event loop.
    """

    def __init__(self, pid: int, process: int, status_of: Callable[[], Awaitable[int | None]]) -> None:
        self.pid = pid
        self._process = process
        self._status_of = status_of

    def kill(self) -> None:
        """Kill it, if it has not ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)

    async def wait(self) -> int:
        """Wait for its end, and return its status; if unknown, the status of a killed process."""
        await anyio.wait_readable(self._process)
        status = await self._status_of()
        return -signal.SIGKILL if status is None else status

    def __del__(self) -> None:
        os.close(self._process)


class _Program:
    """A process that this one has started."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.pid = process.pid
        self._process = process
        # Opened at once: `kill` may collect the process, after which its ID can mean another one.
        self._descriptor = os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else None

    def kill(self) -> None:
        self._process.kill()

    async def wait(self) -> int:
        if self._descriptor is None:
            return await anyio.to_thread.run_sync(self._process.wait, abandon_on_cancel=True)
        await anyio.wait_readable(self._descriptor)
        return self._process.wait()

    def __del__(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


class ForkServer:
    """The gateway's end of the channel to a forkserver.

    Requests are numbered, so a late answer is not mistaken for the answer to another request.

    Args:
        sock: The gateway's end.
        pid: The forkserver's process ID.

    Concurrency:
        Tasks of one event loop.
    """

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self._control = AwaitedControl(sock, takes_descriptors=True)
        self._pid = pid
        self._spawning = anyio.Lock()
        self._changes = Changes()
        self._asked = 0
        self._unanswered: set[int] = set()
        """Requests that have been given up and that the forkserver has not answered yet."""
        self._children: dict[int, Child] = {}
        """Workers that were forked and not yet collected by `spawn`."""
        self._wanted: set[int] = set()
        """Requests whose workers' statuses are still needed."""
        self._statuses: dict[int, int] = {}
        self._is_prepared = False
        self._is_gone = False

    async def run(self) -> None:
        """Receive its messages until it is gone."""
        while (received := await self._control.receive()) is not None:
            message, process = received
            if isinstance(message, Spawned) and process is not None:
                self._take(message, process)
            elif isinstance(message, Ended) and message.number in self._wanted:
                self._statuses[message.number] = message.status
            elif isinstance(message, CanFork):
                self._is_prepared = True
            self._changes.notify()
        self._is_gone = True
        self._changes.notify()
        descriptor = os.pidfd_open(self._pid)
        try:
            await anyio.wait_readable(descriptor)
        finally:
            os.close(descriptor)
        with suppress(ChildProcessError):
            os.waitpid(self._pid, os.WNOHANG)  # noqa: ASYNC222  # returns at once

    async def spawn(self, standard_input: int, environment: Mapping[str, str]) -> Child:
        """Fork a worker.

        Args:
            standard_input: Descriptor that becomes its standard input; the caller keeps its own copy. After an error, a
                worker may still be forked with it; that worker is killed at once. So the caller must not give it to
                another process.
            environment: Its environment variables.

        Raises:
            OSError: The forkserver is gone, or does not answer.
        """
        async with self._spawning:
            if self._unanswered:
                raise OSError("the forkserver has not answered an earlier request")
            if self._is_gone:
                raise OSError("the forkserver is gone")
            self._asked += 1
            number = self._asked
            await self._control.send(Spawn(number, dict(environment)), standard_input)
            try:
                await self._changes.wait_for(lambda: self._is_prepared or self._is_gone, PREPARE_TIMEOUT_S)
                await self._changes.wait_for(lambda: number in self._children or self._is_gone, SPAWN_TIMEOUT_S)
            finally:
                child = self._children.pop(number, None)
                if child is None and not self._is_gone:
                    self._unanswered.add(number)
            if child is not None:
                return child
            if self._is_gone:
                raise OSError("the forkserver is gone, or could not fork")
            raise OSError("the forkserver does not answer")

    async def _status_of(self, number: int) -> int | None:
        await self._changes.wait_for(lambda: number in self._statuses or self._is_gone, STATUS_TIMEOUT_S)
        self._wanted.discard(number)
        return self._statuses.pop(number, None)

    def _take(self, message: Spawned, process: int) -> None:
        """Accept a forked worker; kill it if its request has been given up."""
        number = message.number
        child = Child(message.pid, process, lambda: self._status_of(number))
        if number not in self._unanswered:
            self._children[number] = child
            self._wanted.add(number)
            return
        self._unanswered.discard(number)
        child.kill()
        _log.info("worker %d was forked too late: ended", message.pid)


async def start_process(
    environment: Mapping[str, str], forkserver: ForkServer | None
) -> tuple[WorkerProcess, socket.socket]:
    """Start a worker's process: forked if possible, because importing PyTorch takes seconds.

    Returns:
        The process, and the gateway's end of the channel to it. No other process ever gets the worker's end.

    Raises:
        OSError: It could not be started.
    """
    if forkserver is not None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                return await forkserver.spawn(theirs.fileno(), environment), ours
            except OSError as error:
                _log.warning("workers begin more slowly from now on: %s", error)
                # A fork that arrives after this reads end of file, and exits.
                ours.shutdown(socket.SHUT_RDWR)
                ours.close()
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = await anyio.to_thread.run_sync(_program, theirs.fileno(), environment)
        except OSError:
            ours.close()
            raise
    return _Program(process), ours


def _program(standard_input: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a worker as a new program."""
    # Its standard output must not be the gateway's, on which callers expect one line. NumPy's threads, which the worker
    # does not need, would stay outside the sandbox.
    return subprocess.Popen([sys.executable, "-P", "-m", "djinn_plugins.server.worker"], stdin=standard_input, stdout=2,
                            env={**environment, "OPENBLAS_NUM_THREADS": "1"})

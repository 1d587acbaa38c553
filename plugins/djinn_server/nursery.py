"""A process that has imported all that a worker needs, and becomes one as often as it is asked to.

To import PyTorch takes seconds, to fork a process that has done so takes milliseconds; and what was imported lies in
memory once for all of them.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from djinn_server.control import Control, Ended, Spawn, Spawned, ignore_signals

if TYPE_CHECKING:
    from djinn.plugins import Plugins

__all__ = ("Child", "Nursery", "begin_nursery", "fork_nursery", "main", "prepare")

SPAWN_TIMEOUT_S = 30.0
"""How long a nursery may take to fork a worker, before the gateway starts one without it."""
STATUS_TIMEOUT_S = 1.0
"""How long a nursery may take to tell the status of a worker that has ended."""
_NAME_PROCESS = 15
"""``PR_SET_NAME`` of prctl(2)."""
_log = logging.getLogger("djinn.server")


class Child:
    """A process that a nursery has forked; as much of `subprocess.Popen` as is needed.

    Args:
        pid: Its number, which may come to mean another process.
        process: A descriptor (pidfd) that always means this one; the child's own from now on.
        status_of: Waits until the nursery has told the status; ``None`` if it does not.

    Concurrency:
        Any thread.
    """

    def __init__(self, pid: int, process: int, status_of: Callable[[], int | None]) -> None:
        self.pid = pid
        self._process = process
        self._status_of = status_of

    def kill(self) -> None:
        """End it at once, if it has not ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def wait(self) -> int:
        """Wait for its end, and return its status as `subprocess` gives it; if nobody knows it, that of a kill."""
        select.select([self._process], [], [])
        status = self._status_of()
        return -signal.SIGKILL if status is None else status

    def __del__(self) -> None:
        os.close(self._process)


class Nursery:
    """The gateway's end of the channel to a nursery.

    Every request has a number. So what is told late is not taken for the answer to another request.

    Concurrency:
        Any thread.
    """

    def __init__(self, control: Control, pid: int) -> None:
        self._control = control
        self._pid = pid
        self._spawning = threading.Lock()
        self._changed = threading.Condition()
        self._asked = 0
        self._unanswered: set[int] = set()
        """Requests that nobody waits for any more, and that the nursery has not come to."""
        self._children: dict[int, Child] = {}
        """Workers that were forked and that nobody has taken yet."""
        self._wanted: set[int] = set()
        """Requests whose workers' statuses are to be kept."""
        self._statuses: dict[int, int] = {}
        self._is_gone = False
        self._reader: threading.Thread | None = None

    def spawn(self, standard_input: int, environment: Mapping[str, str]) -> Child:
        """Fork a worker.

        Args:
            standard_input: Descriptor that becomes its standard input; stays the caller's here. After an error a worker
                may still be forked with it, which is ended at once. So no other process may be given it.
            environment: Its environment variables.

        Raises:
            OSError: The nursery is gone, or does not answer.
        """
        with self._spawning:
            if self._reader is None:
                self._reader = threading.Thread(target=self._read, name="djinn-nursery", daemon=True)
                self._reader.start()
            if self._unanswered:
                raise OSError("the nursery has not answered an earlier request")
            self._asked += 1
            number = self._asked
            self._control.send(Spawn(number, dict(environment)), standard_input)
            with self._changed:
                self._changed.wait_for(lambda: number in self._children or self._is_gone, SPAWN_TIMEOUT_S)
                child = self._children.pop(number, None)
                if child is None and not self._is_gone:
                    self._unanswered.add(number)
            if child is not None:
                return child
            if self._is_gone:
                raise OSError("the nursery is gone, or could not fork")
            raise OSError("the nursery does not answer")

    def _status_of(self, number: int) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: number in self._statuses or self._is_gone, STATUS_TIMEOUT_S)
            self._wanted.discard(number)
            return self._statuses.pop(number, None)

    def _read(self) -> None:
        while (received := self._control.receive()) is not None:
            message, process = received
            with self._changed:
                if isinstance(message, Spawned) and process is not None:
                    self._take(message, process)
                elif isinstance(message, Ended) and message.number in self._wanted:
                    self._statuses[message.number] = message.status
                self._changed.notify_all()
        with self._changed:
            self._is_gone = True
            self._changed.notify_all()
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def _take(self, message: Spawned, process: int) -> None:
        """Take a worker in; end one that nobody waits for any more. The caller holds the lock."""
        number = message.number
        child = Child(message.pid, process, lambda: self._status_of(number))
        if number not in self._unanswered:
            self._children[number] = child
            self._wanted.add(number)
            return
        self._unanswered.discard(number)
        child.kill()
        _log.info("worker %d was forked too late: ended", message.pid)


def begin_nursery(environment: Mapping[str, str]) -> Nursery | None:
    """Start a nursery from nothing: its workers have nothing of what this process knows.

    Args:
        environment: Its environment variables.

    Returns:
        ``None`` elsewhere than on Linux (5.3 and later).
    """
    if sys.platform != "linux" or not _has_handles():
        return None
    ours, theirs = socket.socketpair()
    with theirs:
        pid = os.posix_spawn(sys.executable, [sys.executable, "-P", "-m", "djinn_server.nursery"], environment,
                             file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), 0), (os.POSIX_SPAWN_DUP2, 2, 1)])
    return Nursery(Control(ours, takes_descriptors=True), pid)


def fork_nursery(prepare: Callable[[], None]) -> Nursery | None:
    """Fork a nursery off this process, which should have no thread of its own yet and nothing open.

    That is sooner done than `begin_nursery`. Its workers have what this process had in memory, so it must know no
    secret.

    Args:
        prepare: Does in the nursery what workers need not do then. It leaves no thread behind.

    Returns:
        ``None`` where a process that has imported PyTorch had better not fork: elsewhere than on Linux (5.3 and later),
        or if another thread runs here.
    """
    if sys.platform != "linux" or threading.active_count() > 1 or not _has_handles():
        return None
    ours, theirs = socket.socketpair()
    gc.freeze()
    if pid := os.fork():
        gc.unfreeze()
        theirs.close()
        return Nursery(Control(ours, takes_descriptors=True), pid)
    status = 1
    try:
        ours.close()
        _close_all_but(theirs.fileno())
        _name("djinn-nursery")
        prepare()
        _Forker(theirs).run()
        status = 0
    except BaseException:  # noqa: BLE001  # logged; beyond lies what the process was before
        _log.exception("the nursery failed")
    finally:
        # Nothing of the process that this one was is to be put in order here. The gateway does without, and says so.
        os._exit(status)


class _Forker:
    """The nursery itself, in its own process."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._control = Control(sock, takes_descriptors=True)
        self._children: dict[int, int] = {}
        """Processes, by the number of the request."""
        self._woken, self._waker = os.pipe()

    def run(self) -> None:
        """Fork and reap until the gateway is gone. What then still runs ends by itself."""
        for end in (self._woken, self._waker):
            os.set_blocking(end, False)
        ignore_signals()
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._waker)
        commands = self._socket.fileno()
        while True:
            ready, _, _ = select.select([commands, self._woken], [], [])
            if self._woken in ready:
                os.read(self._woken, 4096)
                self._reap()
            if commands in ready and not self._obey():
                return

    def _obey(self) -> bool:
        received = self._control.receive()
        if received is None:
            return False
        message, descriptor = received
        if isinstance(message, Spawn) and descriptor is not None:
            pid = self._fork(message, descriptor)
            os.close(descriptor)
            self._children[message.number] = pid
            process = os.pidfd_open(pid)
            self._control.send(Spawned(message.number, pid), process)
            os.close(process)
        return True

    def _reap(self) -> None:
        for number, child in list(self._children.items()):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                del self._children[number]
                self._control.send(Ended(number, os.waitstatus_to_exitcode(status)))

    def _fork(self, message: Spawn, descriptor: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        status: int | str | None = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(descriptor, 0)
            # The gateway's standard output is for the one line that its callers expect.
            os.dup2(2, 1)
            _close_all_but()
            os.environ.clear()
            os.environ.update(message.environment)
            logging.getLogger().handlers.clear()
            _name("djinn-worker")
            from djinn_server.worker import main

            main()
        except SystemExit as ended:
            status = ended.code
        except BaseException:  # noqa: BLE001  # logged; beyond lies what the process was before
            _log.exception("the worker failed")
        finally:
            os._exit(status if isinstance(status, int) else 1)


def _has_handles() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def _close_all_but(*kept: int) -> None:
    """Close what this process has open beside the standard streams."""
    for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if descriptor > 2 and descriptor not in kept:
            with suppress(OSError):  # that of the listing itself
                os.close(descriptor)


def _name(text: str) -> None:
    ctypes.CDLL(None).prctl(_NAME_PROCESS, text.encode(), 0, 0, 0)


def prepare(plugins: Plugins) -> None:
    """Have what every worker needs in memory."""
    import djinn_server.worker  # noqa: F401  # that it is imported is all that is wanted
    from djinn.kinds.guard import PreparedGuard

    guard = plugins.choose("guard", "core")
    if isinstance(guard, PreparedGuard):
        guard.prepare()


def main() -> None:
    """Be a nursery that `begin_nursery` has started."""
    from djinn.config import Config
    from djinn.plugins import Plugins

    ignore_signals()
    _name("djinn-nursery")
    sock = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:  # noqa: PTH123  # a device, not a path
        os.dup2(nothing.fileno(), 0)
    prepare(Plugins.load(Config.resolve({}, os.environ).selection))
    gc.freeze()
    _Forker(sock).run()
    os._exit(0)


if __name__ == "__main__":
    main()

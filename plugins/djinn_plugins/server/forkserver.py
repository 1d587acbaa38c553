"""A process that has imported everything a worker needs, and forks a worker on request.

Importing PyTorch takes seconds; forking a process that has imported it takes milliseconds. The workers also share the
memory of the imported modules.
"""

from __future__ import annotations

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

from djinn_plugins.server.control import CanFork, Ended, Spawn, Spawned, ignore_signals, name_process
from djinn_plugins.server.control_channel import Control
from djinn_plugins.server.spawning import ForkServer

if TYPE_CHECKING:
    from djinn.plugins import Plugins

__all__ = ("fork_forkserver", "main", "prepare", "start_forkserver")

_KINDS_OF_WORKERS = ("executor", "guard", "memory", "shapes", "store", "transport")
"""Kinds of plugins that workers need."""
_log = logging.getLogger("djinn.server")


def start_forkserver(environment: Mapping[str, str]) -> ForkServer | None:
    """Start a forkserver as a new process: its workers inherit nothing from this process's memory.

    Args:
        environment: Its environment variables.

    Returns:
        ``None`` elsewhere than on Linux (5.3 and later).
    """
    if sys.platform != "linux" or not _has_handles():
        return None
    ours, theirs = socket.socketpair()
    with theirs:
        pid = os.posix_spawn(sys.executable, [sys.executable, "-P", "-m", "djinn_plugins.server.forkserver"],
                             environment,
                             file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), 0), (os.POSIX_SPAWN_DUP2, 2, 1)])
    return ForkServer(ours, pid)


def fork_forkserver(prepare: Callable[[], None]) -> ForkServer | None:
    """Fork a forkserver from this process, which should have no other threads yet and no open files.

    This is faster than `start_forkserver`. The workers inherit this process's memory, so it must contain no secrets.

    Args:
        prepare: Called in the forkserver to do work that the workers then need not do. It must leave no threads behind.

    Returns:
        ``None`` where a process that has imported PyTorch should not fork: elsewhere than on Linux (5.3 and later), or
        if another thread runs here.
    """
    if sys.platform != "linux" or threading.active_count() > 1 or not _has_handles():
        return None
    ours, theirs = socket.socketpair()
    # Workers share the memory of what is there: no collection writes to it.
    gc.freeze()
    if pid := os.fork():
        theirs.close()
        return ForkServer(ours, pid)
    status = 1
    try:
        ours.close()
        _close_all_but(theirs.fileno())
        name_process("djinn-forksrv")
        prepare()
        gc.freeze()  # and none to what this has made
        _Forker(theirs).run()
        status = 0
    except BaseException:  # noqa: BLE001  # logged; it must not propagate into the parent's code
        _log.exception("the forkserver failed")
    finally:
        # Skip the parent's cleanup handlers. The gateway then does without a forkserver, and logs that.
        os._exit(status)


class _Forker:
    """The forkserver itself, in its own process."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._control = Control(sock, takes_descriptors=True)
        self._children: dict[int, int] = {}
        """Process IDs, by request number."""
        self._woken, self._waker = os.pipe()

    def run(self) -> None:
        """Fork and reap until the gateway is gone. Workers that are still running exit when they notice that."""
        for end in (self._woken, self._waker):
            os.set_blocking(end, False)
        ignore_signals()
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._waker)
        with suppress(OSError):  # the gateway is gone already; the first `receive` notices it
            self._control.send(CanFork())
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
            # Callers expect one line on the gateway's standard output, so the worker must not write there.
            os.dup2(2, 1)
            _close_all_but()
            os.environ.clear()
            os.environ.update(message.environment)
            logging.getLogger().handlers.clear()
            name_process("djinn-spare")
            from djinn_plugins.server.worker import main

            main()
        except SystemExit as ended:
            status = ended.code
        except BaseException:  # noqa: BLE001  # logged; it must not propagate into the parent's code
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
    """Close all open descriptors except the standard streams and the given ones."""
    for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if descriptor > 2 and descriptor not in kept:
            with suppress(OSError):  # the descriptor of the listing itself
                os.close(descriptor)


def prepare(plugins: Plugins) -> None:
    """Import everything that workers need."""
    import djinn_plugins.server.worker  # noqa: F401  # imported for its effect on `sys.modules`
    from djinn_plugins.common.kinds.guard import SupportsPreparation

    for kind in _KINDS_OF_WORKERS:
        plugins.registered(kind)
    guard = plugins.choose("guard", "core")
    if isinstance(guard, SupportsPreparation):
        guard.prepare()


def main() -> None:
    """Run a forkserver that `start_forkserver` has started."""
    from djinn.plugins import Plugins

    ignore_signals()
    name_process("djinn-forksrv")
    sock = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:  # noqa: PTH123  # a device, not a path
        os.dup2(nothing.fileno(), 0)
    prepare(Plugins.configured({}, os.environ, "server"))
    gc.freeze()
    _Forker(sock).run()
    os._exit(0)


if __name__ == "__main__":
    main()

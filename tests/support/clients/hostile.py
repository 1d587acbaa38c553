"""A tenant that does his worst to a server, in a process of his own, until that is told to end.

What his own computer is busy with is none of the server's business, so this process gives way to all others.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from support.clients.tenants import Saturating, Worked
from support.processes.warm import WarmPython, clean_environment

from djinn.errors import DjinnError, RefusedError
from djinn.wire.messages import Batch, Upload
from djinn.wire.tensors import header_of

PAUSE_S = 0.02
VISIT = 40
"""Requests of a session in a crowd."""
_TOKEN = "HOSTILE_TOKEN"


@contextmanager
def hostile_tenant(what: str, address: str, token: str, count: int = 1, sessions: int = 4) -> Iterator[None]:
    """Let him do it within a ``with`` statement.

    Args:
        what: What he does: the name of a function below.
        address: Of the server.
        token: His; told where other processes cannot see it.
        count: Products in his programs; see `tenants_at_work`.
        sessions: How many he has.
    """
    with tempfile.TemporaryDirectory() as folder, WarmPython(
            f"from {__name__} import main; main()", [what, address, str(count), str(sessions)],
            environment=clean_environment(**{_TOKEN: token}), log=Path(folder) / "log", has_djinn=True) as process:
        said = process.stdout.readline()
        assert said == "he has begun\n", (said, process.poll(), (Path(folder) / "log").read_text())
        yield
        process.terminate()
        assert process.wait(60) == 0


def floods(address: str, token: str, count: int, sessions: int) -> None:
    """Keep many sessions' queues full, of short programs."""
    stopping = _at_the_end()
    with ExitStack() as stack:
        for _ in range(sessions):
            stack.enter_context(Saturating(Worked(address, token, count), ahead=16))
        print("he has begun", flush=True)
        stopping.wait()


def fills(address: str, token: str, count: int, _: int) -> None:
    """Send 8 MiB again and again, to be kept, which is against the limits most of the time."""
    tensor = torch.zeros(2**21)
    stopping = _at_the_end()
    with Worked(address, token, count) as worked:
        print("he has begun", flush=True)
        handle = 10
        while not stopping.wait(PAUSE_S):
            handle += 1
            try:
                worked.connection.request(Batch([Upload(handle, header_of(tensor))], synchronize=True), [tensor])
            except DjinnError:
                continue


def crowds(address: str, token: str, count: int, sessions: int) -> None:
    """Come, ask for a while and go, again and again; who is refused comes again when he was told to."""
    stopping = _at_the_end()

    def visit() -> None:
        while not stopping.is_set():
            try:
                worked = Worked(address, token, count)
            except RefusedError as error:
                stopping.wait(error.retry_after_s)
                continue
            with worked:
                for _ in range(VISIT):
                    if not stopping.is_set():
                        worked.ask()

    threads = [threading.Thread(target=visit) for _ in range(sessions)]
    for thread in threads:
        thread.start()
    print("he has begun", flush=True)
    for thread in threads:
        thread.join()


def _at_the_end() -> threading.Event:
    """An event that comes when this process is asked to end."""
    ended = threading.Event()
    # Before other threads begin, which must not be interrupted either.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        signal.sigwait({signal.SIGTERM})
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    return ended


def main() -> None:
    """Arguments: what he does, the server's address, products, sessions."""
    # Not as much as it can: beside others it would not even come to its end.
    os.nice(10)
    torch.set_num_threads(1)
    does = {"floods": floods, "fills": fills, "crowds": crowds}[sys.argv[1]]
    does(sys.argv[2], os.environ.pop(_TOKEN), *map(int, sys.argv[3:]))

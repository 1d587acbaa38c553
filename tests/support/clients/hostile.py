"""A tenant that does his worst to a server, in a process of his own.

``python -m support.clients.hostile floods|fills|crowds``.

What his own computer is busy with is none of the server's business, so this process gives way to all others.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from support.clients.tenants import Saturating, Worked

from djinn.errors import DjinnError, RefusedError
from djinn.wire.messages import Batch, Upload
from djinn.wire.tensors import header_of

PAUSE_S = 0.02
VISIT = 40
"""Requests of a session in a crowd."""


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
    process = subprocess.Popen([sys.executable, "-m", __name__, what, address, str(count), str(sessions)],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                               env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)})
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(f"{token}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "he has begun\n"
        yield
    finally:
        process.stdin.close()
        try:
            status = process.wait(60)
        finally:
            process.kill()
            process.stdout.close()
    assert status == 0


def floods(address: str, token: str, count: int, sessions: int) -> None:
    """Keep many sessions' queues full, of short programs."""
    with ExitStack() as stack:
        for _ in range(sessions):
            stack.enter_context(Saturating(Worked(address, token, count), ahead=16))
        print("he has begun", flush=True)
        sys.stdin.read()


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
    """An event that comes when standard input ends."""
    ended = threading.Event()

    def read() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    return ended


if __name__ == "__main__":
    # Not as much as it can: beside others it would not even come to its end.
    os.nice(10)
    torch.set_num_threads(1)
    does = {"floods": floods, "fills": fills, "crowds": crowds}[sys.argv[1]]
    does(sys.argv[2], sys.stdin.readline().strip(), *map(int, sys.argv[3:]))

"""A tenant that does his worst to a server, in a process of his own: ``python hostile_tenant.py floods|fills ...``.

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
from tenants_at_work import Saturating, Worked

from djinn.errors import DjinnError
from djinn.protocol.messages import Batch, Upload
from djinn.protocol.tensors import header_of

PAUSE_S = 0.02


@contextmanager
def hostile_tenant(what: str, address: str, token: str, count: int = 1) -> Iterator[None]:
    """Let him do it within a ``with`` statement; the token is told where other processes cannot see it."""
    process = subprocess.Popen([sys.executable, __file__, what, address, str(count)], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True,
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


def floods(address: str, token: str, count: int) -> None:
    """Keep many sessions' queues full, of short programs."""
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(Saturating(Worked(address, token, count), ahead=16))
        print("he has begun", flush=True)
        sys.stdin.read()


def fills(address: str, token: str, count: int) -> None:
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


def _at_the_end() -> threading.Event:
    """An event that comes when standard input ends."""
    ended = threading.Event()

    def read() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    return ended


if __name__ == "__main__":
    os.nice(19)
    torch.set_num_threads(1)
    {"floods": floods, "fills": fills}[sys.argv[1]](sys.argv[2], sys.stdin.readline().strip(), int(sys.argv[3]))

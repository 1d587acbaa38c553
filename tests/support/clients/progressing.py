"""A client that waits long enough for progress to be shown.

``python -m support.clients.progressing CASE SERVER``, run by tests/watch/test_progress.py.

It says by a line how its wait ended; what has to hold afterwards it asserts itself, and says ``done``.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

import djinn
from djinn.session import runtime
from djinn_plugins.models import models

DEVICE = "remote_accelerator:0"
LARGE = 2**22
"""Elements; what the test lets through a second decides how long they take."""


def say(word: str) -> None:
    print(word, flush=True)


def ended(action: Callable[[], Any]) -> Any:
    """Do something that an interrupt may end; the value of it, or ``None``."""
    try:
        value = action()
    except KeyboardInterrupt:
        say("interrupted")
        return None
    say("ended")
    return value


def upload(server: str) -> None:
    djinn.init(server=server)
    large = torch.arange(float(LARGE))
    sent = ended(lambda: large.to(DEVICE))
    if sent is not None:
        assert sent[LARGE - 1].item() == LARGE - 1


def upload_many(server: str) -> None:
    """A model is many tensors, of which none takes long."""
    djinn.init(server=server)
    parts = list(torch.arange(float(LARGE)).split(2**16)) * 8
    sent = ended(lambda: [part.to(DEVICE) for part in parts])
    if sent is not None:
        assert sent[-1][-1].item() == LARGE - 1


def upload_file(server: str) -> None:
    """A file that the server keeps goes in pieces, of which none takes long."""
    models._PIECE_BYTES = 2**20
    djinn.init(server=server)
    with TemporaryDirectory() as folder:
        save_file({"w": torch.arange(float(LARGE))}, path := Path(folder, "large.safetensors"))
        sent = ended(lambda: djinn.models.load_file(path))
    if sent is not None:
        assert sent["w"][LARGE - 1].item() == LARGE - 1


def download(server: str) -> None:
    djinn.init(server=server)
    there = torch.arange(float(LARGE), device=DEVICE)
    here = ended(there.cpu)
    assert there[7].item() == 7.0
    if here is not None:
        assert here[-1].item() == LARGE - 1


def wait(server: str) -> None:
    djinn.init(server=server)
    factor = torch.eye(500, device=DEVICE)
    product = factor
    for _ in range(4000):
        product = product @ factor
    ended(product.sum().item)
    assert factor.sum().item() == 500.0


def connect(server: str) -> None:
    ended(lambda: djinn.init(server=server))
    djinn.init(server=server)


def quick(server: str) -> None:
    """Many short waits are a program at work, not a long wait."""
    djinn.init(server=server)
    total = torch.zeros((), device=DEVICE)
    over = threading.Event()
    threading.Timer(2.0, over.set).start()
    while not over.is_set():
        total += 1
        total.item()
    say("ended")


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    globals()[sys.argv[1]](sys.argv[2])
    assert (torch.ones(3, device=DEVICE) * 2).tolist() == [2.0, 2.0, 2.0]
    names = {type(executor.connection).__name__ for executor in runtime.current().backend.executors}
    say("watched" if names == {"ProgressConnection"} else "unwatched")
    djinn.shutdown()
    say("done")


if __name__ == "__main__":
    main()

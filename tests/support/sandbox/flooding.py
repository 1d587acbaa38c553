"""What native code does that has taken over a worker and floods the gateway: it asks, and reads no answers.

A test installs this module as a plugin into the server under test; see takeover.py. Its operator ``flooding::run``
sends the gateway messages of one kind in a thread.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

from djinn.wire.messages import MARK_BYTES, PROTOCOL_VERSION, PeerHello
from djinn_plugins.server.control import Dial, FromStore, Seen, SessionState
from djinn_plugins.server.counters import MAX_NAMED, WorkerReport
from djinn_plugins.server.kinds.metrics import Amounts, Counts
from djinn_plugins.server.upload_messages import DropUpload, FindUpload, MakeUpload


def _report(number: int) -> WorkerReport:
    names = tuple((f"{number} {each}", 1) for each in range(MAX_NAMED))
    return WorkerReport(Counts(received_bytes=number), Amounts(sessions=number), named=names)


def _sessions(number: int) -> Seen:
    state = SessionState("x", b"", "", 0.0, 0.0, 0, 0.0, 0, 0)
    return Seen(number % 3, (state,) * 2048)


def _raw(content: bytes) -> Callable[[int], bytes]:
    return lambda number: content


KINDS: dict[str, Callable[[int], Any]] = {
    "lists of models": FromStore,
    "files": lambda number: FromStore(number, f"{number:064x}"),
    "pieces of files": lambda number: FromStore(number, f"{number:064x}", bytes(2**19), "w", 0, 2**40),
    "new uploads": lambda number: MakeUpload(number, bytes(MARK_BYTES), 2**20),
    "other uploads": lambda number: FindUpload(number, bytes(MARK_BYTES), 2**20),
    "uses that end": DropUpload,
    "connections": lambda number: Dial(number, "tcp://192.0.2.1:9", PeerHello(
        PROTOCOL_VERSION, "little", bytes(16), "x")),
    "reports": _report, "sessions": _sessions,
    "nested": _raw(b"\x82\xa4type\xa7drained\xa1x" + b"\x91" * 2**18 + b"\xc0"),
    "no text": _raw(b"\x82\xa4type\xaafrom_store\xa6digest\xa2\xff\xfe"),
}


def _sockets() -> list[int]:
    """Return the channels to the gateway: for messages and, if there is one, for turns."""
    found = []
    for descriptor in sorted(int(path.name) for path in Path("/proc/self/fd").iterdir()):
        try:
            with socket.socket(fileno=os.dup(descriptor)) as copy:
                if copy.family == socket.AF_UNIX:
                    found.append(descriptor)
        except OSError:
            continue
    return found


def flood(kind: str, count: int, channel: int) -> None:
    # The answer to whoever wants this is on its way.
    time.sleep(0.3)
    there = _sockets()[channel]
    control = socket.socket(fileno=os.dup(there))
    # The thread that reads the gateway's messages reads no more.
    deaf, other = socket.socketpair()
    os.dup2(deaf.detach(), there)
    with suppress(OSError):  # the gateway has ended the channel
        for number in range(1, count + 1):
            message = KINDS[kind](number)
            data = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
            _send(control, struct.pack("<I", len(data)) + data, other.fileno())
    threading.Event().wait()


def _send(control: socket.socket, data: bytes, descriptor: int) -> None:
    """Send a message in a few pieces, each with a descriptor."""
    step = max(1, -(-len(data) // 4))
    for begin in range(0, len(data), step):
        part, sent = data[begin:begin + step], 0
        with suppress(OSError):  # too many are on their way, for example
            sent = socket.send_fds(control, [part], [descriptor])
        control.sendall(part[sent:])


def _run(request: torch.Tensor) -> torch.Tensor:
    wish = json.loads(bytes(request.tolist()))
    threading.Thread(target=flood, args=(wish["kind"], wish["count"], wish["channel"]), daemon=True).start()
    return request + 0


library = torch.library.Library("flooding", "DEF")
library.define("run(Tensor request) -> Tensor")
library.impl("run", _run, "CPU")
library.impl("run", torch.empty_like, "Meta")

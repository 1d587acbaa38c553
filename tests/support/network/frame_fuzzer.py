"""Attacks with tampered frames, and what they must not do."""

from __future__ import annotations

import collections
import json
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import cattrs
import msgspec
from support.network import frame_feeder
from support.network.frame_feeder import Journal
from support.network.frames import Frames, Mutator, parts

from djinn import errors
from djinn.errors import DjinnError
from djinn_plugins.common.wire.frames import ALIGNMENT, SHORT_MARK

TYPED = {getattr(errors, name).code for name in errors.__all__} - {DjinnError.code}
"""What a server says that has understood what is wrong. The code of the base class says that it has not."""
_LOUD = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b|^Traceback", re.MULTILINE)


@attrs.frozen
class Fed:
    """What became of frames that were fed to a server's code.

    Attributes:
        frames: How many there were.
        seconds: How long it took.
        outcomes: How often the code did what.
        unhandled: Exceptions that nobody had foreseen, with their frames.
        resident: Bytes that were resident in the course of it, whenever it held nothing.
        slowest_s: Longest time that a frame took.
    """

    frames: int
    seconds: float
    outcomes: Mapping[str, int]
    unhandled: Sequence[str]
    resident: Sequence[int]
    slowest_s: float


def feed(corpus: Path, count: int, seed: int, folder: Path, device: str) -> Fed:
    """Feed frames to a server's code in a process of its own.

    Raises:
        AssertionError: It died; says of what, after which frames.
    """
    journal = folder / f"journal-{device}"
    done = subprocess.run([sys.executable, "-m", frame_feeder.__name__, str(corpus), str(count), str(seed),
                           str(journal), device], capture_output=True, text=True, check=False)
    assert not done.returncode, "\n".join([
        f"ended with {done.returncode}", done.stderr[-4000:], "its last frames:",
        *(frame[:4000].hex() for _, frame in Journal.read(journal))])
    return cattrs.structure(json.loads(done.stdout.splitlines()[-1]), Fed)


def attack(port: int, sessions: Sequence[Frames], count: int, seed: int) -> collections.Counter[str]:
    """Send tampered frames to a server, in the middle of sessions that begin well.

    Returns:
        How often it did what: the code of its refusal, or ``closed``; and ``frames``, how many were sent.
    """
    choose = random.Random(seed)
    mutator = Mutator(sessions, seed)
    outcomes: collections.Counter[str] = collections.Counter()
    while outcomes["frames"] < count:
        mutated = [mutator.next(choose.randrange(len(sessions)))]
        # Those that are well formed leave the session alive for more.
        while mutated[-1].kind in {"plausible", "duplicated", "reordered"} and len(mutated) < 20:
            mutated.append(mutator.next(mutated[0].session))
        frames = list(sessions[mutated[0].session])
        first = mutated[0].at
        said = frames[:first] + [frame for one in mutated for frame in one.frames] + frames[first + 1:first + 3]
        outcomes["frames"] += len(mutated)
        outcomes[converse(port, b"".join(said))] += 1
    return outcomes


def converse(port: int, said: bytes) -> str:
    """Say everything and stop; return how the server ended it.

    Raises:
        AssertionError: It said something that is no frame.
        TimeoutError: It did not end it.
    """
    answered = b""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        try:
            sock.sendall(said)
            sock.shutdown(socket.SHUT_WR)
            while data := sock.recv(2**20):
                answered += data
        except (ConnectionResetError, BrokenPipeError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            return "reset"
    outcome = "closed"
    while answered:
        head, header, rest = parts(answered)
        is_short = head[0] == SHORT_MARK
        body_bytes = head[1] * ALIGNMENT if is_short else int.from_bytes(head[24:32], "little")
        assert is_short or head[:4] == b"DJNN"
        assert len(rest) >= body_bytes
        answered = rest[body_bytes:]
        message = msgspec.msgpack.decode(header)
        if isinstance(message, dict) and message["type"] == "refusal":
            outcome = message["code"]
    return outcome


def loud_lines(log: Path) -> list[str]:
    """What a server's log says at WARNING or above that is no typed refusal."""
    return [line for line in log.read_text().splitlines()
            if _LOUD.search(line) and not re.search(r": refused(: \[DJ\d+\]| \(DJ\d+\): \d+ more such lines)", line)]


def came_to_rest(process: int, patience_s: float = 20.0) -> int:
    """Resident bytes of a process, when they change no more."""
    until = time.monotonic() + patience_s
    found, last = frame_feeder.resident_bytes(process), 0
    while found != last and time.monotonic() < until:
        time.sleep(0.5)
        found, last = frame_feeder.resident_bytes(process), found
    return found

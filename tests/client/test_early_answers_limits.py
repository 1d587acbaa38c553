"""Values that the server sends before it is asked for them take bounded memory, whatever the client does."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from executor.test_speculation import ADD, DEFINITIONS
from support.servers.tcp import frame

import djinn
from djinn.wire.messages import PROTOCOL_VERSION, Batch, Hello, Message, Result, Run, Upload
from djinn.wire.tensors import header_of
from djinn_plugins.common.wire.assumptions import MAX_EARLY, MAX_EARLY_BYTES
from djinn_plugins.common.wire.delta import RunPredictor
from djinn_plugins.transport.tcp.sockets import ByteStream
from djinn_plugins.transport.tcp.stream import FrameStream

DEVICE = "remote_accelerator:0"
HELLO = Hello(PROTOCOL_VERSION, str(torch.__version__), "3.11.7", sys.byteorder, resumes=True, takes_early=True)
LEARNED = 24
"""Rounds after which the server expects the next ones."""
UNREAD = 6_000
"""Most rounds whose answers are never read: 24 MB of values."""
LARGE = 1024
"""Elements of the largest value that is sent early."""
MUCH = 8 * 2**20
ROUNDS, WARMUP, EVERY = 3_000, 300, 100
linux = pytest.mark.skipif(sys.platform != "linux", reason="resident sets are read from /proc")


@attrs.define
class LoopingClient:
    """Speaks the bare protocol, accepts early answers, asks for one value in each round, and reads what it likes."""

    connection: socket.socket
    frames: FrameStream = attrs.field(init=False)
    predictor: RunPredictor = attrs.field(factory=RunPredictor)
    sequence: int = 1

    def __attrs_post_init__(self) -> None:
        self.frames = FrameStream(ByteStream(self.connection))

    def begin(self, elements: int) -> None:
        self.connection.sendall(frame(HELLO))
        self.read()
        self._say(Batch([*DEFINITIONS, Upload(1, header_of(torch.ones(elements)))]), torch.ones(elements))
        for count in range(LEARNED):
            self.ask(count)
            while not self._is_answer(*self.read()):
                pass

    def ask(self, count: int) -> None:
        """Send a round; its answer arrives early or later."""
        # A run in each round: so many can be ahead that their values are more than may be sent.
        run = Run(ADD, (9 + count if count else 1, 1), [], (10 + count,), (9 + count,) if count else ())
        self._say(Batch([self.predictor.shorten(run)], fetch=(10 + count,)))

    def read(self) -> tuple[int, Message, list[torch.Tensor]]:
        received = self.frames.read()
        assert received is not None
        return received

    def unread(self, quiet_s: float) -> list[tuple[int, Message, list[torch.Tensor]]]:
        """Read what the server sends, until it sends nothing for some time."""
        found, end = [], time.monotonic() + quiet_s
        while time.monotonic() < end:
            if self.frames.stream.is_ready():
                found.append(self.read())
                end = time.monotonic() + quiet_s
            time.sleep(0.01)
        return found

    def _is_answer(self, number: int, message: Message, _: list[torch.Tensor]) -> bool:
        return isinstance(message, Result) and number == self.sequence

    def _say(self, batch: Batch, *tensors: torch.Tensor) -> None:
        self.sequence += 1
        self.connection.sendall(frame(batch, *tensors, sequence=self.sequence))


@pytest.fixture
def client(server: Any) -> Any:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    with connection:
        yield LoopingClient(connection)


def resident_bytes(process: int | str) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("elements", [4, LARGE])
def test_a_client_that_asks_nothing_more_is_sent_a_bounded_number_of_values(
    client: LoopingClient, elements: int,
) -> None:
    client.begin(elements)
    early = [(number, message, tensors) for number, message, tensors in client.unread(quiet_s=1.0)
             if number > client.sequence]
    assert all(isinstance(message, Result) and message.assumes for _, message, _ in early)
    assert 8 <= len(early) <= MAX_EARLY
    assert sum(tensor.nbytes for _, _, tensors in early for tensor in tensors) <= MAX_EARLY_BYTES


@linux
def test_a_client_that_never_reads_what_it_is_sent_early_costs_the_server_no_memory(
    client: LoopingClient, server: Any,
) -> None:
    client.begin(LARGE)
    before = [resident_bytes(worker) for worker in server.workers]
    client.connection.settimeout(1.0)
    # While the server waits for the client, it reads no further rounds; after some time, it may close the connection.
    with contextlib.suppress(TimeoutError, ConnectionError):
        for count in range(LEARNED, LEARNED + UNREAD):
            client.ask(count)
    after = [resident_bytes(worker) for worker in server.workers]
    assert len(after) == len(before)
    assert max(now - then for now, then in zip(after, before, strict=True)) < MUCH
    # The others do not notice it.
    djinn.init(server=server.address)
    assert (torch.ones(3).to(DEVICE) * 2).sum().item() == 6
    djinn.init()


@linux
def test_memory_is_flat_while_thousands_of_values_are_sent_early(server: Any) -> None:
    djinn.init(server=server.address)
    torch.manual_seed(0)
    table, weight = torch.randn(64, 16).to(DEVICE), torch.randn(16, 64).to(DEVICE)
    token, samples = torch.tensor([1]).to(DEVICE), []
    for count in range(1, ROUNDS + 1):
        token = (table[token] @ weight).argmax(-1)
        assert 0 <= token.item() < 64
        # Some work of the program's own, during which the server runs ahead.
        time.sleep(0.0005)
        if count % EVERY == 0:
            samples.append((resident_bytes("self"), *map(resident_bytes, server.workers)))
    early = djinn.stats()["answered_early"]
    djinn.init()
    assert early > ROUNDS / 4
    for process in zip(*samples, strict=True):
        assert max(process) < 1.02 * process[WARMUP // EVERY - 1], process

"""Moving 256 MB and asking for nothing, against raw sockets between two processes that move the same bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from support.network import raw_peer

import djinn

from .conftest import ServerProcess

LENGTH = 256 * 2**20
QUESTION = b"?" * raw_peer.QUESTION_BYTES


@attrs.frozen
class Wire:
    """A raw connection, and the address of a djinn server that is reached in the same way."""

    sock: Any
    address: str
    memory: memoryview
    others: tuple[int, ...]
    """The processes at the other end: the raw peer, and the worker of the server."""

    def ask(self) -> None:
        self.sock.sendall(QUESTION)
        raw_peer.take(self.sock, self.memory[:len(QUESTION)])

    def upload(self) -> None:
        self.sock.sendall(b"u" * len(QUESTION))
        self.sock.sendall(self.memory)
        raw_peer.take(self.sock, self.memory[:len(QUESTION)])

    def download(self) -> None:
        self.sock.sendall(b"d" * len(QUESTION))
        raw_peer.take(self.sock, self.memory)


def wire(name: str, server: ServerProcess) -> Iterator[Wire]:
    with subprocess.Popen([sys.executable, "-m", raw_peer.__name__, name, str(LENGTH)], stdout=subprocess.PIPE,
                          text=True) as process:
        assert process.stdout is not None
        where = process.stdout.readline().strip()
        with raw_peer.connected(where if where.startswith("/") else ("127.0.0.1", int(where))) as sock:
            yield Wire(sock, server.address, memoryview(bytearray(b"\1" * LENGTH)), (process.pid, server.pid))


@pytest.fixture
def tcp(server: ServerProcess) -> Iterator[Wire]:
    yield from wire("tcp", server)


@pytest.fixture
def unix(tmp_path: Path, start_server: Callable[..., Any]) -> Iterator[Wire]:
    yield from wire(f"{tmp_path}/raw.sock", start_server("--unix", f"{tmp_path}/djinn.sock"))


def upload(at: Wire, compare: Callable[..., Any], publish: Callable[..., None]) -> None:
    djinn.init(server=at.address)
    tensor = torch.ones(LENGTH // 4)

    def ours() -> None:
        tensor.to("remote_accelerator:0")
        djinn.synchronize()

    comparison = compare(at.upload, ours, turns=15, warmup_turns=3)
    publish(comparison.speed, comparison.details)


def download(at: Wire, compare: Callable[..., Any], publish: Callable[..., None]) -> None:
    djinn.init(server=at.address)
    there = torch.ones(LENGTH // 4).to("remote_accelerator:0")
    comparison = compare(at.download, there.cpu, turns=15, warmup_turns=3)
    publish(comparison.speed, comparison.details)


@contextmanager
def a_core_for_each_end(others: tuple[int, ...]) -> Iterator[None]:
    """Keep both ends apart, as two machines are: by itself, the system lets them share a core in one run of three."""
    cores = sorted(os.sched_getaffinity(0))
    for pid, core in ((os.getpid(), cores[0]), *((pid, cores[-1]) for pid in others)):
        _move(pid, {core})
    yield
    _move(os.getpid(), set(cores))


def _move(pid: int, cores: set[int]) -> None:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def empty_request(at: Wire, compare: Callable[..., Any], publish: Callable[..., None]) -> None:
    djinn.init(server=at.address)
    with a_core_for_each_end(at.others):
        comparison = compare(at.ask, djinn.synchronize, turns=5000, warmup_turns=500)
    publish(comparison.cost, comparison.details)


def test_upload(tcp: Wire, compare: Callable[..., Any], publish: Callable[..., None]) -> None:
    upload(tcp, compare, publish)


def test_download(tcp: Wire, compare: Callable[..., Any], publish: Callable[..., None]) -> None:
    download(tcp, compare, publish)


def test_empty_request(tcp: Wire, compare: Callable[..., Any], publish: Callable[..., None]) -> None:
    empty_request(tcp, compare, publish)


def test_upload_unix(unix: Wire, compare: Callable[..., Any], publish: Callable[..., None]) -> None:
    upload(unix, compare, publish)


def test_download_unix(unix: Wire, compare: Callable[..., Any], publish: Callable[..., None]) -> None:
    download(unix, compare, publish)


def test_empty_request_unix(unix: Wire, compare: Callable[..., Any], publish: Callable[..., None]) -> None:
    empty_request(unix, compare, publish)

"""Servers on a path of this machine: who may connect, what becomes of the file, what is said when it cannot be."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes.warm import run_djinn

import djinn
from djinn.errors import ConfigurationError, RefusedError, RemoteTimeoutError, TransportError
from djinn.kinds.transport import ConnectOptions
from djinn.wire.messages import Batch
from djinn_plugins.common.options import ListenOptions
from djinn_plugins.transport.tcp.client import connect_unix
from djinn_plugins.transport.tcp.listener import listen_unix
from djinn_plugins.transport.tcp.opening import open_unix

pytestmark = pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="this system has no Unix-domain sockets")


@pytest.fixture
def path() -> Iterator[Path]:
    """A short path: pytest's own folders may be too deep for a socket."""
    with tempfile.TemporaryDirectory(prefix="djinn-") as folder:
        yield Path(folder) / "to.sock"


def synchronize(address: str, token: str = "") -> None:
    connection = connect_unix(address, ConnectOptions(token=token))
    connection.request(Batch(synchronize=True), ())
    connection.close()


def test_a_session_over_a_path(start_server: Any, path: Path) -> None:
    server = start_server("--unix", str(path))
    assert server.address == f"unix://{path}"
    try:
        djinn.init(server=server.address)
        weight = torch.randn(300, 300)
        there = weight.to("remote_accelerator:0")
        assert torch.equal((there @ there.relu()).cpu(), weight @ weight.relu())
        assert djinn.get_runtime_state().address == server.address
        assert djinn.stats()["bytes_sent"] > weight.nbytes
    finally:
        djinn.shutdown()


def test_the_environment_and_the_doctor_know_such_addresses(start_server: Any, path: Path) -> None:
    server = start_server("--unix", str(path))
    for done in (run_djinn("doctor", DJINN_SERVER=server.address), run_djinn("doctor", "--server", server.address)):
        assert f"{server.address} answers: device cpu" in " ".join(done.stdout.split()), done.stdout
    missing = run_djinn("doctor", "--server", f"unix://{path}.other", COLUMNS="300")
    assert missing.returncode == 1
    assert "Nobody answers at" in missing.stdout


def test_only_its_owner_may_connect_and_the_file_goes_with_the_server(start_server: Any, path: Path) -> None:
    before = os.umask(0)
    try:
        server = start_server("--unix", str(path))
    finally:
        os.umask(before)
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    synchronize(server.address)
    assert server.stop() == 0
    assert not path.exists()
    with pytest.raises(TransportError, match=f"Nobody answers at {server.address}") as caught:
        synchronize(server.address)
    assert "djinn serve" in caught.value.hint


def test_what_a_dead_server_left_is_replaced(start_server: Any, path: Path) -> None:
    first = start_server("--unix", str(path))
    first.process.kill()
    first.process.wait(10)
    assert path.exists()
    with pytest.raises(TransportError, match="Nobody answers"):
        synchronize(first.address)
    synchronize(start_server("--unix", str(path)).address)


def test_a_living_server_is_not_replaced(start_server: Any, path: Path) -> None:
    server = start_server("--unix", str(path))
    ended = run_djinn("serve", "--unix", str(path))
    assert ended.returncode == 2
    assert f"Cannot listen on {server.address}: another server listens there" in ended.stderr
    assert "Traceback" not in ended.stderr
    synchronize(server.address)


def test_a_file_of_another_kind_is_left_alone(path: Path) -> None:
    path.write_text("mine")
    with pytest.raises(TransportError, match=f"Cannot listen on unix://{path}: there is a file that is no socket"):
        listen_unix(f"unix://{path}", ListenOptions())
    assert path.read_text() == "mine"
    with pytest.raises(TransportError, match="Nobody answers"):
        connect_unix(f"unix://{path}", ConnectOptions())


def test_a_listener_does_not_remove_what_is_another_servers_by_now(path: Path) -> None:
    first = listen_unix(f"unix://{path}", ListenOptions())
    path.unlink()
    second = listen_unix(f"unix://{path}", ListenOptions())
    first.close()
    assert path.exists()
    second.close()
    second.close()
    assert not path.exists()


def test_a_token_counts_here_too(start_server: Any, path: Path) -> None:
    server = start_server("--unix", str(path), DJINN_TOKEN="secret")
    synchronize(server.address, "secret")
    with pytest.raises(RefusedError, match=r"The token is missing\."):
        synchronize(server.address)


def test_a_client_waits_while_many_connect(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(str(path))
        listener.listen(0)
        first.connect(str(path))
        waiting = ThreadPoolExecutor(1).submit(open_unix, f"unix://{path}", ConnectOptions(connect_timeout_s=20))
        with pytest.raises(FutureTimeout):
            waiting.result(0.1)
        for _ in range(2):
            listener.accept()[0].close()
        waiting.result(20).stream.close()


def test_a_server_that_accepts_nobody_is_given_up(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen(0)
        with pytest.raises(RemoteTimeoutError, match=f"unix://{path}"):
            connect_unix(f"unix://{path}", ConnectOptions(connect_timeout_s=0.3))
        with pytest.raises(RemoteTimeoutError, match=f"Nobody answered at unix://{path}"):
            connect_unix(f"unix://{path}", ConnectOptions(connect_timeout_s=0.3))
        with pytest.raises(TransportError, match="another server listens there"):
            listen_unix(f"unix://{path}", ListenOptions())


@pytest.mark.parametrize(("arguments", "expected"), [
    (["--unix", "/tmp/" + "x" * 200], "a socket's may have"),
    (["--unix", "/no/such/folder/to.sock"], "No such file or directory"),
    (["--unix", "/tmp/to.sock", "--port", "7777"], "--unix cannot be used with --host, --port or --tls-cert"),
    (["--unix", "/tmp/to.sock", "--host", "localhost"], "--unix cannot be used with --host, --port or --tls-cert"),
])
def test_what_cannot_be_done_is_said_without_a_traceback(arguments: list[str], expected: str) -> None:
    ended = run_djinn("serve", *arguments)
    assert ended.returncode in {1, 2}
    assert expected in ended.stderr
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr


def test_a_system_without_such_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "AF_UNIX")
    for action in (lambda: connect_unix("unix:///tmp/to.sock", ConnectOptions()),
                   lambda: listen_unix("unix:///tmp/to.sock", ListenOptions())):
        with pytest.raises(ConfigurationError, match="this system has no Unix-domain sockets") as caught:
            action()
        assert "tcp://127.0.0.1" in caught.value.hint

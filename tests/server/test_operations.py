"""What operators do to a server while sessions run: reload, drain, end, renew certificates; and how it starts."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import torch
import trustme
from support.processes.warm import WarmPython, clean_environment
from support.servers.connection_options import connect_options
from support.servers.serving import children_of, has_ended
from support.servers.tcp import raw_socket

from djinn.errors import RefusedError, ServerDrainingError, TransportError
from djinn.wire.messages import Batch, Upload
from djinn.wire.tensors import header_of
from djinn_plugins.server.tokens.tokens import TokenFile
from djinn_plugins.transport.tcp.client import SocketConnection, connect, connect_tls

SYNCHRONIZE = Batch(synchronize=True)
ONES = torch.ones(4)
START_S = 120.0
linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells which processes there are")


def wait_until(true: Callable[[], Any], patience_s: float = 60) -> None:
    until = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


def session(address: str, token: str = "", **options: Any) -> SocketConnection:
    return connect(address, connect_options(token=token, **({"connect_timeout_s": 60} | options)))


def holds(connection: SocketConnection) -> None:
    """Put a value into a session, or find it there."""
    connection.request(Batch([Upload(1, header_of(ONES))], synchronize=True), [ONES])


def has_kept(connection: SocketConnection) -> bool:
    result, data = connection.request(Batch(fetch=(1,)), ())
    return not result.failures and torch.equal(data[0], ONES)


class Working:
    """A `working_client` in a process of its own, which has half of its steps left until ``permission`` is a file."""

    def __init__(self, log: Path, kind: str, address: str, steps: int, permission: Path) -> None:
        self.log = log
        self._process = WarmPython(
            "import sys; from support.clients.working import main; main(*sys.argv[1:])",
            [kind, address, str(steps), str(permission)],
            environment=clean_environment(), log=log, has_djinn=True)
        self._changed = threading.Condition()
        self.steps, self.digest, self._is_over = 0, "", False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout:
            with self._changed:
                kind, _, rest = line.strip().partition(" ")
                self.steps += kind == "step"
                self.digest = rest if kind == "digest" else self.digest
                self._changed.notify_all()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def wait_for(self, steps: int) -> None:
        """Wait until so many steps are done."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.steps >= steps or self._is_over, 200)
            assert self.steps >= steps, self.log.read_text()

    def result(self) -> str:
        with self._changed:
            assert self._changed.wait_for(lambda: self._is_over, 200)
            assert self.digest, self.log.read_text()
            return self.digest

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self._process.__exit__(*details)


STEPS = {"trains": 60, "generates": 8}


def test_no_session_is_lost_while_a_server_under_load_reloads_and_drains(start_server: Any, tmp_path: Path) -> None:
    """A process trains, with dropout and AdamW, and another generates: both as if nothing happened."""
    config = tmp_path / "djinn.toml"
    config.write_text("max-sessions = 5\n")
    server = start_server("--config", str(config), "--drain-s", "300", "--metrics-port", "0")
    (readiness,) = re.findall(r"metrics on (http://\S+)/metrics", server.log.read_text())
    readiness += "/readyz"
    with urllib.request.urlopen(readiness) as answer:
        assert answer.status == 200
    wanted = {}
    for kind, steps in STEPS.items():
        with Working(tmp_path / f"calm-{kind}.log", kind, server.address, steps, config) as calm:
            wanted[kind] = calm.result()

    drains = tmp_path / "drains"
    with (Working(tmp_path / "trains.log", "trains", server.address, STEPS["trains"], drains) as trains,
          Working(tmp_path / "generates.log", "generates", server.address, STEPS["generates"], drains) as generates):
        for step in range(1, 5):
            trains.wait_for(5 * step)
            config.write_text(f"max-sessions = {5 + step}\n")
            server.process.send_signal(signal.SIGHUP)
            wait_until(lambda: server.log.read_text().count("INFO djinn.server: reloaded") == step)  # noqa: B023
        generates.wait_for(1)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "draining: SIGTERM" in server.log.read_text())
        drains.touch()
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(readiness)
        with pytest.raises(ServerDrainingError, match="shutting down"):
            session(server.address, connect_timeout_s=2)
        assert (trains.result(), generates.result()) == (wanted["trains"], wanted["generates"])
    assert server.process.wait(60) == 0
    assert "drained: the last session has ended" in server.log.read_text()
    for log in (trains.log, generates.log):
        assert "broke" not in log.read_text()


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_server_that_drains_at_once(start_server: Any, second: int) -> None:
    server = start_server("--drain-s", "600")
    connection = session(server.address)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "draining" in server.log.read_text())
    holds(connection)
    assert server.process.poll() is None
    server.process.send_signal(second)
    assert server.process.wait(60) == 0
    assert "drained" not in server.log.read_text()
    with pytest.raises(TransportError, match=server.address):
        connection.request(SYNCHRONIZE, ())


def test_sessions_end_when_the_time_to_drain_is_over_and_may_change_their_connection_before(
    start_server: Any,
) -> None:
    server = start_server("--drain-s", "3")
    connection = session(server.address)
    holds(connection)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "draining" in server.log.read_text())
    raw_socket(connection).shutdown(socket.SHUT_RDWR)
    assert has_kept(connection)
    assert connection.reconnections == 1
    assert server.process.wait(60) == 0
    assert "the time to drain is over" in server.log.read_text()
    with pytest.raises(TransportError, match=server.address):
        connection.request(SYNCHRONIZE, ())


def test_an_idle_server_has_nothing_to_drain(start_server: Any) -> None:
    server = start_server("--drain-s", "600")
    connection = session(server.address)
    holds(connection)
    connection.close()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0


@linux
def test_signals_to_all_processes_of_a_group_are_the_gateways_business(start_server: Any) -> None:
    """As a terminal sends them that is closed, and a service manager."""
    server = start_server("--drain-s", "600")
    connection = session(server.address)
    holds(connection)
    others = [*children_of(server.process.pid), *server.workers]
    assert len(set(others)) >= 2
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        for process in {*others, server.process.pid} if number == signal.SIGHUP else others:
            os.kill(process, number)
    wait_until(lambda: "reloaded" in server.log.read_text())
    assert has_kept(connection)
    assert not any(map(has_ended, others))
    connection.close()


def reload(server: Any) -> str:
    """Have a server read its configuration again, and return what it says about that."""
    before = len(server.log.read_text())
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "reloaded" in server.log.read_text()[before:])
    return server.log.read_text()[before:]


def test_limits_are_reloaded_and_what_is_wrong_changes_nothing(start_server: Any, tmp_path: Path) -> None:
    config = tmp_path / "djinn.toml"
    config.write_text('max-sessions = 1\nmax-nodes = 7\nlog-format = "text"\nlease-s = 20\n')
    server = start_server("--config", str(config), "--max-nodes", "9")
    first = session(server.address)
    holds(first)
    with pytest.raises(RefusedError, match="the limit is 1"):
        session(server.address)
    for text, said in (("max-sessions = ", "is no TOML"), ("max-sesions = 2", "'max-sesions', which is no option"),
                       ("max-sessions = -2", "it is less than 0"), ('max-sessions = "2"', "got `str`"),
                       ("max-sessions = 2\nmax-handles = 1.5", "max-handles = 1.5"),
                       ('max-sessions = 2\ntls-cert = "/no/such.pem"', "tls-cert cannot come or go"),
                       ('max-sessions = 2\ntoken = "x"', "chmod 600")):
        config.write_text(text)
        log = reload(server)
        assert "not reloaded, the configuration stays as it was" in log
        assert said in log
        with pytest.raises(RefusedError, match="the limit is 1"):
            session(server.address)
    config.write_text("max-sessions = 2\nlease-s = 25\n")
    assert "lease-s is another in the file, which takes a restart" in reload(server)
    second = session(server.address)
    with pytest.raises(RefusedError, match="the limit is 2"):
        session(server.address)
    assert has_kept(first)
    config.unlink()
    assert f"{config} cannot be read" in reload(server)
    for connection in (first, second):
        connection.close()


def test_a_token_is_reloaded_and_sessions_of_the_earlier_one_go_on(start_server: Any, tmp_path: Path) -> None:
    config = tmp_path / "djinn.toml"
    config.touch(0o600)
    config.write_text('token = "first secret"\n')
    server = start_server("--config", str(config))
    connection = session(server.address, "first secret")
    holds(connection)
    config.write_text('token = "second secret"\n')
    reload(server)
    raw_socket(connection).shutdown(socket.SHUT_RDWR)
    assert has_kept(connection)
    assert connection.reconnections == 1
    with pytest.raises(RefusedError, match="The token is wrong"):
        session(server.address, "first secret")
    session(server.address, "second secret").close()
    connection.close()
    assert "secret" not in server.log.read_text()


def test_certificates_are_reloaded_for_new_connections_here_and_in_workers(start_server: Any, tmp_path: Path) -> None:
    authorities = [trustme.CA(), trustme.CA()]
    trusted = []
    for number, authority in enumerate(authorities):
        trusted.append(str(tmp_path / f"authority-{number}.pem"))
        authority.cert_pem.write_to_path(trusted[-1])
    chain, key = tmp_path / "server.pem", tmp_path / "server.key"

    def issue(authority: trustme.CA) -> None:
        made = authority.issue_cert("127.0.0.1")
        made.private_key_pem.write_to_path(str(key))
        chain.write_bytes(b"".join(part.bytes() for part in made.cert_chain_pems))

    def open_session(number: int) -> SocketConnection:
        return connect_tls(server.address, connect_options(tls_ca=trusted[number], connect_timeout_s=60))

    issue(authorities[0])
    server = start_server("--tls-cert", str(chain), "--tls-key", str(key))
    first = open_session(0)
    holds(first)
    issue(authorities[1])
    key.write_text("no key")
    log = reload(server)
    assert "not reloaded" in log
    assert str(chain) in log
    open_session(0).close()
    issue(authorities[1])
    reload(server)
    wait_until(lambda: "new connections use another certificate" in server.log.read_text())
    second = open_session(1)
    holds(second)
    with pytest.raises(TransportError, match="certificate is not trusted"):
        open_session(0)
    assert has_kept(first)
    assert has_kept(second)
    (worker,) = server.workers
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: server.log.read_text().count(" serves") == 2)
    open_session(1).close()


@linux
def test_a_client_whose_worker_is_starting_hears_so_and_waits(
    start_server: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture,
) -> None:
    """For longer than it would wait for a server that says nothing."""
    tokens = TokenFile(tmp_path / "tokens.json")
    token = tokens.create("alice")
    server = start_server("--tokens", str(tokens.path))
    made: list[SocketConnection] = []
    caplog.set_level(logging.WARNING, "djinn.transport")
    client = threading.Thread(target=lambda: made.append(session(server.address, token, connect_timeout_s=1)))
    client.start()
    wait_until(lambda: server.workers, START_S)
    (worker,) = server.workers
    os.kill(worker, signal.SIGSTOP)
    try:
        wait_until(lambda: "is starting a worker for this session" in caplog.text)
        client.join(8)
        assert client.is_alive()
    finally:
        os.kill(worker, signal.SIGCONT)
    client.join(START_S)
    (connection,) = made
    holds(connection)
    assert has_kept(connection)
    connection.close()


def serve_from(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program, *arguments], env=clean_environment(), capture_output=True,
                          text=True, timeout=60, check=False)


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.mark.parametrize("given", ["option", "equals", "config", "path"])
def test_an_address_that_is_taken_is_refused_before_anything_heavy_is_imported(
    given: str, taken: int, tmp_path: Path,
) -> None:
    config, path = tmp_path / "djinn.toml", tmp_path / "djinn.sock"
    config.write_text(f'port = {taken}\nhost = "127.0.0.1"\n')
    arguments = {"option": ["--port", str(taken)], "equals": ["--threads", "1", f"--port={taken}"],
                 "config": ["--config", str(config)], "path": ["--unix", str(path)]}[given]
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        ended = serve_from("import atexit, sys\nfrom djinn_plugins.start import main\n"
                           "atexit.register(lambda: print('torch' in sys.modules, 'djinn' in sys.modules))\nmain()",
                           "serve", *arguments)
    assert (ended.returncode, ended.stdout) == (2, "False False\n")
    address = f"unix://{path}" if given == "path" else f"tcp://127.0.0.1:{taken}"
    assert f"[DJ301] Cannot listen on {address}: " in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_address_that_is_free_is_left_to_the_server_and_so_is_what_makes_no_sense() -> None:
    from djinn_plugins.start import taken_address

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for arguments in (["--port", str(port)], [], ["--port", "x"], ["--port"], ["--config", "/no/such"],
                      ["--host", "no such host", "--port", "1"], ["--unix", "/no/such/path"]):
        assert taken_address(arguments) == ""


PARENT = """
import subprocess, sys, time
server = subprocess.Popen([sys.executable, "-c", "from djinn_plugins.start import main; main()", "serve", "--threads",
"1",
                           "--with-parent", *sys.argv[1:]], stdout=subprocess.PIPE, text=True)
print(server.pid, server.stdout.readline().split()[-1], flush=True)
time.sleep(600)
"""


@linux
def test_a_server_ends_in_order_with_the_process_that_started_it(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with WarmPython(PARENT, ["--drain-s", "1"], environment=clean_environment(), log=log) as parent:
        try:
            pid, address = parent.stdout.readline().split()
            connection = session(address)
            holds(connection)
            processes = [int(pid), *children_of(int(pid))]
            time.sleep(1)
            assert not any(map(has_ended, processes)), "it goes on as long as its parent does"
        finally:
            parent.kill()
    wait_until(lambda: all(map(has_ended, processes)))
    said = log.read_text()
    assert f"the process {parent.pid}, which started this server, has ended" in said
    assert said.rstrip().endswith("stopped")
    assert "the gateway has vanished" not in said
    with pytest.raises(TransportError, match=address):
        connection.request(SYNCHRONIZE, ())

"""``djinn serve``: what it prints, when it refuses, how it ends."""

from __future__ import annotations

import signal
import socket
import threading
import time
from typing import Any

import pytest
import torch
from support.processes.long_work import ENDLESS, Working
from support.processes.warm import run_djinn
from support.servers.connection_options import connect_options

from djinn.errors import RefusedError, TransportError
from djinn.ir.program import NumberArgument, Program, Step, Template, TensorArgument
from djinn.ir.schema import facts_of
from djinn.kinds.transport import ConnectOptions
from djinn.wire.messages import Batch, Define, Run, Upload
from djinn.wire.tensors import header_of
from djinn_plugins.transport.tcp.client import connect, connect_tls


def synchronize(address: str, token: str = "") -> None:
    connection = connect(address, ConnectOptions(token=token))
    connection.request(Batch(synchronize=True), ())
    connection.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_prints_its_address_and_nothing_else_and_ends_on_a_signal(start_server: Any, number: int) -> None:
    server = start_server()
    assert server.address.startswith("tcp://127.0.0.1:")
    connection = connect(server.address, ConnectOptions())
    assert connection.welcome.device == "cpu"
    assert connection.welcome.torch == str(torch.__version__)
    assert len(bytes.fromhex(connection.welcome.session)) == 16
    began = time.monotonic()
    server.process.send_signal(number)
    assert server.process.wait(10) == 0
    assert time.monotonic() - began < 5
    assert server.process.stdout.read() == ""
    assert "stopped" in server.log.read_text()
    assert "Traceback" not in server.log.read_text()
    with pytest.raises(TransportError, match=server.address):
        connection.request(Batch(synchronize=True), ())
    connection.close()


def test_a_killed_server_is_told_to_a_client_that_waits(start_server: Any) -> None:
    server = start_server()
    connection = connect(server.address, ConnectOptions())
    work = endless(connection, seconds=30)
    killed: list[float] = []

    def kill() -> None:
        killed.append(time.monotonic())
        server.process.kill()

    threading.Timer(0.5, kill).start()
    with pytest.raises(TransportError, match=server.address):
        connection.request(work, ())
    assert time.monotonic() - killed[0] < 10
    server.process.wait(10)
    with pytest.raises(TransportError, match=f"Nobody answers at {server.address}"):
        connect(server.address, ConnectOptions())


def endless(connection: Any, seconds: float) -> Batch:
    """A batch that computes for about that long, measured with a small one."""
    template = Template("aten::mm", facts_of(torch.ops.aten.mm.default).digest, (TensorArgument(), TensorArgument()))
    matrix = torch.eye(512)

    def program(steps: int) -> Program:
        return Program((template,), tuple(Step(0, (-1, -1), 1) for _ in range(steps)), 1, ())

    connection.request(Batch([Upload(1, header_of(matrix)), Define(1, program(20)), Run(1, (1,), [], ())],
                             synchronize=True), [matrix])
    began = time.perf_counter()
    connection.request(Batch([Run(1, (1,), [], ())], synchronize=True), ())
    steps = int(20 * seconds / (time.perf_counter() - began))
    return Batch([Define(2, program(min(steps, 900_000))), Run(2, (1,), [], ())], synchronize=True)


@pytest.mark.parametrize("has_steps", [True, False], ids=["between steps", "in a kernel"])
def test_a_program_that_runs_does_not_keep_the_server_from_ending(start_server: Any, has_steps: bool) -> None:
    server = start_server()
    if has_steps:
        connection = connect(server.address, ConnectOptions())
        connection.submit(endless(connection, seconds=60), ())
    else:
        working = Working(server.address)
        working.submit(ENDLESS)
        connection = working.connection
    time.sleep(0.5)
    began = time.monotonic()
    server.process.terminate()
    assert server.process.wait(15) == 0
    assert time.monotonic() - began < 10
    assert ("still running" in server.log.read_text()) is not has_steps
    connection.close()


def test_two_sessions_have_the_same_handles_and_different_values(server: Any) -> None:
    first, second = (connect(server.address, ConnectOptions()) for _ in range(2))
    assert first.welcome.session != second.welcome.session
    for connection, value in ((first, 1.0), (second, 2.0)):
        tensor = torch.full((3,), value)
        connection.submit(Batch([Upload(1, header_of(tensor))]), [tensor])
    for connection, value in ((first, 1.0), (second, 2.0)):
        assert torch.equal(connection.request(Batch(fetch=(1,)), ())[1][0], torch.full((3,), value))
    first.close()
    assert torch.equal(second.request(Batch(fetch=(1,)), ())[1][0], torch.full((3,), 2.0))
    second.close()


def test_a_busy_session_does_not_keep_others_from_connecting(server: Any) -> None:
    busy = connect(server.address, ConnectOptions())
    work = endless(busy, seconds=2)
    worked = threading.Thread(target=lambda: busy.request(work, ()))
    worked.start()
    connect(server.address, ConnectOptions()).close()
    assert worked.is_alive()
    worked.join()
    busy.close()


@pytest.mark.parametrize(("host", "lacks"), [
    ("0.0.0.0", "token"), ("0.0.0.0", "encryption"), ("::", "both"), ("192.0.2.1", "both")])
def test_other_machines_are_not_let_in_without_a_token_and_encryption(
    host: str, lacks: str, certificates: Any,
) -> None:
    arguments = ["--host", host] + (["--tls-cert", certificates.server] if lacks == "token" else [])
    ended = run_djinn("serve", *arguments, **({"DJINN_TOKEN": "correct horse"} if lacks == "encryption" else {}))
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert host in ended.stderr
    assert ("DJINN_TOKEN" in ended.stderr) == (lacks != "encryption")
    assert ("--tls-cert" in ended.stderr) == (lacks != "token")
    assert "Traceback" not in ended.stderr
    assert "correct horse" not in ended.stderr


@pytest.mark.parametrize("how", ["option", "environment"])
def test_other_machines_are_let_in_with_a_token_over_tls(start_server: Any, certificates: Any, how: str) -> None:
    public = ["--host", "0.0.0.0", "--tls-cert", certificates.server]
    if how == "option":
        server = start_server(*public, "--token", "secret")
    else:
        server = start_server(*public, DJINN_TOKEN="secret")
    assert server.address == f"tls://0.0.0.0:{server.port}"
    address = f"tls://127.0.0.1:{server.port}"
    connection = connect_tls(address, connect_options(token="secret", tls_ca=certificates.authority))
    connection.request(Batch(synchronize=True), ())
    connection.close()
    with pytest.raises(RefusedError, match=r"The token is missing\."):
        connect_tls(address, connect_options(tls_ca=certificates.authority))
    assert "secret" not in server.log.read_text()


def test_names_and_ipv6(start_server: Any) -> None:
    synchronize(start_server("--host", "localhost").address)
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    server = start_server("--host", "::1")
    assert server.address.startswith("tcp://[::1]:")
    synchronize(server.address)


@pytest.mark.parametrize(("arguments", "environment", "status", "expected"), [
    (["--device", "cuda:99"], {}, 2, "no device 'cuda:99'"),
    (["--port", "70000"], {}, 2, "65535"),
    (["--tls-cert", "/no/such/file.pem"], {}, 2, "/no/such/file.pem cannot be used"),
    (["--tls-key", "key.pem"], {}, 2, "without --tls-cert"),
    (["--tokens", "/no/such/tokens.json"], {}, 2, "djinn token create NAME --tokens /no/such/tokens.json"),
    (["--tokens", "/dev/null", "--token", "x"], {}, 2, "Use one of the two"),
    (["--max-nodes", "-1"], {}, 2, "--max-nodes"),
    (["--threads", "0"], {}, 2, "--threads"),
    (["--host", "no such host"], {}, 2, "There is no host 'no such host'"),
    (["--host", ""], {}, 2, "There is no host ''"),
    ([], {"DJINN_LOG_LEVEL": "LOUD"}, 2, "log_level"),
    ([], {"DJINN_PLUGINS": "executor=nothing"}, 1, "There is no executor named 'nothing'"),
])
def test_what_cannot_be_done_is_said_without_a_traceback(
    arguments: list[str], environment: dict[str, str], status: int, expected: str,
) -> None:
    ended = run_djinn("serve", *arguments, **environment)
    assert ended.returncode == status
    assert expected in ended.stderr
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run_djinn("serve", "--port", str(port))
    assert ended.returncode == 2
    assert f"Cannot listen on tcp://127.0.0.1:{port}" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_help_says_what_matters() -> None:
    ended = run_djinn("serve", "--help", COLUMNS="200", TERM="dumb")
    assert ended.returncode == 0
    for word in ("--host", "--port", "--device", "--token", "--threads", "DJINN_TOKEN", "127.0.0.1", "SIGTERM",
                 "--tokens", "--tls-cert", "--tls-client-ca", "--max-handles"):
        assert word in ended.stdout


def test_as_many_threads_as_asked_for(start_server: Any) -> None:
    server = start_server("--threads", "2")
    template = Template("aten::add.Tensor", facts_of(torch.ops.aten.add.Tensor).digest,
                        (TensorArgument(), NumberArgument()))
    connection = connect(server.address, ConnectOptions())
    result, data = connection.request(Batch([
        Upload(1, header_of(torch.ones(3))), Define(1, Program((template,), (Step(0, (-1,), 1),), 1, (0,))),
        Run(1, (1,), [2], (2,))], fetch=(2,)), [torch.ones(3)])
    assert result.failures == ()
    assert torch.equal(data[0], torch.full((3,), 3.0))
    connection.close()

"""What a server says of itself, over HTTP and in its log, and the commands that read it."""

from __future__ import annotations

import datetime
import http.client
import http.server
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trustme
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import save_file
from support.processes.warm import run_djinn
from support.servers.connection_options import connect_options
from support.servers.metrics import page_of, wait_for
from support.servers.serving import children_of

import djinn
from djinn.errors import ProtocolError, RefusedError
from djinn.ir.program import Program, Step, Template, TensorArgument
from djinn.ir.schema import facts_of
from djinn.wire.messages import Batch, Define, Free, Run, Upload
from djinn.wire.tensors import header_of
from djinn_plugins.cli.app import main
from djinn_plugins.client.upload_dedup import reusing
from djinn_plugins.server.options import MetricsOptions
from djinn_plugins.server.prometheus.exposition import MetricsPage
from djinn_plugins.server.tenant_limits import Limits
from djinn_plugins.server.tokens.tokens import TokenFile
from djinn_plugins.transport.tcp.client import SocketConnection, connect, connect_tls
from djinn_plugins.watch.monitor.reading import read

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are found in /proc")
MIB = torch.zeros(2**18)
STRANGERS = 200
"""A tensor of a mebibyte."""


def get(server: Any, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(page_of(server).removeprefix("http://"), timeout=10)
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def session(server: Any, token: str = "", **options: Any) -> SocketConnection:
    return connect(server.address, connect_options(token=token, connect_timeout_s=60, **options))


def test_the_metrics_say_what_sessions_do(start_server: Any) -> None:
    server = start_server("--metrics-port", "0", "--memory-mib", "64")
    before = read(page_of(server)).tenants[""]
    assert (before.workers, before.sessions, before.handles, before.held_bytes) == (1, 0, 0, 0)
    assert before.limit_bytes == 64 * 2**20
    connection = session(server)
    connection.request(Batch([Upload(1, header_of(MIB)), Upload(2, header_of(MIB))], synchronize=True), [MIB, MIB])
    for _ in range(5):
        connection.request(Batch(fetch=(1,)), ())
    result, _ = connection.request(Batch(fetch=(7,)), ())
    assert result.failures
    found = wait_for(server, lambda now: now.tenants[""].requests.get("failed")).tenants[""]
    assert (found.sessions, found.handles, found.held_bytes) == (1, 2, 2 * MIB.nbytes)
    assert found.requests == {"ok": 6, "failed": 1}
    assert found.durations[float("inf")] == 7
    assert 0 < found.request_s < 60
    assert 2 * MIB.nbytes < found.received_bytes < 2 * MIB.nbytes + 10_000
    assert 5 * MIB.nbytes < found.sent_bytes < 5 * MIB.nbytes + 10_000
    connection.close()
    gone = wait_for(server, lambda now: not now.tenants[""].sessions).tenants[""]
    assert (gone.handles, gone.held_bytes) == (0, 0)
    assert gone.requests == found.requests, "what was counted stays"
    assert gone.sent_bytes >= found.sent_bytes


def test_a_server_has_the_named_series_that_it_knows(start_server: Any) -> None:
    server = start_server("--metrics-port", "0", "--memory-mib", "2")
    connection = session(server)
    connection.request(Batch([Upload(1, header_of(MIB))], synchronize=True), [MIB])
    connection.request(Batch(fetch=(7,)), ())
    wait_for(server, lambda now: now.tenants[""].requests.get("failed"))
    _, text = get(server, "/metrics")
    found = {" ".join([sample.name, *(value for value in sample.labels.values() if value)]): sample.value
             for family in text_string_to_metric_families(text) for sample in family.samples}
    assert found["djinn_remote_execution_success_rate"] == 0.5
    assert found["djinn_memory_usage_bytes"] == MIB.nbytes
    assert found["djinn_execution_duration_seconds_count"] == 0
    for name in ("cache_hits_total gpu", "cache_misses_total gpu", "cache_evictions_total gpu",
                 "memory_pressure_events_total warning", "memory_pressure_events_total critical"):
        assert found[f"djinn_{name}"] == 0, name
    connection.close()


def test_uploads_that_are_kept_are_told_from_those_that_travel(start_server: Any) -> None:
    server = start_server("--metrics-port", "0")
    content = torch.randn(2**18)
    for _ in range(2):
        connection = session(server, owner="mine")
        reusing(connection).request(Batch([Upload(1, header_of(content))], synchronize=True), [content])
        held = wait_for(server, lambda now: now.tenants[""].shared_bytes).tenants[""]
        assert (held.shared_bytes, held.held_bytes) == (content.nbytes, 0)
        connection.close()
        wait_for(server, lambda now: not now.tenants[""].shared_bytes)
    found = wait_for(server, lambda now: now.tenants[""].cache_requests["hit"]).tenants[""]
    assert found.cache_requests == {"hit": 1, "miss": 1}
    assert found.kept_bytes == content.nbytes
    assert content.nbytes < found.received_bytes < 1.5 * content.nbytes


@pytest.mark.parametrize("options", [(), ("--memory-mib", "16")], ids=["unlimited", "limited"])
def test_stored_weights_that_are_shared_are_told_from_those_that_are_written(
        options: tuple[str, ...], start_server: Any, tmp_path: Path) -> None:
    weight, folder = torch.ones(2**18), tmp_path / "models"
    folder.mkdir()
    save_file({"w": weight}, folder / "small.safetensors")
    server = start_server("--metrics-port", "0", "--models", str(folder), *options)
    djinn.init(server=server.address)
    loaded = djinn.models.load("small")["w"]
    assert loaded.sum().item() == weight.numel()
    held = wait_for(server, lambda now: now.tenants[""].shared_bytes).tenants[""]
    assert (held.shared_bytes, held.held_bytes < 1000) == (weight.nbytes, True)
    loaded.add_(1)
    assert loaded.sum().item() == 2 * weight.numel()
    held = wait_for(server, lambda now: not now.tenants[""].shared_bytes).tenants[""]
    assert 0 <= held.held_bytes - weight.nbytes < 1000
    djinn.shutdown()


def test_a_killed_worker_shows_and_what_it_has_counted_stays(start_server: Any) -> None:
    server = start_server("--metrics-port", "0")
    connection = session(server)
    for _ in range(10):
        connection.request(Batch(synchronize=True), ())
    wait_for(server, lambda now: now.tenants[""].requests["ok"] == 10)
    assert get(server, "/readyz") == (200, "ok\n")
    (worker,), (forkserver,) = server.workers, children_of(server.process.pid)
    os.kill(forkserver, signal.SIGSTOP)  # so that no other worker begins before it is looked
    try:
        os.kill(worker, signal.SIGKILL)
        connection.close()
        dead = wait_for(server, lambda now: now.not_ready and not now.tenants[""].workers)
        status, why = get(server, "/readyz")
        assert (status, "worker" in why) == (503, True)
        assert get(server, "/healthz") == (200, "ok\n")
        assert run_djinn("status", "--metrics", page_of(server)).returncode == 1
    finally:
        os.kill(forkserver, signal.SIGCONT)
    tenant = dead.tenants[""]
    assert (tenant.workers, tenant.sessions, tenant.handles, tenant.requests["ok"]) == (0, 0, 0, 10)
    again = session(server)
    again.request(Batch(synchronize=True), ())
    found = wait_for(server, lambda now: now.tenants[""].requests["ok"] == 11)
    assert found.tenants[""].restarts == {"SIGKILL": 1}
    assert (found.not_ready, found.tenants[""].workers, found.tenants[""].sessions) == ("", 1, 1)
    again.close()


def test_who_is_not_let_in_is_counted_by_why(start_server: Any, tmp_path: Path, raw_client: Any) -> None:
    tokens = TokenFile(tmp_path / "state" / "tokens.json")
    alice = tokens.create("alice", limits=Limits(sessions=1, nodes=1, handles=3, inflight_bytes=2**19))
    server = start_server("--metrics-port", "0", "--tokens", str(tokens.path))
    assert get(server, "/readyz")[0] == 200, "workers start when they are needed"
    for _ in range(2):
        with pytest.raises(RefusedError, match="token is wrong"):
            session(server, "no token")
    connection = session(server, alice)
    with pytest.raises(RefusedError, match="the limit is 1"):
        session(server, alice)
    template = Template("aten::neg", "", (TensorArgument(),))
    long = Program((template,), (Step(0, (-1,), 1), Step(0, (0,), 1)), 1, (1,))
    connection.request(Batch([Define(1, long), Run(1, (5,), [], (9,))], synchronize=True), ())
    small = torch.ones(1)
    connection.request(Batch([Upload(n, header_of(small)) for n in range(1, 5)], synchronize=True), [small] * 4)
    with pytest.raises(RefusedError, match="the limit is 524288"):
        connection.request(Batch([Upload(1, header_of(MIB))], synchronize=True), [MIB])
    with raw_client(server.port, greets=False) as malformed:
        malformed.send(b"x" * 64)
        assert malformed.outcome() == "DJ303"
    found = wait_for(server, lambda now: now.protocol_errors["malformed"]
                     and now.tenants["alice"].rejections["inflight_bytes"])
    assert found.protocol_errors == {"malformed": 1, "version": 0, "timeout": 0}
    assert found.tenants[""].rejections == {"token": 2, "worker": 0, "waiting_room": 0}
    assert found.tenants["alice"].rejections == {"sessions": 1, "nodes": 1, "handles": 2, "inflight_bytes": 1,
                                                 "programs": 0, "queued": 0, "wait": 0}
    assert found.tenants["alice"].requests["refused"] == 1
    assert set(found.tenants) == {"", "alice"}, "only names of tenants are labels"


def test_strangers_cannot_fill_the_log(start_server: Any) -> None:
    server = start_server("--metrics-port", "0", DJINN_TOKEN="secret")
    before = len(server.log.read_text())
    for _ in range(STRANGERS):
        with pytest.raises(RefusedError, match="token is wrong"):
            session(server, "no token")
    lines = server.log.read_text()[before:]
    assert "refused" in lines
    assert len(lines) < 8192
    assert wait_for(server, lambda now: True).tenants[""].rejections["token"] == STRANGERS


def test_a_tenant_behind_tls_is_counted_too(start_server: Any, certificates: Any, tmp_path: Path) -> None:
    tokens = TokenFile(tmp_path / "state" / "tokens.json")
    token = tokens.create("carol")
    server = start_server("--metrics-port", "0", "--tokens", str(tokens.path), "--tls-cert", certificates.server)
    connection = connect_tls(server.address, connect_options(token=token, tls_ca=certificates.authority,
                                                            connect_timeout_s=60))
    connection.request(Batch([Upload(1, header_of(MIB))], synchronize=True), [MIB])
    found = wait_for(server, lambda now: now.tenants["carol"].handles).tenants["carol"]
    assert found.received_bytes > MIB.nbytes
    connection.close()


def test_readers_that_never_ask_do_not_keep_others_from_the_page(start_server: Any) -> None:
    server = start_server("--metrics-port", "0")
    host, port = page_of(server).removeprefix("http://").split(":")
    silent = [socket.create_connection((host, int(port)), timeout=20) for _ in range(40)]
    connection = session(server)
    connection.request(Batch(synchronize=True), ())
    connection.close()
    # Whether sessions can begin is answered whoever else is here: those that have not asked for longest are sent away.
    began_s = time.monotonic()
    assert get(server, "/healthz") == (200, "ok\n")
    assert get(server, "/metrics")[0] == 200
    assert time.monotonic() - began_s < 3
    for sock in silent:
        assert sock.recv(1) == b""
        sock.close()
    assert get(server, "/healthz") == (200, "ok\n")
    assert get(server, "/other")[0] == 404
    assert "Traceback" not in server.log.read_text()


@pytest.fixture
def without_prometheus(tmp_path: Path) -> Path:
    """A folder that makes an installed prometheus-client as good as absent."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "prometheus_client.py").write_text("raise ImportError('not here')\n")
    return tmp_path / "site"


def test_without_the_library_the_remedy_is_named(without_prometheus: Path, start_server: Any) -> None:
    for arguments in (("serve", "--metrics-port", "0"), ("top", "--metrics", "http://127.0.0.1:1", "--once"),
                      ("status", "--metrics", "http://127.0.0.1:1")):
        ended = run_djinn(*arguments, path=without_prometheus)
        assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
        assert "python3 -m pip install 'djinn-torch[metrics]'" in ended.stderr
        assert "Traceback" not in ended.stderr
    server = start_server(PYTHONPATH=str(without_prometheus))
    connection = session(server)
    connection.request(Batch(synchronize=True), ())
    connection.close()


def test_an_address_that_cannot_be_had_is_told_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        path = tmp_path / "s"
        ended = run_djinn("serve", "--unix", str(path), "--metrics-port", str(taken.getsockname()[1]))
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "--metrics-port" in ended.stderr
    assert not path.exists()


def test_top_shows_who_does_what(start_server: Any, tmp_path: Path) -> None:
    tokens = TokenFile(tmp_path / "state" / "tokens.json")
    made = [tokens.create(name) for name in ("alice", "bob")]
    server = start_server("--metrics-port", "0", "--tokens", str(tokens.path))
    alice, bob = (session(server, token) for token in made)
    template = Template("aten::neg", facts_of(torch.ops.aten.neg.default).digest, (TensorArgument(),))
    negate = Program((template,), (Step(0, (-1,), 1),), 1, (0,))
    result, _ = bob.request(Batch([Upload(1, header_of(MIB)), Define(1, negate), Run(1, (1,), [], (2,)), Free((2,))],
                                  synchronize=True), [MIB])
    assert not result.failures
    wait_for(server, lambda now: now.tenants["bob"].held_bytes)
    stop = threading.Event()

    def ask() -> None:
        while not stop.wait(0.01):
            alice.request(Batch(synchronize=True), ())

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        done = run_djinn("top", "--once", "--metrics", page_of(server), "--interval-s", "2.5")
    finally:
        stop.set()
        asking.join()
    assert done.returncode == 0, done.stderr
    tenants, _, programs = done.stdout.partition("\n\n")
    assert [line.split("\t")[:4] for line in programs.splitlines()[1:]] == [["bob", "neg", "-", "0"]]
    lines = [line.split("\t") for line in tenants.splitlines()]
    rows = {cells[0]: dict(zip(lines[0][1:], cells[1:], strict=True)) for cells in lines[1:]}
    assert set(rows) == {"(greetings)", "alice", "bob", "(total)"}
    # Up to 100 a second, and what a worker has told when it was looked is up to a quarter of a second old.
    assert 10 < float(rows["alice"]["requests_per_s"]) < 115
    assert 0 < float(rows["alice"]["p99_s"]) < 30
    assert float(rows["alice"]["bytes_per_s"]) > 100
    assert (rows["bob"]["held_bytes"], rows["bob"]["handles"], rows["bob"]["sessions"]) == (str(MIB.nbytes), "1", "1")
    assert (rows["bob"]["requests_per_s"], rows["bob"]["p99_s"]) == ("0", "-")
    assert rows["(total)"]["sessions"] == "2"
    for connection in (alice, bob):
        connection.close()


def test_readers_on_other_machines_see_no_programs() -> None:
    page = MetricsPage(MetricsOptions(port=0), SimpleNamespace(totals=dict))
    readers = ("127.0.0.1", "::1", "10.0.0.1", "fe80::1%eth0")
    answers = [page._answer("GET", "/programs", {}, reader) for reader in readers]
    assert [(status, content) for status, _, content in answers[:2]] == [(200, b"{}")] * 2
    assert {status for status, *_ in answers[2:]} == {403}
    page.stop()


def test_status_says_whether_sessions_can_begin(start_server: Any) -> None:
    server = start_server("--metrics-port", "0", DJINN_TOKEN="secret")
    done = run_djinn("status", "--json", "--metrics", f"{page_of(server)}/metrics", "--connect", server.address,
                 DJINN_TOKEN="secret")
    told = json.loads(done.stdout)
    assert (done.returncode, told["ready"], told["build"]["torch"]) == (0, True, str(torch.__version__))
    assert (told["server"]["device"], told["tenants"][""]["workers"]) == ("cpu", 1)
    lines = dict(line.split("\t") for line in run_djinn("status", DJINN_METRICS=page_of(server)).stdout.splitlines())
    assert lines["sessions can start"] == "yes"
    assert re.fullmatch(r"1 worker, [01] sessions?, [\d.]+ MiB held, \d+ requests?", lines["tenant (everybody)"])
    greeted = run_djinn("status", "--connect", server.address, DJINN_TOKEN="secret").stdout
    assert re.search(r"(?m)^now\t\d+ sessions?, [\d.]+ MiB held$", greeted), greeted
    assert re.search(r"(?m)^device\tcpu \(\S.*, [\d.]+ of [\d.]+ GiB free\)$", greeted), greeted
    refused = run_djinn("status", "--connect", server.address)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "token is missing" in refused.stderr
    url = page_of(server)
    assert server.stop() == 0
    gone = run_djinn("status", "--json", "--metrics", url)
    assert (gone.returncode, json.loads(gone.stdout)["ready"]) == (1, False)
    assert "--metrics-port" in json.loads(gone.stdout)["reason"]


@pytest.mark.parametrize("arguments", [
    ("status",), ("top",), ("top", "--metrics", "127.0.0.1:9090"), ("status", "--metrics", "ftp://x"),
    ("status", "--metrics", "http://x:y"), ("status", "--connect", "nonsense")])
def test_commands_that_make_no_sense_end_with_2(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("DJINN_SERVER", "DJINN_METRICS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    assert said.err.startswith("djinn: [DJ101]")


@pytest.fixture
def pretender() -> Iterator[Callable[[bytes], str]]:
    """Serves something else as metrics."""
    opened: list[http.server.HTTPServer] = []

    def start(content: bytes) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *arguments: Any) -> None:
                pass

        opened.append(http.server.HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=opened[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{opened[-1].server_port}"

    yield start
    for one in opened:
        one.shutdown()
        one.server_close()


@pytest.mark.parametrize("content", [b"<html>", b"\xff\xfe{}", b"up 1\n", b"x{ 1\n", b"# HELP x y\n" * 900_000],
                         ids=["html", "binary", "other", "broken", "endless"])
def test_a_page_that_is_none_is_refused(pretender: Callable[[bytes], str], content: bytes) -> None:
    url = pretender(content)
    with pytest.raises(ProtocolError) as refused:
        read(url)
    assert len(str(refused.value)) < 600


def test_a_page_cannot_do_anything_to_a_terminal(pretender: Callable[[bytes], str]) -> None:
    page = ('djinn_build_info{version="\x1b[31m"} 1\ndjinn_sessions{tenant="\x1b]0;x\x07"} 1e400\n'
            'djinn_live_handles{tenant="a"} NaN\ndjinn_request_duration_seconds_bucket{tenant="a",le="?"} -1\n')
    url = pretender(page.encode())
    for done in (run_djinn("status", "--metrics", url),
                 run_djinn("top", "--once", "--interval-s", "0.1", "--metrics", url)):
        assert "Traceback" not in done.stderr
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", done.stdout), done.stdout
        assert "?]0;x?" in done.stdout


def test_the_log_is_json_for_whoever_asks_and_has_no_secrets(
    start_server: Any, raw_client: Any, tmp_path: Path,
) -> None:
    server = start_server("--log-format", "json", "--metrics-port", "0", DJINN_TOKEN="very secret",
                          DJINN_LOG_LEVEL="DEBUG")
    session(server, "very secret").close()
    for wrong in ('not so\n{"level": "INFO"} secret', "\x1b[31m"):
        with pytest.raises(RefusedError):
            session(server, wrong)
    with raw_client(server.port, greets=False) as malformed:
        malformed.send(b"\x1b\n" * 64)
        malformed.outcome()
    with socket.create_connection(tuple(page_of(server).removeprefix("http://").split(":")), timeout=10) as plain:
        plain.sendall(b"GET /\x1b[31m HTTP/1.0\r\n\r\n")
        assert b"404" in plain.recv(100)
    assert server.stop() == 0
    text = server.log.read_bytes().decode("ascii")
    records = [json.loads(line) for line in text.splitlines()]
    assert {record["role"] for record in records} == {"gateway", "worker"}
    assert {"time", "level", "component", "process", "message"} <= set.intersection(*map(set, records))
    assert any("refused" in record["message"] and record["level"] == "WARNING" for record in records)
    assert any("?[31m" in record["message"] for record in records)
    for hidden in ("very secret", "not so", "\x1b", "\\u001b"):
        assert hidden not in text


def test_levels_of_the_log_are_each_components_own(start_server: Any) -> None:
    server = start_server(DJINN_LOG_LEVEL="DEBUG", DJINN_LOG_COMPONENT="transport")
    session(server).close()
    assert server.stop() == 0
    assert "djinn.server" not in server.log.read_text(), "INFO of another component"


def test_the_doctor_sees_a_certificate_that_ends_soon(start_server: Any, tmp_path: Path) -> None:
    authority = trustme.CA()
    (tmp_path / "ca.pem").write_bytes(authority.cert_pem.bytes())
    soon = authority.issue_cert("127.0.0.1", not_after=datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=3))
    later = authority.issue_cert("127.0.0.1", not_after=datetime.datetime.now(datetime.UTC)
                                 + datetime.timedelta(days=99))
    for certificate, healthy in ((soon, False), (later, True)):
        certificate.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "server.pem"))
        server = start_server("--tls-cert", str(tmp_path / "server.pem"), DJINN_TOKEN="secret")
        done = run_djinn("doctor", "--json", "--server", server.address, DJINN_TLS_CA=str(tmp_path / "ca.pem"),
                     DJINN_TOKEN="secret")
        report = json.loads(done.stdout)
        found = {check["name"]: check for check in report["checks"]}
        assert (done.returncode, report["ok"], found["certificate"]["ok"]) == (int(not healthy), healthy, healthy)
        assert bool(found["certificate"]["remedy"]) is not healthy
        assert ("99 days" if healthy else "3 days") in found["certificate"]["found"]
        assert "secret" not in done.stdout

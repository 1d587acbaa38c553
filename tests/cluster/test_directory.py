"""The directory of a cluster: which servers it names, to whom, and what it makes of anything else."""

from __future__ import annotations

import http.client
import itertools
import json
import random
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import attrs
import pytest
from anyio.abc import SocketListener
from anyio.from_thread import start_blocking_portal
from support.processes.warm import WarmPython, clean_environment
from support.servers.serving import Serving

import djinn
from djinn.errors import ConfigurationError, ProtocolError, RefusedError, TransportError
from djinn.plugins import Plugins
from djinn.session.connecting import connect
from djinn.settings import Config
from djinn_conformance.certificates import certificates
from djinn_plugins.cluster.asking import ask, parse, trusting
from djinn_plugins.cluster.directory import ordering
from djinn_plugins.cluster.directory.announcing import Announcements
from djinn_plugins.cluster.directory.choosing import SETTLING_S, STALE_S, ServerListing
from djinn_plugins.cluster.directory.endpoint import DirectoryEndpoint
from djinn_plugins.cluster.messages import (
    MAX_LINE_BYTES,
    Accepted,
    DirectoryProblem,
    Draining,
    Join,
    ListServers,
    LoadReport,
    Resolve,
    encoded,
)
from djinn_plugins.common.files.secret_files import key_in
from djinn_plugins.common.settings.cluster import ClusterSettings
from djinn_plugins.server.options import DirectoryOptions, ServeOptions

KEY, TOKEN = "k" * 20, "a-long-token"
AUTHORITY = certificates().authority
LOADS = [LoadReport(problem, sessions, held, limit, models)
         for problem in ("", "it drains") for sessions in (0, 2) for held in (0, 80) for limit in (0, 100)
         for models in ((), ("gpt2",))]


def addresses(servers: Any) -> list[str]:
    return [server.address for server in servers]


@pytest.mark.parametrize("seed", range(40))
def test_the_best_server_is_named_first(seed: int) -> None:
    """Of two servers that are named one after the other, the first is not worse where they first differ."""
    draw, now = random.Random(seed), itertools.count()
    listing = ServerListing(lambda: 0.0)
    loads = {f"tcp://host:{next(now)}": draw.choice(LOADS) for _ in range(draw.randrange(8))}
    for address, load in loads.items():
        listing.report(listing.join(address), load)
    listing.join("tcp://host:99")  # it has not reported
    wanted = Resolve("", recent=tuple(draw.sample(list(loads), min(2, len(loads)))),
                     models=draw.choice([(), ("gpt2",), ("gpt2", "llama")]), memory_bytes=draw.choice([0, 30]))

    def faults(address: str) -> list[float]:
        load = loads[address]
        return [address in wanted.recent, any(model not in load.models for model in wanted.models),
                load.limit_bytes > 0 and load.limit_bytes - load.held_bytes < wanted.memory_bytes, load.sessions,
                load.held_bytes / (load.limit_bytes or float("inf"))]

    found = addresses(listing.choose(wanted))
    assert set(found) == {address for address, load in loads.items() if not load.problem}
    assert all(faults(one) <= faults(other) for one, other in itertools.pairwise(found))


def test_clients_that_come_together_are_spread_and_servers_that_are_silent_are_not_named() -> None:
    clock = [0.0]
    listing = ServerListing(lambda: clock[0])
    members = [listing.join(f"tcp://host:{port}") for port in (1, 2, 3)]
    for member in members:
        listing.report(member, LoadReport())
    led = [addresses(listing.choose(Resolve("")))[0] for _ in range(6)]
    assert sorted(led) == sorted(2 * [member.address for member in members])
    clock[0] = SETTLING_S
    for member, sessions in zip(members, (5, 4, 6), strict=True):
        listing.report(member, LoadReport(sessions=sessions))
    assert addresses(listing.choose(Resolve("")))[0] == members[1].address
    clock[0] += STALE_S
    listing.report(members[2], LoadReport(sessions=9))
    assert addresses(listing.choose(Resolve(""))) == [members[2].address]
    again = listing.join(members[2].address)
    listing.leave(members[2])  # the connection before
    listing.report(again, LoadReport())
    assert addresses(listing.all()) == [member.address for member in members]


def check(token: str) -> str:
    if token != TOKEN:
        raise RefusedError("The token is wrong.")
    return ""


@contextmanager
def running(context: ssl.SSLContext | None = None) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as sock, start_blocking_portal() as portal:
        port = sock.getsockname()[1]

        async def run() -> None:
            await DirectoryEndpoint("lab", KEY, check, context).run(await SocketListener.from_socket(sock.dup()))

        task = portal.start_task_soon(run)
        yield f"{'tls' if context else 'tcp'}://127.0.0.1:{port}/lab"
        task.cancel()


@pytest.fixture(scope="module")
def directory() -> Iterator[str]:
    with running() as address:
        yield address


def connected(directory: str) -> socket.socket:
    found = parse(directory)
    plain = socket.create_connection((found.host, found.port), timeout=20)
    return plain if found.scheme == "tcp" else trusting(AUTHORITY).wrap_socket(plain, server_hostname=found.host)


def answer_of(directory: str, data: bytes) -> dict[str, Any]:
    with connected(directory) as sock:
        sock.sendall(data)
        return dict(json.loads(sock.makefile("rb").readline() or b"{}"))


def resolve(directory: str, token: str = TOKEN, authorities: str = "") -> list[str]:
    return addresses(ask(directory, lambda name: Resolve(token, name), authorities=authorities))


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def listed(directory: str, authorities: str = "") -> list[str]:
    return addresses(ask(directory, lambda _: ListServers(KEY), authorities=authorities))


def test_a_server_is_named_as_long_as_its_connection_lasts(directory: str) -> None:
    with pytest.raises(RefusedError, match="none has joined"):
        resolve(directory)
    with connected(directory) as server:
        server.sendall(encoded(Join(KEY, "lab", "tcp://host:1")))
        assert json.loads(server.makefile("rb").readline()) == {"type": "accepted"}
        server.sendall(encoded(LoadReport("it drains")))
        until(lambda: listed(directory) == ["tcp://host:1"])
        with pytest.raises(RefusedError, match="no server where a session can begin: it drains"):
            resolve(directory)
        server.sendall(encoded(LoadReport()))
        until(lambda: not ask(directory, lambda _: ListServers(KEY))[0].load.problem)  # type: ignore[union-attr]  # operators are given it
        assert resolve(directory) == ["tcp://host:1"]
    until(lambda: not listed(directory))


@pytest.mark.parametrize(("request_of", "code"), [
    (Join("another key", "lab", "tcp://host:6"), "DJ305"), (Join(KEY, "home", "tcp://host:6"), "DJ305"),
    (ListServers("another key"), "DJ305"), (Resolve("another token", "lab"), "DJ305"),
    (Resolve(TOKEN, "home"), "DJ305"), (LoadReport(), "DJ303")], ids=str)
def test_those_without_key_or_token_and_those_at_another_cluster_are_refused(
        request_of: Any, code: str, directory: str) -> None:
    answer = answer_of(directory, encoded(request_of))
    assert (answer["type"], answer["code"]) == ("problem", code)
    assert KEY not in str(answer)
    assert listed(directory) == []


@pytest.mark.parametrize("data", [
    b"\n", b"{}\n", b"null\n", b"\xff\xfe\n", b"[" * 20000 + b"\n", b"a" * (MAX_LINE_BYTES + 1),
    b'{"type":"resolve","token":' + b'{"a":' * 3000 + b"\n", b'{"type":"join","key":1,"name":"","address":"a"}\n',
    b'{"type":"resolve","token":"\\ud800"}\n',
    encoded(Resolve(TOKEN, memory_bytes=0)).replace(b'"memory_bytes":0', b'"memory_bytes":-1'),
    encoded(Resolve("t" * 5000))], ids=range(11))
def test_malformed_lines_end_their_connection_and_no_other(data: bytes, directory: str) -> None:
    with connected(directory) as server:
        server.sendall(encoded(Join(KEY, "", "tcp://host:1")) + encoded(LoadReport()))
        until(lambda: bool(listed(directory)))
        answer = answer_of(directory, data)
        assert (answer["type"], answer["code"]) == ("problem", "DJ303"), answer
        assert resolve(directory) == ["tcp://host:1"]
    until(lambda: not listed(directory))


def test_a_server_that_reports_nonsense_leaves(directory: str) -> None:
    with connected(directory) as server:
        server.sendall(encoded(Join(KEY, "", "tcp://host:1")) + encoded(LoadReport())
                       + b'{"type":"load","sessions":-1}\n')
        lines = [json.loads(line) for line in server.makefile("rb")]
    assert [line["type"] for line in lines] == ["accepted", "problem"]
    until(lambda: not listed(directory))


@pytest.fixture(scope="module")
def context() -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.load_cert_chain(certificates().server)
    return made


def test_an_encrypted_directory_is_known_by_its_certificate(context: ssl.SSLContext) -> None:
    made = certificates()
    with running(context) as address:
        with pytest.raises(RefusedError, match="none has joined"):
            resolve(address, authorities=made.authority)
        with pytest.raises(TransportError, match="does not answer: .*certificate"):
            resolve(address)
        with pytest.raises(TransportError, match="does not answer"):
            resolve(address.replace("tls://", "tcp://"))
        with pytest.raises(RefusedError, match="The token is wrong"):
            resolve(address, "another", authorities=made.authority)


def test_a_key_is_made_once_and_nobody_else_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "state" / "key"
    made = key_in(path, makes=True)
    assert (key_in(path), key_in(path, makes=True), path.stat().st_mode & 0o777) == (made, made, 0o600)
    path.chmod(0o640)
    with pytest.raises(ConfigurationError, match="Others can read"):
        key_in(path)
    path.write_text("short")
    path.chmod(0o600)
    with pytest.raises(ConfigurationError, match="fewer than"):
        key_in(path)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        key_in(tmp_path / "none")


@pytest.mark.parametrize("address", ["", "lab", "tls://head", "tls://head:0/lab", "ray://head:1/lab", "tls://:7/lab",
                                     "tls://head:7/lab/more", "tls://head:70000", "tls://me@head:7/lab", "tls://h:7?a=b"])
def test_addresses_that_are_none_are_refused(address: str) -> None:
    with pytest.raises(ConfigurationError, match="is not the address of a directory"):
        parse(address)
    assert str(parse("tls://[::1]:7700/lab/")) == "tls://[::1]:7700/lab"


def test_an_answer_of_something_else_is_a_protocol_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock, start_blocking_portal() as portal:
        def answer() -> None:
            for line in (b"hello\n", b'{"type":"accepted"}\n', b"no end"):
                with sock.accept()[0] as client:
                    client.recv(1000)
                    client.sendall(line)

        answering = portal.start_task_soon(_in_thread, answer)
        address = f"tcp://127.0.0.1:{sock.getsockname()[1]}"
        for kind in (ProtocolError, ProtocolError, TransportError):
            with pytest.raises(kind):
                resolve(address)
        answering.result(20)


class Idle:
    """A server without sessions, as an announcement sees it."""

    address = "tcp://host:1"
    totals = models = staticmethod(dict)
    pages = staticmethod(lambda: ["http://0.0.0.0:9090"])
    why_not_ready = staticmethod(str)


def test_servers_and_clients_follow_a_directory_that_writes_another_address(
        tmp_path: Path, context: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch) -> None:
    path, authority = tmp_path / "address", certificates().authority
    settings = tmp_path / "djinn.toml"
    settings.write_text(f'tls-ca = "{authority}"\n')
    monkeypatch.setenv("DJINN_CONFIG", str(settings))
    given = f"file:{path}"
    with pytest.raises(TransportError, match="cannot be read from"):
        parse(given)
    path.write_text("file:another")
    with pytest.raises(ConfigurationError, match="'file:another' is not the address of a directory"):
        resolve(given)
    key_in(tmp_path / "key", makes=True)
    (tmp_path / "key").write_text(KEY)
    announcement = Announcements().open(ServeOptions(directory=DirectoryOptions(given, str(tmp_path / "key"))), Idle())
    assert announcement is not None
    announcement.start()
    try:
        for encryption in (None, context):
            with running(encryption) as address:
                path.write_text(f"{address}\n")
                until(lambda: listed(given, authority) == [Idle.address])
                assert resolve(given, authorities=authority) == [Idle.address]
                (found,) = ask(given, lambda _: ListServers(KEY), authorities=authority)
                assert found.load is not None
                assert found.load.metrics == f"http://{socket.getfqdn()}:9090"
    finally:
        announcement.stop()


async def _in_thread(function: Callable[[], None]) -> None:
    from anyio.to_thread import run_sync

    await run_sync(function)


def test_a_session_begins_on_another_server_if_the_one_that_is_named_first_does_not_answer(directory: str, server: Any
                                                                                           ) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        gone = f"tcp://127.0.0.1:{sock.getsockname()[1]}"
    with connected(directory) as first, connected(directory) as second:
        for sock, address, sessions in ((first, gone, 0), (second, server.address, 5)):
            sock.sendall(encoded(Join(KEY, "lab", address)) + encoded(LoadReport(sessions=sessions)))
        until(lambda: set(listed(directory)) == {gone, server.address})
        assert resolve(directory)[0] == gone
        for _ in range(2):  # the second time, this process was given both a moment ago
            session = djinn.init(cluster=directory, token=TOKEN)
            assert session.backend.address == server.address
            djinn.shutdown()


def test_a_cluster_that_the_program_names_takes_the_place_of_a_server_of_the_environment() -> None:
    plugins = Plugins.configured({"cluster": "tcp://127.0.0.1:1/lab", "server": None}, {"DJINN_SERVER": "tcp://host:2"})
    assert plugins.settings(Config).addresses == ("",)
    with pytest.raises(TransportError, match="The directory tcp://127.0.0.1:1/lab does not answer"):
        connect(plugins, "")
    plugins = Plugins.configured({"server": "tcp://host:2"}, {"DJINN_CLUSTER": "tcp://127.0.0.1:1/lab"})
    assert plugins.settings(Config).addresses == ("tcp://host:2",)
    assert not plugins.settings(ClusterSettings).cluster


@attrs.frozen
class ClusterPage:
    """The page of a directory in another process, with TLS, and that directory's address and file with the key."""

    url: str
    address: str
    key_file: Path

    @property
    def key(self) -> str:
        return self.key_file.read_text().strip()

    def ask(self, path: str, secret: str, body: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
        page = http.client.HTTPSConnection(urlsplit(self.url).netloc, timeout=20, context=trusting(AUTHORITY))
        page.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body),
                     {"Authorization": f"Bearer {secret}"})
        with page.getresponse() as answer:
            return answer.status, json.loads(answer.read())

    def state(self) -> dict[str, Any]:
        return self.ask("/state", self.key)[1]

    def drain(self, target: str, secret: str | None = None) -> tuple[int, dict[str, Any]]:
        return self.ask("/act", self.key if secret is None else secret, {"action": "drain", "target": target})


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterPage]:
    folder = tmp_path_factory.mktemp("cluster")
    command = ["directory", "--name", "lab", "--key", str(folder / "key"), "--dashboard-port", "0",
               "--address-file", str(folder / "address"), "--tls-cert", certificates().server]
    with WarmPython("from djinn_plugins.cli.app import main; main()", command,
                    environment=clean_environment(DJINN_TOKEN=TOKEN),
                    log=folder / "log", has_djinn=True) as process:
        address = process.stdout.readline().split()[-1]
        assert (folder / "address").read_text() == f"{address}\n"
        (url,) = re.findall(r"dashboard on (\S+),", (folder / "log").read_text())
        yield ClusterPage(url, address, folder / "key")
        process.terminate()
        assert process.wait(20) == 0, (folder / "log").read_text()


def test_the_page_of_a_cluster_shows_its_servers_to_those_who_have_the_key(cluster: ClusterPage) -> None:
    assert [cluster.ask("/state", secret)[0] for secret in ("", TOKEN, "another", cluster.key)] == [401, 401, 401, 200]
    assert cluster.state()["problem"] == "No session can begin: no server is ready."
    with connected(cluster.address) as server:
        server.sendall(encoded(Join(cluster.key, "lab", "tcp://host:1")))
        server.sendall(encoded(LoadReport(sessions=3, held_bytes=5, limit_bytes=9, models=("gpt2", 64 * "0"))))
        until(lambda: cluster.state()["tables"][0]["rows"] != [])
        found = cluster.state()
        assert [row["cells"] for row in found["tables"][0]["rows"]] == [["tcp://host:1", "", 3, 5, 9, "gpt2"]]
        assert found["problem"] == ""
        until(lambda: [chart["values"][-1] for chart in cluster.state()["charts"]] == [1, 3, 5])
    until(lambda: cluster.state()["tables"][0]["rows"] == [])


def test_the_page_of_a_cluster_says_what_a_server_answers_that_is_to_drain(cluster: ClusterPage) -> None:
    target = "tcp://host:7"
    with connected(cluster.address) as server, ThreadPoolExecutor(1) as asking:
        lines = server.makefile("rb")
        server.sendall(encoded(Join(cluster.key, "lab", target)) + encoded(LoadReport()))
        assert json.loads(lines.readline()) == {"type": "accepted"}
        until(lambda: cluster.state()["tables"][0]["rows"] != [])
        assert cluster.state()["tables"][0]["rows"][0]["action"]["target"] == target
        for secret in ("", TOKEN, "another"):
            assert cluster.drain(target, secret)[0] == 401
        for answer, status, said in (
                (Draining(), 200, f"{target} takes no new sessions, and ends after the last one."),
                (DirectoryProblem("DJ101", "It cannot."), 400, f"{target} does not drain: It cannot."),
                (None, 200, f"{target} has left.")):
            waiting = asking.submit(cluster.drain, target)
            assert json.loads(lines.readline()) == {"type": "drain"}, "only those who have the key reach it"
            if answer is None:
                server.shutdown(socket.SHUT_RDWR)
            else:
                server.sendall(encoded(answer))
            found, content = waiting.result(20)
            assert (found, content.get("said", content.get("problem"))) == (status, said)
    until(lambda: cluster.state()["tables"][0]["rows"] == [])
    assert cluster.drain(target)[0] == cluster.ask("/act", cluster.key, {"action": "end", "target": target})[0] == 400


def test_a_server_drains_when_its_directory_asks(cluster: ClusterPage, tmp_path: Path) -> None:
    with Serving(tmp_path / "log", "--directory", cluster.address, "--directory-key", str(cluster.key_file),
                 "--control", str(tmp_path / "s"), DJINN_TLS_CA=AUTHORITY) as server:
        until(lambda: server.address in [row["cells"][0] for row in cluster.state()["tables"][0]["rows"]])
        status, answer = cluster.drain(server.address)
        assert (status, set(answer)) == (200, {"said"}), answer
        assert server.process.wait(20) == 0
    assert "asks this server to drain" in (tmp_path / "log").read_text()


class Silent:
    """A connection to a server that answers nothing."""

    async def send(self, data: bytes) -> None:
        """Take what is sent."""


def test_a_server_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordering, "TIMEOUT_S", 0.05)

    async def ask() -> None:
        orders = ordering.ServerOrders("tcp://host:1", Silent())
        with pytest.raises(TransportError, match="has not answered"):
            await orders.drain()
        orders.answered(Draining())  # too late

    anyio.run(ask)


@pytest.mark.parametrize("line", [b"no message\n", encoded(Accepted()), b"a" * (MAX_LINE_BYTES + 1)], ids=range(3))
def test_a_server_obeys_nothing_else(line: bytes, tmp_path: Path) -> None:
    """It leaves, and comes back."""
    key_in(tmp_path / "key", makes=True)
    with socket.create_server(("127.0.0.1", 0)) as directory:
        address = f"tcp://127.0.0.1:{directory.getsockname()[1]}/lab"
        announcement = Announcements().open(
            ServeOptions(directory=DirectoryOptions(address, str(tmp_path / "key"))), Idle())
        assert announcement is not None
        announcement.start()
        try:
            for _ in range(2):
                with directory.accept()[0] as server:
                    server.settimeout(20)
                    lines = server.makefile("rb")
                    assert json.loads(lines.readline())["type"] == "join"
                    server.sendall(encoded(Accepted()) + line)
                    assert [json.loads(each)["type"] for each in lines] == ["load"]
        finally:
            announcement.stop()

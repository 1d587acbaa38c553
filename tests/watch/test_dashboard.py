"""The page that shows a server live: who sees what, who may do what, and what it makes of malformed requests."""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import attrs
import pytest
import torch
from support.pages.chromium import browser
from support.servers.serving import Serving

import djinn
from djinn.errors import ConfigurationError, DjinnError, RefusedError, SessionTerminatedError
from djinn_conformance.certificates import certificates
from djinn_plugins.server.kinds.metrics import Amounts, Counts, TenantTotals
from djinn_plugins.server.options import DashboardOptions, ServeOptions, TlsOptions
from djinn_plugins.server.tokens.tokens import TokenFile
from djinn_plugins.watch.dashboard.model import ServerModel
from djinn_plugins.watch.dashboard.output import Dashboards

TIMEOUT_S = 60.0


@attrs.define
class Reader:
    """Asks a dashboard as a browser does."""

    url: str
    authority: str = ""

    def ask(self, path: str, secret: str = "", *, body: Any = None, **headers: str) -> tuple[int, Any]:
        parts = urlsplit(self.url)
        if self.authority:
            context = ssl.create_default_context(cafile=self.authority)
            made: Any = http.client.HTTPSConnection(parts.hostname, parts.port, timeout=TIMEOUT_S, context=context)
        else:
            made = http.client.HTTPConnection(parts.hostname, parts.port, timeout=TIMEOUT_S)
        made.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body),
                     {**({"Authorization": f"Bearer {secret}"} if secret else {}), **headers})
        with made.getresponse() as answer:
            content = answer.read()
            self.headers = dict(answer.getheaders())
        made.close()
        is_json = self.headers["Content-Type"] == "application/json"
        return answer.status, json.loads(content) if is_json else content.decode()

    headers: dict[str, str] = attrs.field(factory=dict)

    def rows(self, secret: str, table: str) -> list[list[Any]]:
        status, state = self.ask("/state", secret)
        assert status == 200, state
        (found,) = [each for each in state["tables"] if each["id"] == table]
        return [row["cells"] for row in found["rows"]]


@attrs.define
class Served:
    """A server with tenants and a dashboard."""

    server: Serving
    reader: Reader
    tokens: dict[str, str]
    key: str


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("dashboard")
    file = TokenFile(folder / "tokens.json")
    tokens = {name: file.create(name) for name in ("ann", "bob")}
    with Serving(folder / "log", "--tokens", str(file.path), "--dashboard-port", "0", "--dashboard-key",
                 str(folder / "key"), "--control", str(folder / "s")) as server:
        (url,) = re.findall(r"dashboard on (\S+),", server.log.read_text())
        yield Served(server, Reader(url), tokens, (folder / "key").read_text().strip())


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_tenants_see_what_is_theirs_and_the_operator_sees_and_ends_sessions(served: Served) -> None:
    reader, ann, bob = served.reader, served.tokens["ann"], served.tokens["bob"]
    djinn.init(server=served.server.address, token=ann, log_level="ERROR")
    try:
        value = torch.ones(1000, device="remote_accelerator:0")
        assert value.sum().item() == 1000
        wait_until(lambda: bool(reader.rows(ann, "tenants")))  # workers report their counts once a second
        assert [row[0] for row in reader.rows(ann, "tenants")] == ["ann"]
        wait_until(lambda: bool(reader.rows(ann, "programs")))
        (program,) = reader.rows(ann, "programs")
        assert (program[0], program[3], "sum" in program[1]) == ("ann", 1, True), program
        assert program[4] == program[5] == program[6] > 0
        assert reader.rows(served.key, "programs") == [program]
        assert reader.rows(bob, "tenants") == reader.rows(bob, "sessions") == reader.rows(bob, "programs") == []
        (session,) = reader.rows(ann, "sessions")
        assert reader.rows(served.key, "sessions")[0][:2] == session[:2] == [session[0], "ann"]
        assert session[7] >= value.numel() * 4
        _, state = reader.ask("/state", ann)
        assert (state["is_operator"], state["problem"]) == (False, "")
        _, state = reader.ask("/state", served.key)
        assert state["is_operator"]
        (found,) = [table for table in state["tables"] if table["id"] == "sessions"]
        end = {"action": "end", "target": found["rows"][0]["action"]["target"]}
        for secret in ("", ann, bob):
            assert reader.ask("/act", secret, body=end)[0] == 401
        assert reader.rows(served.key, "sessions") != []
        assert reader.ask("/act", served.key, body=end)[0] == 200
        with pytest.raises(SessionTerminatedError):
            (value + 1).sum().item()
        wait_until(lambda: reader.rows(served.key, "sessions") == [])
    finally:
        djinn.shutdown()


@pytest.mark.parametrize("secret", ["", "another", "k" * 5000])
def test_strangers_see_the_page_and_nothing_on_it(secret: str, served: Served) -> None:
    for path in ("/", "/page.js", "/page.css"):
        assert served.reader.ask(path)[0] == 200
        assert "default-src 'none'" in served.reader.headers["Content-Security-Policy"]
    status, answer = served.reader.ask("/state", secret)
    assert (status, set(answer)) == (401, {"problem", "hint"})
    assert served.reader.ask("/act", secret, body={"action": "drain"})[0] == 401


def test_a_page_that_leads_a_foreign_name_to_this_machine_reads_nothing(served: Served) -> None:
    for host in ("evil.example", "evil.example:80", ""):
        assert served.reader.ask("/state", served.key, Host=host)[0] == 421
    for host in ("localhost", "127.0.0.1:1", "[::1]:1"):
        assert served.reader.ask("/state", served.key, Host=host)[0] == 200


@pytest.mark.parametrize(("body", "status"), [
    ({"action": "explode"}, 400), ({}, 400), ([], 400), ("drain", 400), ({"action": 1}, 400),
    ({"action": "end", "target": "nobody"}, 400), ({"action": "end", "target": "x" * 5000}, 413)])
def test_commands_that_are_none_do_nothing(body: Any, status: int, served: Served) -> None:
    assert served.reader.ask("/act", served.key, body=body)[0] == status
    assert served.reader.ask("/state", served.key)[0] == 200


@pytest.mark.parametrize("data", [
    b"\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"\x16\x03\x01\x02\x00", b"GET /" + b"a" * 30000,
    b"POST /act HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n"], ids=range(5))
def test_malformed_requests_end_their_connection_and_no_other(data: bytes, served: Served) -> None:
    parts = urlsplit(served.reader.url)
    with socket.create_connection((str(parts.hostname), parts.port or 0), timeout=TIMEOUT_S) as client:
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        assert not client.recv(1)
    assert served.reader.ask("/nowhere")[0] == served.reader.ask("/act")[0] == 404
    assert served.reader.ask("/state", served.key)[0] == 200


def test_a_browser_shows_it_live(served: Served, tmp_path: Path) -> None:
    with browser(tmp_path / "profile") as page:
        page.call("Page.navigate", url=served.reader.url)
        page._until_loaded(served.reader.url)
        wait_until(lambda: not page.value("document.getElementById('enter').hidden"))
        page.point_at("#secret", click=True)
        page.type(served.key)
        page.press("Enter")
        wait_until(lambda: page.texts("#tenants th")[:1] == ["tenant"])
        djinn.init(server=served.server.address, token=served.tokens["bob"], log_level="ERROR")
        try:
            torch.ones(2, device="remote_accelerator:0").sum().item()
            wait_until(lambda: "bob" in page.texts("#sessions td"))
            wait_until(lambda: "bob" in page.texts("#programs td"))
            assert page.texts("#sessions td button") == ["End"]
            page.value("document.querySelector('#sessions td button').focus()")
            page.requests.clear()
            wait_until(lambda: page.value("document.activeElement.textContent") == "End" and len(page.requests) > 2)
            page.value("window.confirm = () => true; document.querySelector('#sessions td button').click()")
            wait_until(lambda: page.texts("#said")[0].endswith("has ended."))
        finally:
            djinn.shutdown()
        wait_until(lambda: "bob" not in page.texts("#sessions td"))
        assert page.texts("figcaption")[0].startswith("Requests")
        assert all("401" in problem for problem in page.problems)


@attrs.define
class FakeServer:
    """The statistics of a server that does not exist."""

    labels: dict[str, TenantTotals] = attrs.field(factory=dict)
    token: str = ""
    version: str = "0"
    address: str = "tcp://127.0.0.1:7777"

    def totals(self) -> dict[str, TenantTotals]:
        return self.labels

    def gateway(self) -> Counts:
        return Counts()

    def why_not_ready(self) -> str:
        return "It drains."

    def models(self) -> list[Any]:
        return []

    def tenant_of(self, token: str) -> str:
        if token != self.token:
            raise RefusedError("The token is wrong.")
        return ""

    def operate(self, command: str, arguments: Any) -> Any:
        raise ConfigurationError("There is no socket.")


def test_an_encrypted_page_is_read_with_its_certificate_only(tmp_path: Path) -> None:
    made = certificates()
    options = ServeOptions(tls=TlsOptions(cert=made.server), dashboard=DashboardOptions(0, key=str(tmp_path / "key")))
    output: Any = Dashboards().open(options, FakeServer())
    output.start()
    try:
        assert output.page.startswith("https://127.0.0.1:")
        status, state = Reader(output.page, made.authority).ask("/state")
        assert (status, state["problem"], state["is_operator"]) == (200, "It drains.", False)
        with pytest.raises((http.client.HTTPException, OSError)):
            Reader(output.page.replace("https", "http")).ask("/state")
    finally:
        output.stop()


@pytest.mark.parametrize(("options", "token"), [
    (ServeOptions(dashboard=DashboardOptions(0, "0.0.0.0")), "secret"),
    (ServeOptions(tls=TlsOptions(cert="server.pem"), dashboard=DashboardOptions(0, "0.0.0.0")), "")])
def test_other_machines_are_not_let_in_without_a_token_and_encryption(options: ServeOptions, token: str) -> None:
    with pytest.raises(ConfigurationError, match="Other machines could reach"):
        Dashboards().open(options, FakeServer(token=token))


def test_charts_show_the_rates_between_samples_of_those_that_are_seen() -> None:
    clock = [0.0]
    server = FakeServer()
    model = ServerModel(server, "the operator's key", lambda: clock[0])
    for requests in (10, 30, 5):  # workers that were replaced keep their counts; a restart of all begins anew
        server.labels = {
            "": TenantTotals(Counts({"ok": requests}, device_ns=requests * 10**8), Amounts(sessions=2, held_bytes=7)),
            "bob": TenantTotals(Counts({"ok": 1000 * requests}), Amounts(sessions=1, held_bytes=3))}
        model.sample()
        clock[0] += 2.0
    own = {chart["title"]: chart["values"] for chart in model.state("")["charts"]}
    assert (own["Requests"], own["Device busy"], own["Sessions"]) == ([10.0, 0.0], [1.0, 0.0], [2, 2, 2])
    everything = {chart["title"]: chart["values"] for chart in model.state("the operator's key")["charts"]}
    assert (everything["Requests"], everything["Held by sessions"]) == ([10010.0, 0.0], [10, 10, 10])
    with pytest.raises(DjinnError, match="no command"):
        model.act("the operator's key", "explode", "")


class OpenServer(FakeServer):
    """A server that needs no token; any is right."""

    def tenant_of(self, token: str) -> str:
        return ""


def test_an_open_server_takes_the_key_and_no_mistyped_one_and_its_page_stands_hostile_names(tmp_path: Path) -> None:
    hostile = "<img src=x onerror=\"document.title='run'\">"
    server = OpenServer({name: TenantTotals(amounts=Amounts(held_bytes=held), limit_bytes=limit)
                         for name, held, limit in (("ann", 2, 0), (hostile, 9, 7), ("bob", 5, 7))})
    output: Any = Dashboards().open(ServeOptions(dashboard=DashboardOptions(0, key=str(tmp_path / "key"))), server)
    output.start()
    with browser(tmp_path / "profile") as page:
        try:
            page.call("Page.navigate", url=output.page)
            for key in ("mistyped", (tmp_path / "key").read_text().strip()):
                wait_until(lambda: page.value("!!document.querySelector('#enter:not([hidden]), #leave:not([hidden])')"))
                page.value("if (document.querySelector('#enter').hidden) document.querySelector('#leave').click()")
                page.type(key)
                page.press("Enter")
                if key == "mistyped":
                    wait_until(lambda: page.texts("#problem")[0].startswith("This is not the operator's key."))
                    assert page.texts("td") == []
            wait_until(lambda: page.texts("#tenants td:first-child") == [hostile, "ann", "bob"])
            assert page.texts("#tenants td:nth-child(6)") == ["7 B", "\u2013", "7 B"]
            for order in ([hostile, "bob", "ann"], ["ann", "bob", hostile], [hostile, "ann", "bob"]):
                page.point_at("#tenants th:nth-child(5) button", click=True)
                wait_until(lambda order=order: page.texts("#tenants td:first-child") == order)  # type: ignore[misc]
            assert page.value("document.title").startswith("djinn")
        finally:
            output.stop()
        wait_until(lambda: "does not answer" in page.texts("#problem")[0])
        assert page.value("document.querySelector('main.old') !== null")


def test_the_operator_drains_the_server(tmp_path: Path) -> None:
    with Serving(tmp_path / "log", "--dashboard-port", "0", "--dashboard-key", str(tmp_path / "key"), "--control",
                 str(tmp_path / "s")) as server:
        (url,) = re.findall(r"dashboard on (\S+),", server.log.read_text())
        assert Reader(url).ask("/act", (tmp_path / "key").read_text().strip(), body={"action": "drain"})[0] == 200
        assert server.process.wait(TIMEOUT_S) == 0

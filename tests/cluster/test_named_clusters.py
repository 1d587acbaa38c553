"""Named sessions of a cluster: the directory leads the next process of the tenant to the server with the values."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from support.processes.warm import WarmPython, clean_environment, run_python

import djinn
from djinn.errors import RefusedError
from djinn_plugins.cluster.asking import ask
from djinn_plugins.cluster.directory.choosing import ServerListing
from djinn_plugins.cluster.directory.naming import LED_S, RETURNING_S, SETTLED_S
from djinn_plugins.cluster.messages import ListServers, LoadReport, Resolve
from djinn_plugins.server.tenants import session_digest
from djinn_plugins.server.tokens.tokens import TokenFile

DEVICE = "remote_accelerator:0"
MINE, THEIRS = (session_digest(tenant, "lab") for tenant in ("alice", "bob"))
LOOK = """
import sys, djinn
session = djinn.init(cluster=sys.argv[1], name="lab")
print(session.backend.address, djinn.kept["x"].tolist() if "x" in djinn.kept else "new")
djinn.shutdown()
"""


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Cluster:
    """Two servers as their directory sees them, at a time that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.listing = ServerListing(lambda: self.now)
        self.members = [self.listing.join(f"tcp://host:{port}") for port in (1, 2)]
        self.first, self.second = (member.address for member in self.members)
        for member in self.members:
            self.listing.report(member, LoadReport())

    def led(self, digest: str = MINE, failed: str = "") -> list[str]:
        wanted = Resolve("", session="lab", failed=failed)
        return [server.address for server in self.listing.choose(wanted, digest)]

    def report(self, *named: str, problem: str = "") -> None:
        self.listing.report(self.members[0], LoadReport(problem, sessions=9, named=named))


def test_a_session_is_at_the_server_where_a_client_was_led_before_that_reports_it() -> None:
    cluster = Cluster()
    assert cluster.led()[0] == cluster.first
    cluster.report()
    assert (cluster.led(), cluster.led(THEIRS)[0]) == ([cluster.first], cluster.second)
    assert cluster.led(failed=cluster.first)[0] == cluster.second, "it was not begun where no server answers"
    assert cluster.led() == [cluster.second]
    cluster.now = LED_S
    cluster.report()
    cluster.listing.report(cluster.members[1], LoadReport(sessions=10))
    assert cluster.led()[0] == cluster.first, "nobody has opened it"


def test_a_session_begins_nowhere_else_as_long_as_its_server_may_come_back() -> None:
    cluster = Cluster()
    assert cluster.listing.names.unsettled_s(MINE) == SETTLED_S, "the directory has just begun"
    cluster.report(MINE)
    assert cluster.listing.names.unsettled_s(MINE) == 0
    assert (cluster.led(), cluster.led(THEIRS)[0]) == ([cluster.first], cluster.second)
    with pytest.raises(RefusedError, match=r"host:1, which has the session 'lab', does not answer"):
        cluster.led(failed=cluster.first)
    cluster.report(MINE, problem="it drains")
    with pytest.raises(RefusedError, match=r"host:1 has the session 'lab', and no session can begin there: it drains"):
        cluster.led()
    cluster.listing.leave(cluster.members[0])
    with pytest.raises(RefusedError, match=r"host:1, which has the session 'lab', has left the cluster"):
        cluster.led()
    assert cluster.led(THEIRS) == [cluster.second]
    cluster.members[0] = cluster.listing.join(cluster.first)
    cluster.report(MINE)
    assert cluster.led() == [cluster.first]
    cluster.now = max(RETURNING_S, LED_S, SETTLED_S)
    assert cluster.listing.names.unsettled_s("another") == 0
    cluster.listing.leave(cluster.members[0])
    cluster.now += RETURNING_S
    cluster.listing.report(cluster.members[1], LoadReport())
    assert cluster.led() == [cluster.second], "a new session"
    cluster.members[0] = cluster.listing.join(cluster.first)
    cluster.report()
    cluster.listing.leave(cluster.members[0])
    assert cluster.led() == [cluster.second], "the first server had no session"


def test_the_session_that_began_later_has_the_name_in_whichever_order_servers_report() -> None:
    cluster = Cluster()
    old, new, names = cluster.first, cluster.second, cluster.listing.names
    members = {member.address: member for member in cluster.members}
    for addresses in ((old, new), (new, old)):
        for address in addresses:
            cluster.listing.leave(members[address])
            members[address] = cluster.listing.join(address)
            began_s = {old: 100, new: 200}[address]
            cluster.listing.report(members[address], LoadReport(named=(MINE,), began=(began_s,)))
        assert cluster.led() == [new]
        assert (list(names.superseded(old)), list(names.superseded(new))) == ([(MINE, new)], [])
    for address in (new, old):
        cluster.listing.leave(members[address])
        with pytest.raises(RefusedError, match=f"{new}, which has the session 'lab', has left"):
            cluster.led()


def test_a_server_that_comes_back_late_does_not_have_a_session_that_is_about_to_begin_elsewhere() -> None:
    cluster = Cluster()
    cluster.report(MINE)
    cluster.listing.leave(cluster.members[0])
    cluster.now = RETURNING_S
    cluster.listing.report(cluster.members[1], LoadReport())
    assert cluster.led() == [cluster.second]
    cluster.members[0] = cluster.listing.join(cluster.first)
    cluster.report(MINE)
    assert cluster.led() == [cluster.second], "it has not been reported yet"
    assert cluster.led(failed=cluster.second) == [cluster.first], "it was not begun where no server answers"


@attrs.frozen
class Lab:
    """A directory and two servers in other processes."""

    directory: str
    key: str
    tokens: dict[str, str]
    servers: dict[str, Any]
    options: tuple[str, ...]

    def sessions(self) -> dict[str, int]:
        """Number of sessions by server, as the directory knows it."""
        listed = ask(self.directory, lambda _: ListServers(self.key))
        return {server.address: server.load.sessions for server in listed if server.load is not None}

    def problems(self) -> dict[str, str]:
        """Why sessions cannot begin, by server, as the directory knows it."""
        listed = ask(self.directory, lambda _: ListServers(self.key))
        return {server.address: server.load.problem for server in listed if server.load is not None}

    def looked(self, tenant: str) -> tuple[str, str]:
        """What another process of a tenant finds, and where."""
        done = run_python(LOOK, self.directory, has_djinn=True, DJINN_TOKEN=self.tokens[tenant])
        assert done.returncode == 0, done.stderr
        address, _, found = done.stdout.strip().partition(" ")
        return address, found


@pytest.fixture
def lab(tmp_path: Path, start_server: Any, request: pytest.FixtureRequest) -> Iterator[Lab]:
    """The parameter is run by the directory before it begins."""
    tokens, key = TokenFile(tmp_path / "tokens.json"), tmp_path / "key"
    given = {name: tokens.create(name) for name in ("alice", "bob")}
    command = ["directory", "--name", "lab", "--key", str(key), "--tokens", str(tokens.path)]
    program = f"{getattr(request, 'param', '')}from djinn_plugins.cli.app import main; main()"
    with WarmPython(program, command, environment=clean_environment(),
                    log=tmp_path / "directory.log", has_djinn=True) as process:
        directory = process.stdout.readline().split()[-1]
        options = ("--directory", directory, "--directory-key", str(key), "--tokens", str(tokens.path), "--sandbox",
                   "auto")
        servers = [start_server(*options) for _ in range(2)]
        found = Lab(directory, key.read_text().strip(), given, {server.address: server for server in servers}, options)
        until(lambda: len(found.sessions()) == 2)
        yield found
        djinn.shutdown()
        process.terminate()
        assert process.wait(20) == 0


def test_another_process_comes_back_to_the_server_that_keeps_the_values(lab: Lab, start_server: Any) -> None:
    alice = {"cluster": lab.directory, "token": lab.tokens["alice"]}
    home = djinn.init(name="lab", **alice).backend.address
    djinn.kept["x"] = torch.full((2,), 7.0, device=DEVICE)
    (other,) = lab.servers.keys() - {home}
    djinn.shutdown()
    # So that the other server is less loaded.
    djinn.init(server=home, token=lab.tokens["bob"])
    until(lambda: lab.sessions() == {home: 1, other: 0})
    assert lab.looked("alice") == (home, "[7.0, 7.0]")
    assert lab.looked("bob") == (other, "new"), "another tenant's session of the same name"
    djinn.shutdown()

    lab.servers[home].process.kill()
    lab.servers[home].process.wait(20)
    until(lambda: lab.sessions().keys() == {other})
    with pytest.raises(RefusedError, match=f"{home}, which has the session 'lab', has left the cluster"):
        djinn.init(name="lab", **alice)
    start_server("--port", home.rpartition(":")[2], *lab.options)
    until(lambda: lab.sessions().keys() == lab.servers.keys())
    djinn.init(name="lab", **alice)
    assert not djinn.kept, "as on a lone server that was started again"


SHORT = """
from djinn_plugins.cluster.directory import endpoint, naming
endpoint.STALE_S, naming.RETURNING_S = 4.0, 1.0
"""


@pytest.mark.parametrize("lab", [SHORT], indirect=True)
def test_a_server_that_comes_back_late_has_the_session_under_another_name(lab: Lab) -> None:
    def kept(value: float) -> str:
        address: str = djinn.init(name="lab", cluster=lab.directory, token=lab.tokens["alice"]).backend.address
        djinn.kept["x"] = torch.full((2,), value, device=DEVICE)
        djinn.shutdown()
        return address

    old = kept(1.0)
    pid = lab.servers[old].process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: old not in lab.sessions())
        time.sleep(1.0)
        new = kept(2.0)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert new != old
    # Both have reported since: the new one's worker serves.
    until(lambda: lab.problems() == {old: "", new: ""})
    assert lab.looked("alice") == (new, "[2.0, 2.0]")
    log = lab.servers[old].log
    until(lambda: "lab~" in log.read_text())
    (name,) = re.findall(r"the named session lab is now (lab~\S+): tcp://\S+ has a later one", log.read_text())
    djinn.init(name=name, server=old, token=lab.tokens["alice"])
    assert djinn.kept["x"].tolist() == [1.0, 1.0]

"""``djinn cluster --engine ray`` on two nodes of Ray: sessions outlive a gateway, an actor and a node."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.gpt2 import PROMPT, generated, gpt2
from support.servers.clusters import MODEL, TIMEOUT_S, TOKENS, Clusters, Killing, wait_until
from support.servers.ray_nodes import RayNodes
from support.servers.serving import has_ended, workers_of

import djinn

pytest.importorskip("ray", reason="needs Ray: python3 -m pip install -c constraints.txt ray")

pytestmark = pytest.mark.timeout(1200)
UP_S = 400.0
UP = ("cluster", "up", "--engine", "ray", "--servers", "2", "--name", "lab", "--dashboard-port", "0", "--", "--threads",
      "1")
KILLED = ("a node", "a gateway", "an actor")
"""The node comes first: at the beginning, Ray spreads the programs over both."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with RayNodes() as made:
        yield made


@pytest.fixture(scope="module")
def clusters(nodes: RayNodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clusters]:
    with Clusters(tmp_path_factory.mktemp("ray"), **nodes.environment).ended() as made:
        while True:
            done = made.run(*UP, timeout_s=UP_S)
            assert done.returncode == 0, done.stderr
            if any(keeper_of(made, name) in nodes.processes(1) for name in ("server-0", "server-1")):
                break
            # Ray's nodes did not know of each other yet.
            made.run("cluster", "down", "--name", "lab", "--drain-s", "0")
        yield made


def keeper_of(clusters: Clusters, program: str) -> int:
    """The process of an actor."""
    record = json.loads((clusters.folder / "lab" / "engine" / program / "programs.json").read_bytes())
    return int(record["pid"])


def serving(clusters: Clusters) -> dict[str, dict[str, Any]]:
    found = {program["name"]: program for program in clusters.programs()}
    return found if all(program["state"] == "serving" for program in found.values()) else {}


def session_on(clusters: Clusters, programs: dict[str, dict[str, Any]], server: str) -> Any:
    """Begin sessions until one is on that server: the directory prefers the other one the next time."""
    while True:
        session = djinn.init(cluster=f"file:{clusters.folder / 'lab' / 'address'}", recovery="replay",
                             recovery_timeout_s=TIMEOUT_S, log_level="ERROR")
        if session.backend.address == programs[server]["address"]:
            return session
        djinn.shutdown()


@pytest.mark.parametrize("killed", KILLED)
def test_a_session_outlives(killed: str, clusters: Clusters, nodes: RayNodes) -> None:
    before = serving(clusters)
    assert list(before) == ["directory", "server-0", "server-1"]
    node = nodes.processes(1) if killed == "a node" else []
    server = next(name for name in ("server-0", "server-1") if not node or keeper_of(clusters, name) in node)
    pid = before[server]["pid"]
    pids = {"a gateway": [pid, *workers_of(pid)], "an actor": [keeper_of(clusters, server)], "a node": node}[killed]

    model = gpt2(**MODEL)
    wanted = generated(model, PROMPT, TOKENS)
    session_on(clusters, before, server)
    try:
        tokens = generated(model.to("remote_accelerator:0"), PROMPT.to("remote_accelerator:0"), TOKENS,
                           streamer=Killing(pids))
    finally:
        djinn.shutdown()
    assert torch.equal(tokens, wanted)
    wait_until(lambda: (after := serving(clusters)) and after[server]["restarts"] > before[server]["restarts"],
               "it is not back")
    after = serving(clusters)
    assert after[server]["pid"] != pid
    wait_until(lambda: has_ended(pid), "the old server is still there")
    assert clusters.run("cluster", "logs", server, "--name", "lab").stdout.count("accepting on") >= 2


def test_a_server_that_the_page_drains_comes_back(clusters: Clusters) -> None:
    before = serving(clusters)["server-1"]
    log = clusters.run("cluster", "logs", "directory", "--name", "lab").stdout
    page = re.findall(r"dashboard on (http:\S+)/,", log)
    assert "takes no new sessions" in clusters.drain(page[-1], before["address"])
    wait_until(lambda: (after := serving(clusters)) and after["server-1"]["restarts"] == before["restarts"] + 1,
               "it is not back")


def test_nothing_is_left_at_the_end(clusters: Clusters, nodes: RayNodes) -> None:
    programs = serving(clusters)
    pids = [pid for name, program in programs.items()
            for pid in (keeper_of(clusters, name), program["pid"], *workers_of(program["pid"]))]
    refused = clusters.run(*UP)
    assert (refused.returncode, "running already" in refused.stderr) == (2, True), refused
    down = clusters.run("cluster", "down", "--name", "lab", "--drain-s", "0")
    assert down.returncode == 0, down.stderr
    assert [pid for pid in pids if not has_ended(pid)] == []
    assert list(clusters.folder.iterdir()) == []
    for program in programs.values():
        host, _, port = program["address"].removesuffix("/lab").removeprefix("tcp://").rpartition(":")
        with socket.socket() as client:
            assert client.connect_ex((host, int(port))) != 0
    assert not Path(nodes.home / ".ray").exists()

"""``djinn cluster``: servers that one command starts, that are started again when they die, and that end with it."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes.warm import run_djinn
from support.servers.serving import children_of, workers_of

import djinn

TIMEOUT_S = 120.0
SERVERS = ("cluster", "up", "--servers", "2", "--name", "lab", "--", "--threads", "1")


class Clusters:
    """The program ``djinn cluster``, with folders of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "djinn" / "clusters"
        self._state = str(folder)

    def run(self, *words: str) -> Any:
        return run_djinn(*words, XDG_STATE_HOME=self._state, OMP_NUM_THREADS="1")

    def programs(self) -> list[dict[str, Any]]:
        done = self.run("cluster", "status", "--json")
        assert done.returncode == 0, done.stderr
        return [program for cluster in json.loads(done.stdout) for program in cluster["programs"]]

    def processes(self, name: str = "lab") -> list[int]:
        """All processes of a cluster, the keeper first."""
        keeper = json.loads((self.folder / name / "engine" / "programs.json").read_bytes())["pid"]
        gateways = children_of(keeper)
        return [keeper, *gateways, *(worker for gateway in gateways for worker in workers_of(gateway))]


@pytest.fixture
def clusters(tmp_path: Path) -> Iterator[Clusters]:
    made = Clusters(tmp_path)
    yield made
    for path in made.folder.glob("*/cluster.json"):
        made.run("cluster", "down", "--name", path.parent.name, "--drain-s", "0")


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until(is_so: Any, what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def test_servers_start_are_started_again_and_leave_nothing_behind(clusters: Clusters) -> None:
    done = clusters.run(*SERVERS)
    assert done.returncode == 0, done.stderr
    programs = clusters.programs()
    assert [(program["name"], program["state"], program["restarts"]) for program in programs] == [
        ("server-0", "serving", 0), ("server-1", "serving", 0)]
    assert set(done.stdout.splitlines()) == {
        f"djinn cluster lab: {program['name']} serving {program['address']}" for program in programs}
    addresses = [program["address"] for program in programs]

    djinn.init(servers=addresses, recovery="replay", recovery_timeout_s=TIMEOUT_S, log_level="ERROR")
    try:
        values = [torch.randn(8, device=f"remote_accelerator:{index}") for index in (0, 1)]
        wanted = [value.cpu() * 2 for value in values]
        workers = workers_of(programs[0]["pid"])
        os.kill(programs[0]["pid"], signal.SIGKILL)
        wait_until(lambda: all(map(has_ended, workers)), "its workers are still there")
        # At the same port, the session finds another process, and there the same values.
        assert all(torch.equal((value * 2).cpu(), want) for value, want in zip(values, wanted, strict=True))
        assert djinn.stats()["recoveries"] == 1
    finally:
        djinn.shutdown()
    first, second = clusters.programs()
    assert (first["address"], first["restarts"], second) == (addresses[0], 1, programs[1])
    assert first["pid"] != programs[0]["pid"]
    assert "signal 9" in first["problem"]
    logs = clusters.run("cluster", "logs", "server-0", "--name", "lab")
    assert logs.stdout.count("accepting on") == 2, logs
    refused = clusters.run(*SERVERS)
    assert (refused.returncode, "running already" in refused.stderr) == (2, True), refused
    assert clusters.programs() == [first, second]

    processes = clusters.processes()
    assert len(processes) >= 5
    down = clusters.run("cluster", "down", "--name", "lab", "--drain-s", "0")
    assert down.returncode == 0, down.stderr
    assert [pid for pid in processes if not has_ended(pid)] == []
    assert list(clusters.folder.iterdir()) == []
    for address in addresses:
        with socket.socket() as client:
            assert client.connect_ex(("127.0.0.1", int(address.rpartition(":")[2]))) != 0
    gone = clusters.run("cluster", "down", "--name", "lab")
    assert (gone.returncode, "no cluster 'lab'" in gone.stderr) == (2, True), gone


def test_servers_end_with_the_process_that_keeps_them(clusters: Clusters) -> None:
    assert clusters.run("cluster", "up", "--name", "lab", "--", "--threads", "1").returncode == 0
    keeper, *others = clusters.processes()
    os.kill(keeper, signal.SIGKILL)
    wait_until(lambda: all(map(has_ended, [keeper, *others])), "they are still there")
    assert clusters.programs() == []
    assert clusters.run("cluster", "down", "--name", "lab").returncode == 0
    assert list(clusters.folder.iterdir()) == []


def test_a_server_that_cannot_start_is_reported_and_nothing_stays(clusters: Clusters) -> None:
    done = clusters.run("cluster", "up", "--name", "lab", "--", "--no-such-option")
    assert (done.returncode, "No such option: --no-such-option" in done.stderr) == (1, True), done
    assert list(clusters.folder.iterdir()) == []

"""``djinn cluster``: servers that one command starts, that are started again when they die, and that end with it."""

from __future__ import annotations

import copy
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from support.models.gpt2 import PROMPT, generated, gpt2
from support.servers.clusters import MODEL, TIMEOUT_S, TOKENS, Clusters, Killing, wait_until
from support.servers.serving import has_ended, workers_of

import djinn
from djinn_plugins.cluster import keeping
from djinn_plugins.cluster.kinds import ClusterSpec, EngineProgram
from djinn_plugins.cluster.local.engine import LocalEngines
from djinn_plugins.cluster.records import Records

DRAINS = """
import os, pathlib, signal, sys
def heed(*_):
    signal.signal(signal.SIGTERM, lambda *_: (folder.joinpath("ended").write_text("at the second"), os._exit(0)))
folder = pathlib.Path(os.environ["DJINN_SAMPLE"])
signal.signal(signal.SIGTERM, heed)
print("serving here", flush=True)
while True:
    signal.pause()
"""
NOTES = """
import os, pathlib, signal
with pathlib.Path(os.environ["DJINN_SAMPLE"], "pids").open("a") as file:
    file.write(f"{os.getpid()}\\n")
print("serving here", flush=True)
signal.pause()
"""
SERVERS = ("cluster", "up", "--servers", "2", "--name", "lab", "--", "--threads", "1", "--metrics-port", "0")


@pytest.fixture
def clusters(tmp_path: Path) -> Iterator[Clusters]:
    with Clusters(tmp_path).ended() as made:
        yield made


def survived(model: Any, wanted: torch.Tensor, by_address: dict[str, Any], *also: int) -> tuple[str, str]:
    """Generate while the server of the session is killed, and other processes; return its servers before and after."""
    session = djinn.init(cluster=next(iter(by_address)), recovery="replay", recovery_timeout_s=TIMEOUT_S,
                         log_level="ERROR")
    try:
        before = session.backend.address
        pid = by_address[before]["pid"]
        tokens = generated(copy.deepcopy(model).to("remote_accelerator:0"), PROMPT.to("remote_accelerator:0"), TOKENS,
                           streamer=Killing([*also, pid, *workers_of(pid)]))
        assert djinn.stats()["recoveries"] == 1
        assert torch.equal(tokens, wanted)
        return before, session.backend.address
    finally:
        djinn.shutdown()


def test_a_session_outlives_its_server_which_comes_back_and_nothing_is_left_at_the_end(clusters: Clusters) -> None:
    done = clusters.run(*SERVERS)
    assert done.returncode == 0, done.stderr
    programs = clusters.programs()
    assert [(program["name"], program["state"], program["restarts"]) for program in programs] == [
        ("directory", "serving", 0), ("server-0", "serving", 0), ("server-1", "serving", 0)]
    assert set(done.stdout.splitlines()) == {
        f"djinn cluster lab: {program['name']} serving {program['address']}" for program in programs}
    by_address = {program["address"]: program for program in programs}
    found = clusters.run("status", "--json", DJINN_CLUSTER=programs[0]["address"])
    assert found.returncode == 0, found
    assert json.loads(found.stdout)["server"]["address"] in list(by_address)[1:]
    found = clusters.run("doctor", "--json", DJINN_CLUSTER=programs[0]["address"])
    checks = {check["name"]: check for check in json.loads(found.stdout)["checks"]}
    assert checks["server"]["ok"], found
    assert checks["cluster"]["found"].removeprefix("its directory leads to ") in list(by_address)[1:]
    found = clusters.run("models", DJINN_CLUSTER=programs[0]["address"])
    assert (found.returncode, "This server has no models." in found.stderr) == (2, True), found
    found = clusters.run("top", "--once", "--interval-s", "0.1", DJINN_CLUSTER=programs[0]["address"])
    assert (found.returncode, found.stdout.startswith("tenant\tsessions\t")) == (0, True), found

    model = gpt2(**MODEL)
    wanted = generated(model, PROMPT, TOKENS)
    first, second = survived(model, wanted, by_address)
    pid = by_address[first]["pid"]
    assert {first, second} == {program["address"] for program in programs[1:]}
    wait_until(lambda: all(program["state"] == "serving" for program in clusters.programs()), "it is not back")
    again = {program["address"]: program for program in clusters.programs()}
    assert again.keys() == by_address.keys()
    assert (again[first]["restarts"], again[second]) == (1, by_address[second])
    assert again[first]["pid"] != pid
    assert "signal 9" in again[first]["problem"]
    logs = clusters.run("cluster", "logs", again[first]["name"], "--name", "lab")
    assert logs.stdout.count("accepting on") == 2, logs
    refused = clusters.run(*SERVERS)
    assert (refused.returncode, "running already" in refused.stderr) == (2, True), refused
    assert clusters.programs() == list(again.values())

    directory = again[programs[0]["address"]]
    first, second = survived(model, wanted, again, directory["pid"])
    assert {first, second} == {program["address"] for program in programs[1:]}
    wait_until(lambda: all(program["state"] == "serving" for program in clusters.programs()), "they are not back")
    last = {program["address"]: program for program in clusters.programs()}
    assert last.keys() == by_address.keys()
    assert last[directory["address"]]["restarts"] == 1

    processes = clusters.processes()
    assert len(processes) >= 6
    down = clusters.run("cluster", "down", "--name", "lab", "--drain-s", "0")
    assert down.returncode == 0, down.stderr
    assert [pid for pid in processes if not has_ended(pid)] == []
    assert list(clusters.folder.iterdir()) == []
    for address in by_address:
        with socket.socket() as client:
            assert client.connect_ex(("127.0.0.1", int(address.removesuffix("/lab").rpartition(":")[2]))) != 0
    gone = clusters.run("cluster", "down", "--name", "lab")
    assert (gone.returncode, "no cluster 'lab'" in gone.stderr) == (2, True), gone


def test_servers_end_with_the_process_that_keeps_them(clusters: Clusters) -> None:
    assert clusters.run("cluster", "up", "--name", "lab").returncode == 0
    keeper, *others = clusters.processes()
    os.kill(keeper, signal.SIGKILL)
    wait_until(lambda: all(map(has_ended, [keeper, *others])), "they are still there")
    assert clusters.programs() == []
    assert clusters.run("cluster", "down", "--name", "lab").returncode == 0
    assert list(clusters.folder.iterdir()) == []


@pytest.mark.parametrize("loses_keeper", [False, True])
def test_programs_with_clients_that_do_not_finish_end_at_the_second_signal(loses_keeper: bool, tmp_path: Path) -> None:
    engine = LocalEngines().open(tmp_path)
    program = EngineProgram("server-0", (sys.executable, "-S", "-c", DRAINS), {"DJINN_SAMPLE": str(tmp_path)})
    engine.start(ClusterSpec("lab", (program,)))
    for (report,) in engine.watch():
        if report.state == "serving":
            break
    if loses_keeper:
        os.kill(json.loads((tmp_path / "programs.json").read_bytes())["pid"], signal.SIGKILL)
        wait_until(lambda: [each.state for each in engine.programs()] == ["stopping"], "its keeper is still there")
    engine.stop(0)
    assert has_ended(report.pid)
    assert [(tmp_path / "ended").read_text(), engine.programs()] == ["at the second", []]


def test_programs_are_kept_running_while_their_states_cannot_be_written(tmp_path: Path) -> None:
    engine = LocalEngines().open(tmp_path)
    program = EngineProgram("server-0", (sys.executable, "-S", "-c", NOTES), {"DJINN_SAMPLE": str(tmp_path)})
    pids = tmp_path / "pids"
    engine.start(ClusterSpec("lab", (program,)))
    try:
        wait_until(lambda: [report.state for report in engine.programs()] == ["serving"], "it does not serve")
        (tmp_path / "programs.new").mkdir()  # as a full disk, it lets no file be written
        os.kill(int(pids.read_text().split()[-1]), signal.SIGKILL)
        wait_until(lambda: len(pids.read_text().split()) == 2, "it was not started again")
        (tmp_path / "programs.new").rmdir()
        os.kill(int(pids.read_text().split()[-1]), signal.SIGKILL)
        wait_until(lambda: [(report.state, report.restarts) for report in engine.programs()] == [("serving", 2)],
                   "its state is not written")
    finally:
        engine.stop(0)
    assert all(has_ended(int(pid)) for pid in pids.read_text().split())


def test_a_program_that_ends_as_soon_as_it_serves_is_started_again_later_and_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "STEADY_S", 0.15)
    loading = "import time; time.sleep(0.2); print('tcp://here:1', flush=True)"
    kept = keeping.KeptPrograms(Records(tmp_path), ClusterSpec("lab", (EngineProgram("server-0", (
        sys.executable, "-S", "-c", loading), {}),)), {**os.environ}, None)
    record = kept._kept[0].record

    async def run() -> int:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kept.run)
            await anyio.sleep(2)
            while record.pid:  # noqa: ASYNC110  # nothing tells it
                await anyio.sleep(0.01)
            before = record.restarts
            kept.stop()
        return before

    before = anyio.run(run)
    assert 1 <= before <= 3, "without longer and longer pauses, it would be five or six times"
    assert record.restarts == before, "it was not started again after the request to stop"


def test_a_server_that_cannot_start_is_reported_and_nothing_stays(clusters: Clusters) -> None:
    done = clusters.run("cluster", "up", "--name", "lab", "--", "--no-such-option")
    assert (done.returncode, "No such option: --no-such-option" in done.stderr) == (1, True), done
    assert list(clusters.folder.iterdir()) == []

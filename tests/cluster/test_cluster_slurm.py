"""``djinn cluster up --engine slurm``, on stand-ins for Slurm's commands: jobs that are processes of this machine.

With ``DJINN_TEST_SLURM=1``, those tests that can use Slurm itself do so, too. It has one node, this machine, with two
GPUs, and this user is its operator. With ``cred_expire=20`` in ``AuthInfo``, jobs begin again sooner.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.gpt2 import PROMPT, generated, gpt2
from support.servers.clusters import MODEL, TIMEOUT_S, TOKENS, Clusters, Killing, wait_until, when
from support.servers.serving import has_ended, workers_of
from support.servers.slurm import SYSTEMS, Slurm, slurm_of
from support.servers.slurm_commands import ENDED

import djinn
from djinn.errors import ConfigurationError
from djinn_conformance.certificates import certificates
from djinn_plugins.cluster.kinds import ClusterSpec, Engine, EngineProgram, ProgramReport
from djinn_plugins.cluster.records import Records
from djinn_plugins.cluster.slurm.engine import SlurmEngines
from djinn_plugins.cluster.slurm.node import SPEC

AUTHORITY = certificates().authority
on_slurm_too = pytest.mark.parametrize("system", SYSTEMS)
SERVES = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
print(*map(os.environ.get, ("CUDA_VISIBLE_DEVICES", "DJINN_SAMPLE")), file=sys.stderr, flush=True)
print("serving tcp://here:1", flush=True)
while True:
    signal.pause()
"""


def program(name: str, gpus: int = 0, **variables: str) -> EngineProgram:
    return EngineProgram(name, (sys.executable, "-S", "-c", SERVES), variables, gpus)


def serves(report: ProgramReport) -> bool:
    return report.state == "serving"


def keeper_of(folder: Path) -> int:
    keeper = Records(folder / "engine" / "server-0").read()
    assert keeper is not None
    return keeper.pid


@pytest.fixture
def system() -> str:
    return "stand-in"


@pytest.fixture
def slurm(system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = slurm_of(system, tmp_path / "slurm")
    monkeypatch.setenv("PATH", made.path)
    return made


@pytest.fixture
def engine(slurm: Any, tmp_path: Path) -> Iterator[Engine]:
    made = SlurmEngines().open(tmp_path / "engine")
    yield made
    made.stop(0)
    assert set(slurm.states()) <= {"COMPLETED", "CANCELLED", "FAILED"}
    assert not slurm.has_refused
    assert list((tmp_path / "engine").iterdir()) == []


@pytest.fixture
def clusters(slurm: Any, tmp_path: Path) -> Iterator[Clusters]:
    with Clusters(tmp_path, PATH=slurm.path, DJINN_TLS_CA=AUTHORITY).ended() as made:
        yield made


@on_slurm_too
def test_a_session_outlives_its_server_which_its_job_starts_again(clusters: Clusters, slurm: Any) -> None:
    done = clusters.run("cluster", "up", "--engine", "slurm", "--name", "lab", "--dashboard-port", "0", "--",
                        "--threads", "1", "--tls-cert", certificates().server)
    assert done.returncode == 0, done.stderr
    (port,) = re.findall(r"dashboard on port (\d+)", done.stdout)
    directory, before = clusters.programs()
    assert [(each["name"], each["state"], each["restarts"]) for each in (directory, before)] == [
        ("directory", "serving", 0), ("server-0", "serving", 0)]
    assert slurm.names() == ["djinn-lab-directory", "djinn-lab-server-0"]
    address = clusters.folder / "lab" / "address"
    assert address.read_text().strip() == directory["address"]
    model = gpt2(**MODEL)
    wanted = generated(model, PROMPT, TOKENS)
    djinn.init(cluster=f"file:{address}", recovery="replay", recovery_timeout_s=TIMEOUT_S, tls_ca=AUTHORITY,
               log_level="ERROR")
    try:
        pids = [before["pid"], *workers_of(before["pid"])]
        tokens = generated(model.to("remote_accelerator:0"), PROMPT.to("remote_accelerator:0"), TOKENS,
                           streamer=Killing(pids))
        assert djinn.stats()["recoveries"] == 1
    finally:
        djinn.shutdown()
    assert torch.equal(tokens, wanted)
    _, after = clusters.programs()
    assert (after["state"], after["restarts"], "signal 9" in after["problem"]) == ("serving", 1, True)
    assert after["place"] == before["place"]
    said = clusters.drain(f"https://127.0.0.1:{port}", after["address"], AUTHORITY)
    assert said == f"{after['address']} takes no new sessions, and ends after the last one."
    wait_until(lambda: [(each["state"], each["restarts"]) for each in clusters.programs()[1:]] == [("serving", 2)],
               "it is not back")
    _, after = clusters.programs()
    processes = [directory["pid"], after["pid"], *workers_of(after["pid"])]
    down = clusters.run("cluster", "down", "--name", "lab", "--drain-s", "0")
    assert down.returncode == 0, down.stderr
    assert [pid for pid in processes if not has_ended(pid)] == []
    assert (slurm.states(), list(clusters.folder.iterdir())) == (["COMPLETED", "COMPLETED"], [])


@on_slurm_too
def test_a_program_is_started_again_after_the_end_of_its_time_and_of_its_node(
        engine: Engine, slurm: Any, tmp_path: Path) -> None:
    engine.start(ClusterSpec("lab", (program("server-0", 2, DJINN_SAMPLE="secret"),)))
    (job,) = slurm.jobs
    first = when(engine, serves)
    assert (first.address, first.restarts, first.problem) == ("tcp://here:1", 0, "")
    assert not [path for path in tmp_path.rglob("*") if path.name in (SPEC, "script") and "secret" in path.read_text()]
    for restarts, event in enumerate((slurm.warn, slurm.fail_node), 1):
        event(job)
        report = when(engine, lambda report, restarts=restarts: serves(report) and report.restarts == restarts)
        assert report.problem
        assert engine.logs("server-0", 10) == (restarts + 1) * ["0,1 secret"]
    os.kill(keeper_of(tmp_path), signal.SIGKILL)
    failed = when(engine, lambda report: report.state == "failed")
    assert f"its job {job} has ended, FAILED: " in failed.problem


@on_slurm_too
def test_a_suspended_job_is_reported_and_ended(engine: Engine, slurm: Any) -> None:
    engine.start(ClusterSpec("lab", (program("server-0"),)))
    when(engine, serves)
    (job,) = slurm.jobs
    with slurm.suspended(job):
        suspended = when(engine, lambda report: report.state != "serving")
        assert suspended == ProgramReport("server-0", "starting", place=f"job {job}, SUSPENDED (None)")
    when(engine, serves)
    with slurm.suspended(job):
        when(engine, lambda report: not serves(report))
        engine.stop(60)
        assert slurm.states() == ["CANCELLED"]


@on_slurm_too
def test_signals_at_its_end_do_not_change_the_status_of_a_job(engine: Engine, slurm: Any, tmp_path: Path) -> None:
    engine.start(ClusterSpec("lab", (program("server-0"),)))
    when(engine, serves)
    pid = keeper_of(tmp_path)
    with contextlib.suppress(ProcessLookupError):
        while not has_ended(pid):
            os.kill(pid, signal.SIGTERM)
            time.sleep(0.001)
    wait_until(lambda: slurm.states()[0] in ENDED, "the job does not end")
    assert slurm.states() == ["COMPLETED"]


def test_jobs_get_what_the_environment_of_sbatch_says(engine: Engine, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
                                                      ) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "quick")
    monkeypatch.setenv("SBATCH_GRES", "gpu:a100:1")
    with slurm.during("held"):
        engine.start(ClusterSpec("lab", (program("server-0", 1), program("server-1"))))
        assert [(job.get("SBATCH_PARTITION"), job.get("gres"), job.get("SBATCH_GRES")) for job in slurm.jobs.values()
                ] == [("quick", "", "gpu:a100:1"), ("quick", "", "")]
        assert engine.programs()[0] == ProgramReport("server-0", "starting", place="job 1, PENDING (Resources)")
        engine.stop(60)
    assert slurm.states() == ["CANCELLED", "CANCELLED"]


@pytest.mark.parametrize("jobs", [0, 1])
def test_a_job_that_is_refused_leaves_nothing(jobs: int, engine: Engine, slurm: Slurm, tmp_path: Path) -> None:
    slurm.limit(jobs)
    with pytest.raises(ConfigurationError, match="sbatch fails: .*Invalid partition name specified.*SBATCH_PARTITION"):
        engine.start(ClusterSpec("lab", (program("server-0"), program("server-1"))))
    wait_until(lambda: set(slurm.states()) <= {"CANCELLED"}, "the first job is still there")
    assert (engine.programs(), list((tmp_path / "engine").iterdir())) == ([], [])


def test_slurm_that_does_not_answer_is_asked_again(engine: Engine, slurm: Slurm) -> None:
    engine.start(ClusterSpec("lab", (program("server-0"),)))
    when(engine, serves)
    watching = engine.watch()
    (report,) = next(watching)
    with slurm.during("silent"):
        with pytest.raises(ConfigurationError, match="squeue fails: .*Unable to contact slurm controller"):
            engine.programs()
        os.kill(report.pid, signal.SIGKILL)
        while report.restarts == 0:
            (report,) = next(watching)


def test_a_machine_without_slurm_is_named_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match="sbatch, squeue, scancel, which .*login node"):
        SlurmEngines().open(tmp_path)

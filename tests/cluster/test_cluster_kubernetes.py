"""``djinn cluster up --engine kubernetes``, on a stand-in for kubectl: Pods that are processes of this machine."""

from __future__ import annotations

import base64
import json
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.servers.clusters import when
from support.servers.kubernetes import Kubernetes

from djinn.errors import ConfigurationError
from djinn_plugins.cluster.asking import parse
from djinn_plugins.cluster.clusters import make
from djinn_plugins.cluster.joining import await_servers_apart
from djinn_plugins.cluster.kinds import ClusterSpec, Engine, EngineProgram, SupportsHosts
from djinn_plugins.cluster.kubernetes.engine import KubernetesEngines
from djinn_plugins.cluster.messages import Join, LoadReport, encoded
from djinn_plugins.cluster.programs import programs_of
from djinn_plugins.common.files.secret_files import key_in

SERVES = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
said = map(os.environ.get, ("CUDA_VISIBLE_DEVICES", "DJINN_SAMPLE", "DJINN_TOKEN", "OTHER"))
print(*said, file=sys.stderr, flush=True)
print("serving tcp://here:1", flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def kubernetes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kubernetes:
    made = Kubernetes(tmp_path / "kubernetes")
    monkeypatch.setenv("PATH", made.path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return made


@pytest.fixture
def engine(kubernetes: Kubernetes, tmp_path: Path) -> Iterator[Engine]:
    made = KubernetesEngines().open(tmp_path / "engine")
    yield made
    made.stop(0)
    assert (kubernetes.objects(), list((tmp_path / "engine").iterdir())) == ({}, [])


def test_a_program_has_its_secrets_and_comes_back_in_another_pod(
        engine: Engine, kubernetes: Kubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, fields = tmp_path / "key", tmp_path / "pod.json"
    key.write_text("secret-of-servers")
    fields.write_text(json.dumps({"tolerations": [{"operator": "Exists"}],
                                  "container": {"resources": {"limits": {"memory": "8Gi"}}}}))
    for name, value in (("DJINN_TOKEN", "secret-of-clients"), ("OTHER", "x"), ("DJINN_KUBERNETES_IMAGE", "lab/djinn:1"),
                        ("DJINN_KUBERNETES_POD", str(fields))):
        monkeypatch.setenv(name, value)
    program = EngineProgram("server-0", (sys.executable, "-S", "-c", SERVES), {"DJINN_SAMPLE": "secret-of-it"}, 2,
                            (str(key),))
    spec = ClusterSpec("lab", (program,))
    with kubernetes.during("held"):
        engine.start(spec)
        waiting = when(engine, lambda report: report.place)
        assert (waiting.state, "Pending (Unschedulable: 0/1 nodes are available" in waiting.place) == ("starting", True)
    made = kubernetes.objects()
    secret = made.pop(("Secret", "djinn-lab"))
    assert base64.b64decode(secret["data"]["file-0"]) == b"secret-of-servers"
    assert "secret-of" not in json.dumps(list(made.values()))
    pod = made["Job", "djinn-lab-server-0"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (pod["tolerations"], container["image"], container["resources"]["limits"]) == (
        [{"operator": "Exists"}], "lab/djinn:1", {"memory": "8Gi", "nvidia.com/gpu": 2})
    first = when(engine, lambda report: report.state == "serving")
    assert (first.address, first.restarts) == ("tcp://here:1", 0)
    said = "0,1 secret-of-it secret-of-clients None"
    assert engine.logs("server-0", 10) == [said]
    # Another user's cluster of the same name.
    other = KubernetesEngines().open(tmp_path / "other")
    with pytest.raises(ConfigurationError, match='kubectl fails: .*services "djinn-lab" already exists'):
        other.start(spec)
    assert (other.programs(), engine.programs(), list((tmp_path / "other").iterdir())) == ([], [first], [])
    watching = engine.watch()
    assert next(watching) == [first]
    with kubernetes.during("silent"):
        with pytest.raises(ConfigurationError, match="kubectl fails: Unable to connect to the server"):
            engine.programs()
        kubernetes.fail_node()
    reports = next([report] for (report,) in watching if (report.state, report.restarts) == ("serving", 1))
    assert reports[0].place != first.place
    assert engine.logs("server-0", 10) == [said]


def test_programs_find_each_other_by_the_names_of_their_pods(
        kubernetes: Kubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, authority, settings = tmp_path / "tls.crt", tmp_path / "ca.crt", tmp_path / "djinn.toml"
    for path in (certificate, authority):
        path.touch()
    settings.write_text(f'tls-ca = "{authority}"')
    monkeypatch.setenv("DJINN_CONFIG", str(settings))
    cluster = make("lab", "kubernetes")
    with pytest.raises(ConfigurationError, match="--host"):
        programs_of(cluster, [1], [7700, 7777], [])
    directory, server = programs_of(cluster, [1], [7700, 7777], ["--host", "0.0.0.0", f"--tls-cert={certificate}"])
    assert directory.command[:2] == ("djinn", "directory")
    words = " ".join(server.command)
    assert "--directory tls://directory.djinn-lab.lab.svc:7700/lab " in words
    assert "--announce tls://server-0.djinn-lab.lab.svc:7777 " in words
    assert set(server.files) == set(directory.files) == {
        str(cluster.key_file), *map(str, (certificate, authority, settings))}
    assert server.gpus == 1


def test_the_directory_is_asked_in_its_pod_whether_it_leads_clients_to_all_servers(
        engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DJINN_TOKEN", "secret-of-clients")
    key = tmp_path / "key"
    known_by = key_in(key, makes=True)
    engine.start(ClusterSpec("lab", (EngineProgram("directory", (
        "djinn", "directory", "--name", "lab", "--port", "0", "--key", str(key)), files=(str(key),)),)))
    address = when(engine, lambda report: report.state == "serving").address
    assert isinstance(engine, SupportsHosts)
    with ThreadPoolExecutor(1) as asking:
        waiting = asking.submit(await_servers_apart, engine, "directory", address, key, 1, "")
        parsed = parse(address)
        with socket.create_connection((parsed.host, parsed.port), timeout=20) as server:
            server.sendall(encoded(Join(known_by, "lab", "tcp://server-0:1")) + encoded(LoadReport()))
            assert waiting.result(40) == ""
    for program, path, why in (("directory", tmp_path / "none", "cannot be read"), ("server-0", key, "has no Pod")):
        assert why in await_servers_apart(engine, program, address, path, 1, "")


def test_fields_of_pods_that_cannot_be_read_leave_nothing(
        engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DJINN_KUBERNETES_POD", str(tmp_path / "missing.json"))
    with pytest.raises(ConfigurationError, match=r"fields of Pods cannot be read from .*missing.json"):
        engine.start(ClusterSpec("lab", (EngineProgram("server-0", ("djinn",)),)))


def test_a_machine_without_kubectl_is_named_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match="kubernetes needs kubectl, which .*Install kubectl"):
        KubernetesEngines().open(tmp_path)

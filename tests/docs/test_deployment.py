"""The files of docs/deployment: `djinn serve` accepts their command lines, and their systems' own tools accept them."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import attrs
import pytest
import typer.main
from support.processes.warm import clean_environment, run_djinn

from djinn_plugins.cli.app import build
from djinn_plugins.cluster.kinds import ClusterSpec, EngineProgram
from djinn_plugins.cluster.kubernetes.objects import Objects
from djinn_plugins.server.checks import check_options
from djinn_plugins.server.options import ServeOptions, options_from
from djinn_plugins.server.tokens.authenticators import TokenAuthentication
from djinn_plugins.server.tokens.tokens import TokenFile

ROOT = Path(__file__).parents[2]
FILES = ROOT / "docs" / "deployment"
PAGE = ROOT / "docs" / "deployment.md"
ENDING_S = 10.0
"""What workers may take to end after `--drain-s`."""
START_TIMEOUT_S = 240.0
SERVER = f"""#!/bin/bash
exec {shlex.quote(sys.executable)} -c 'from djinn_plugins.start import main; main()' "$@"
"""
# Takes the options that the script gives, and becomes the step, as a child of the batch script.
SRUN = """#!/bin/bash
for option in --ntasks=1 --cpus-per-task=1; do
    [[ $1 == "$option" ]] || { echo "srun: $1?" >&2; exit 1; }
    shift
done
echo $$ > step
exec "$@"
"""
SCONTROL = """#!/bin/bash
[[ "$*" == "show hostnames gpu-[7]" ]] && echo gpu-7
"""


@attrs.frozen
class Command:
    """How a file starts `djinn serve`.

    Attributes:
        words: The whole command line.
        has_token: Whether its environment has a token.
        patience_s: How long the service manager waits after SIGTERM.
    """

    words: tuple[str, ...]
    has_token: bool
    patience_s: float


def yaml_of(name: str) -> list[Any]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((FILES / name).read_text()))


def kubernetes() -> dict[tuple[str, str], Any]:
    """The objects of kubernetes.yaml, by kind and name."""
    return {(each["kind"], each["metadata"]["name"]): each for each in yaml_of("kubernetes.yaml")}


def rendered(**values: Any) -> list[Any]:
    """The objects of the chart: Helm is not needed, because the templates only insert values."""
    yaml = pytest.importorskip("yaml")
    chart = FILES / "chart"
    given = {"Release": {"Name": "djinn"}, "Values": yaml.safe_load((chart / "values.yaml").read_text()) | values}

    def insert(found: re.Match[str]) -> str:
        value: Any = given
        for name in found[1].split("."):
            value = value[name]
        return json.dumps(value) if found[2] else str(value)

    texts = [re.sub(r"\{\{ \.([\w.]+)( \| toJson)? \}\}", insert, path.read_text())
             for path in (chart / "templates").iterdir()]
    assert not [text for text in texts if "{{" in text]
    return [each for text in texts for each in yaml.safe_load_all(text)]


def of_the_engine() -> list[Any]:
    """The objects that `djinn cluster up --engine kubernetes` makes."""
    program = EngineProgram("server-0", ("djinn", "serve"), gpus=1, files=(str(PAGE),))
    objects = Objects(ClusterSpec("lab", (program,)), "1", "djinn")
    return [objects.service(), objects.secret(), *objects.jobs()]


def instructions() -> dict[str, list[str]]:
    """The instructions of the Dockerfile, by name."""
    found: dict[str, list[str]] = {}
    text = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", (FILES / "Dockerfile").read_text()))
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        found.setdefault(name, []).append(rest)
    return found


def entry_point() -> tuple[str, ...]:
    (text,) = instructions()["ENTRYPOINT"]
    return tuple(json.loads(text))


def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # names keep their capitals
    parser.read(FILES / "djinn.service")
    return parser["Service"]


def of_systemd() -> Command:
    service = unit()
    return Command(tuple(shlex.split(service["ExecStart"])), has_token=False,
                   patience_s=float(service["TimeoutStopSec"]))


def of_the_image() -> Command:
    # `docker stop` waits for ten seconds, and `docker run` in the page gives the token.
    return Command((*entry_point(), "--port", "7777"), has_token=True, patience_s=float("inf"))


def of_compose() -> Command:
    (document,) = yaml_of("compose.yaml")
    service = document["services"]["server"]
    return Command((*entry_point(), *service["command"]), has_token="DJINN_TOKEN" in service["environment"],
                   patience_s=float(service["stop_grace_period"].removesuffix("s")))


def of_kubernetes() -> Command:
    pod = kubernetes()["StatefulSet", "djinn"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return Command((*container["command"], *container["args"]), has_token="DJINN_TOKEN" in {
        variable["name"] for variable in container["env"]}, patience_s=float(pod["terminationGracePeriodSeconds"]))


def of_slurm() -> Command:
    text = (FILES / "djinn.slurm").read_text()
    (line,) = re.findall(r"(?m)^srun .*?(djinn serve .*?) \|$", text)
    (notice,) = re.findall(r"(?m)^#SBATCH --signal=TERM@(\d+)$", text)
    return Command(tuple(shlex.split(line)), has_token="export DJINN_TOKEN" in text, patience_s=float(notice))


COMMANDS = {"systemd": of_systemd, "image": of_the_image, "compose": of_compose, "kubernetes": of_kubernetes,
            "slurm": of_slurm}


def parsed(words: tuple[str, ...], folder: Path) -> ServeOptions:
    """Read a command line as `djinn serve` does; files of /etc/djinn and /var/lib/djinn are in a folder instead."""
    program, command, *rest = words
    assert (Path(program).name, command) == ("djinn", "serve")
    app, problems = build({"DJINN_PLUGINS": ""})
    assert not problems
    serve = typer.main.get_group(app).commands["serve"]
    arguments = [re.sub(r"^/(?:etc|var/lib)/djinn/", f"{folder}/", argument) for argument in rest]
    return options_from(dict(serve.make_context("serve", arguments).params))


@pytest.fixture
def etc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the command lines name."""
    for name in [name for name in os.environ if name.startswith("DJINN_")]:
        monkeypatch.delenv(name)
    shutil.copy(FILES / "djinn.toml", tmp_path)
    TokenFile(tmp_path / "tokens.json").create("alice")
    return tmp_path


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_line_is_accepted_and_safe(name: str, etc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = COMMANDS[name]()
    if command.has_token:
        monkeypatch.setenv("DJINN_TOKEN", "a-long-secret")
    options = parsed(command.words, etc)
    needs_token = TokenAuthentication().check(options)
    assert needs_token
    assert check_options(options, needs_token=needs_token) == (name in ("slurm", "image"))
    assert command.patience_s >= options.sessions.drain_s + ENDING_S
    assert options.metrics.port == (9090 if name != "slurm" else None)
    with pytest.raises(Exception, match="No such option: --no-such-option"):
        parsed((*command.words, "--no-such-option"), etc)


def test_kubernetes_asks_the_pages_that_the_server_has() -> None:
    service, workload = (kubernetes()[kind, "djinn"] for kind in ("Service", "StatefulSet"))
    template = workload["spec"]["template"]
    assert workload["spec"]["serviceName"] == service["metadata"]["name"]
    (container,) = template["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    words = list(of_kubernetes().words)
    assert ports == {"djinn": int(words[words.index("--port") + 1]),
                     "metrics": int(words[len(words) - 1 - words[::-1].index("--metrics-port") + 1])}
    pages = [container[f"{probe}Probe"]["httpGet"] for probe in ("startup", "liveness", "readiness")]
    assert pages == [{"path": path, "port": "metrics"} for path in ("/healthz", "/healthz", "/readyz")]
    assert template["spec"]["securityContext"]["runAsUser"] == int(instructions()["USER"][0])


def test_servers_of_kubernetes_find_the_directory_that_clients_find() -> None:
    found = kubernetes()
    (policy,) = [each for (kind, _), each in found.items() if kind == "NetworkPolicy"]
    (labels,) = policy["spec"]["podSelector"]["matchExpressions"]
    commands = {}
    for kind, name in (("StatefulSet", "djinn"), ("Deployment", "djinn-directory")):
        workload, service = found[kind, name]["spec"], found["Service", name]["spec"]
        pod = workload["template"]
        assert workload["selector"]["matchLabels"] == service["selector"] == pod["metadata"]["labels"] == {"app": name}
        assert name in labels["values"]
        (container,) = pod["spec"]["containers"]
        assert [port["port"] for port in service["ports"]] == [container["ports"][0]["containerPort"]]
        (volume,), (mount,) = pod["spec"]["volumes"], container["volumeMounts"]
        assert (volume["name"], volume["projected"]["defaultMode"]) == (mount["name"], 0o440)
        items = [item for source in volume["projected"]["sources"] for item in source["secret"].get("items", [])]
        commands[name] = command = " ".join(container["command"])
        named = set(re.findall(rf"{mount['mountPath']}/(\S+)", command))
        assert named == {"tls.crt", "tls.key", "directory.key"} == {"tls.crt", "tls.key", items[0]["path"]}
    app, _ = build({"DJINN_PLUGINS": ""})
    words = commands["djinn-directory"].split()
    directory = typer.main.get_group(app).commands["directory"].make_context("directory", words[2:]).params
    address = f"tls://djinn-directory.$(POD_NAMESPACE).svc:{directory['port']}/{directory['name']}"
    assert f"--directory {address} --directory-key {directory['key']}" in commands["djinn"]
    assert "--announce tls://$(POD_NAME).djinn.$(POD_NAMESPACE).svc:7777" in commands["djinn"]
    assert found["Deployment", "djinn-directory"]["spec"]["replicas"] == 1


def test_the_chart_makes_what_the_file_has() -> None:
    assert {(each["kind"], each["metadata"]["name"]): each for each in rendered()} == kubernetes()


def test_the_schemas_of_kubernetes_accept_the_chart() -> None:
    """As they do the file, which is the same. The schemas are 17,000 files, so that `.[test]` does not have them."""
    validator = pytest.importorskip("kubernetes_validate", reason="python3 -m pip install kubernetes-validate")
    without_gpu = {"replicas": 3, "options": ["--max-sessions", "8"], "resources": {"limits": {"memory": "8Gi"}}}
    for values in ({}, {"servers": without_gpu}):
        objects = rendered(**values)
        assert len(objects) == 5
        for each in [*objects, *of_the_engine()]:
            validator.validate(each, "1.34", strict=True)
    objects[0]["spec"]["replica"] = 1
    with pytest.raises(validator.ValidationError):
        validator.validate(objects[0], "1.34", strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl knows the fields of the objects")
@pytest.mark.parametrize(("kind", "name", "change"), [
    ("Service", "djinn", ("set", "selector", "app=djinn")), ("StatefulSet", "djinn", ("set", "image", "server=djinn")),
    ("Deployment", "djinn-directory", ("set", "image", "directory=djinn")),
    ("Job", "djinn-lab-server-0", ("set", "image", "program=djinn"))])
def test_kubernetes_knows_every_field(kind: str, name: str, change: tuple[str, ...], tmp_path: Path) -> None:
    """kubectl drops fields that it does not know where it changes an object."""
    yaml = pytest.importorskip("yaml")
    (given,) = [each for each in [*yaml_of("kubernetes.yaml"), *of_the_engine()]
                if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    file = tmp_path / "object.yaml"
    # Where nothing changes, kubectl prints nothing.
    file.write_text(yaml.safe_dump(given).replace("image: djinn", "image: another"))
    *verb, value = change
    # Of a set, the object stands before the new value.
    done = subprocess.run(["kubectl", *verb, "--local", "-f", str(file), value, "-o", "json"], capture_output=True,
                          text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert missing(given, json.loads(done.stdout)) == []


def missing(wanted: Any, found: Any, path: str = "") -> list[str]:
    """Name what one document has and another one lacks."""
    if isinstance(wanted, dict):
        return [gone for name, value in wanted.items() for gone in (
            missing(value, found[name], f"{path}.{name}") if isinstance(found, dict) and name in found
            else [f"{path}.{name}"])]
    if isinstance(wanted, list):
        if not isinstance(found, list) or len(wanted) != len(found):
            return [path]
        return [gone for one, other in zip(wanted, found, strict=True) for gone in missing(one, other, f"{path}[]")]
    return [] if str(wanted) == str(found) else [path]


def test_the_image_has_all_that_djinn_is_built_from() -> None:
    copied = {word for line in instructions()["COPY"] for word in line.split()[:-1]}
    assert [name for name in copied if not (ROOT / name).exists()] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {"pyproject.toml", "constraints.txt", project["project"]["readme"], *project["project"]["license-files"],
              *(path.partition("/")[0] for path in (*wheel["only-include"], *wheel["force-include"]))}
    assert copied == needed
    (extras,) = re.findall(r'-c constraints.txt "\.\[([\w,]+)\]"', instructions()["RUN"][0])
    assert set(extras.split(",")) <= set(project["project"]["optional-dependencies"])
    (document,) = yaml_of("compose.yaml")
    built = document["services"]["server"]["build"]
    assert (FILES / built["context"]).resolve() == ROOT
    assert (ROOT / built["dockerfile"]).samefile(FILES / "Dockerfile")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd reads the unit")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    program = of_systemd().words[0]
    copy = tmp_path / "djinn.service"
    copy.write_text((FILES / "djinn.service").read_text().replace(program, str(Path(sys.executable).resolve())))
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60,
                          check=False)
    said = [line for line in done.stderr.splitlines() if "djinn" in line]
    assert (done.returncode, said) == (0, [])


@pytest.mark.skipif(shutil.which("ssh") is None, reason="ssh reads the options")
def test_ssh_accepts_the_tunnels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/alice")
    commands = re.findall(r"(?m)^(ssh .*)$", PAGE.read_text().replace("\\\n", ""))
    assert len(commands) == 2
    for command in commands:
        words = shlex.split(os.path.expandvars(command))
        # It reads its options, and connects to nothing.
        done = subprocess.run(["ssh", "-G", "-F", "none", *words[1:]], capture_output=True, text=True, timeout=60,
                              check=False)
        assert done.returncode == 0, done.stderr
        (forward,) = re.findall(r"(?m)^localforward (.*)$", done.stdout)
        wanted = words[words.index("-L") + 1]
        assert re.sub(r"[][]", "", forward).replace(" ", ":") == wanted
        if "djinn" in words:
            options = parsed(tuple(words[words.index("djinn"):]), tmp_path)
            assert options.address.unix == wanted.partition(":")[2]


@pytest.mark.skipif(sys.platform != "linux", reason="Slurm's nodes run Linux")
def test_the_job_of_slurm_serves_until_it_ends(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "djinn": SERVER}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    environment = clean_environment(
        PATH=f"{programs}{os.pathsep}{os.environ['PATH']}", SLURM_JOB_ID="123", SLURM_JOB_NODELIST="gpu-[7]",
        SLURM_CPUS_PER_TASK="1", OMP_NUM_THREADS="1")
    settings, step, log = tmp_path / "djinn-123.env", tmp_path / "step", tmp_path / "slurm.out"
    with log.open("w") as output, subprocess.Popen(
            ["bash", str(FILES / "djinn.slurm")], cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL,
            stdout=output, stderr=output) as job:
        try:
            began = time.monotonic()
            while not (settings.exists() and settings.read_text().endswith("\n")):
                assert job.poll() is None, log.read_text()
                assert time.monotonic() - began < START_TIMEOUT_S, log.read_text()
                time.sleep(0.1)
            assert stat.S_IMODE(settings.stat().st_mode) == 0o600
            tunnel, variables = settings.read_text().splitlines()
            given = dict(re.findall(r"(\w+)=(\S+)", variables))
            port = given["DJINN_SERVER"].removeprefix("tcp://127.0.0.1:")
            assert tunnel == f"# ssh -N -J LOGIN-NODE -L {port}:127.0.0.1:{port} gpu-7"
            answered = run_djinn("status", **given)
            assert answered.returncode == 0, answered.stderr
            refused = run_djinn("status", DJINN_SERVER=given["DJINN_SERVER"], DJINN_TOKEN="another")
            assert (refused.returncode, "DJ305" in refused.stderr) == (1, True), refused.stderr
            # As Slurm does before the time is over.
            os.kill(int(step.read_text()), signal.SIGTERM)
            assert job.wait(60) == 0, log.read_text()
        finally:
            # The server ends with its parent.
            job.kill()
    assert not settings.exists()
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", int(port))) != 0

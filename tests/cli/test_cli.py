"""The program ``djinn``, run as its users run it."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.processes.warm import clean_environment, run_djinn, run_python
from support.servers.serving import Serving

from djinn.settings import Config
from djinn_plugins.cli.doctor import _token

Install = Callable[..., Path]

RUN = (sys.executable, "-c", "from djinn_plugins.start import main; main()")


def in_new_interpreter(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the program in an interpreter that has imported nothing, as a shell does."""
    return subprocess.run([*RUN, *arguments], env=clean_environment(), capture_output=True, text=True, timeout=120,
                          check=False)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server in a process of its own."""
    with Serving(tmp_path_factory.mktemp("server") / "log") as serving:
        yield serving.address


def test_the_version_is_the_distributions() -> None:
    done = in_new_interpreter("--version")
    assert (done.returncode, done.stdout) == (0, "djinn 0.1.0\n")


def test_plugins_are_listed_as_plain_columns_when_piped() -> None:
    done = in_new_interpreter("plugins")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert {len(line) for line in lines} == {6}
    assert ["scheduler", "single", "active", "djinn-scheduler-single", "djinn-torch 0.1.0", ""] in lines
    assert ["command", "serve", "active", "djinn-server", "djinn-torch 0.1.0", ""] in lines
    assert not any(character in done.stdout for character in "\x1b│┃")


def test_a_replacement_shows_in_the_list(install: Install) -> None:
    folder = install("acme-shapes", """
        from djinn.hookspecs import hookimpl

        class Shapes:
            name = "acme"
            def depends_on_numbers(self, operator):
                return True
            def infer(self, operator, args, kwargs):
                return None

        @hookimpl
        def djinn_register_shapes(register):
            register(Shapes())
    """)
    done = run_djinn("plugins", "--json", path=folder, DJINN_PLUGINS="-djinn-shapes-meta")
    assert done.returncode == 0, done.stderr
    rows = {(row["kind"], row["plugin"]): row for row in json.loads(done.stdout)["plugins"]}
    assert rows["shapes", "acme-shapes"]["active"] is True
    assert rows["shapes", "acme-shapes"]["replaced"] == "djinn-shapes-meta"
    assert rows["shapes", "djinn-shapes-meta"]["note"] == "switched off"


def test_a_broken_plugin_does_not_stop_the_list_but_is_told(install: Install) -> None:
    folder = install("acme-broken", "import a_module_that_does_not_exist")
    done = run_djinn("plugins", path=folder)
    assert done.returncode == 1
    assert "\tdjinn-scheduler-single\t" in done.stdout
    assert "[DJ202]" in done.stderr
    assert "DJINN_PLUGINS=-acme-broken" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_doctor_finds_nothing_wrong_without_a_gpu_or_a_server() -> None:
    done = in_new_interpreter("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    found = {cells[1]: cells for cells in rows(done.stdout)}
    assert found["python"][2].startswith(platform.python_version())
    assert found["torch"][2] == str(torch.__version__)
    assert found["logical device"][2] == "remote_accelerator:0"
    assert found["server"][0] == "ok"
    assert {cells[0] for cells in found.values()} == {"ok"}
    groups = [line for line in done.stdout.splitlines() if line and not line.startswith(" ")]
    assert groups == ["This installation", "Plugins", "Devices", "This system", "The server",
                      "Everything that a session needs is here."]
    assert not any(character in done.stdout for character in "\t\x1b│✓")


def rows(printed: str) -> list[list[str]]:
    """The findings that `djinn doctor` prints into a pipe: state, name and finding."""
    lines = [line for line in printed.splitlines() if line.startswith("  ") and not line.lstrip().startswith("->")]
    return [re.split(r"\s{2,}", line.strip(), maxsplit=2) for line in lines]


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_the_doctor_has_colours_on_a_terminal_and_puts_the_remedy_below_the_problem() -> None:
    terminal, inner = os.openpty()
    process = subprocess.Popen([*RUN, "doctor"], stdout=inner, stderr=subprocess.DEVNULL,
                               env=clean_environment(COLUMNS="120", TERM="xterm", DJINN_SEVER="tcp://127.0.0.1:1"))
    os.close(inner)
    shown = b""
    with contextlib.suppress(OSError):  # Linux reports the end of the other side so
        while part := os.read(terminal, 2**16):
            shown += part
    os.close(terminal)
    assert process.wait() == 1
    text = shown.decode()
    assert "\x1b[32m✓" in text
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    [problem] = [number for number, line in enumerate(lines) if line.startswith("✗")]
    assert "variable DJINN_SEVER" in lines[problem]
    assert "→ Did you mean DJINN_SERVER?" in lines[problem + 1]
    assert lines[-1] == "1 problem: variable DJINN_SEVER. The arrows say what to do."


def test_the_doctor_measures_a_server_that_answers(server: str) -> None:
    done = run_djinn("doctor", "--json", DJINN_SERVER=server)
    report = json.loads(done.stdout)
    assert (done.returncode, report["ok"]) == (0, True), report
    found = next(check["found"] for check in report["checks"] if check["name"] == "server")
    assert server in found
    assert f"torch {torch.__version__}" in found
    milliseconds = float(found.rpartition("round trip ")[2].removesuffix(" ms"))
    assert 0 < milliseconds < 60_000


def test_the_doctor_looks_at_the_way_to_a_server(server: str) -> None:
    done = run_djinn("doctor", "--json", DJINN_SERVER=server, DJINN_TOKEN="hush")
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    there, back, size = re.fullmatch(r"(\S+) MB/s there, (\S+) MB/s back, measured with (\S+) MiB",
                                     found["throughput"]["found"]).groups()  # type: ignore[union-attr]
    assert min(float(there), float(back)) > 1
    assert 1 <= float(size) <= 64
    assert found["torch there"]["found"] == str(torch.__version__)
    assert "not encrypted" in found["certificate"]["found"]
    assert found["token"]["ok"] is True
    assert "hush" not in done.stdout


def test_the_doctor_names_limits_of_the_system_that_are_too_low() -> None:
    resource = pytest.importorskip("resource")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    code = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (500, {most})); {RUN[-1]}"
    done = run_python(code, "doctor", has_djinn=True)
    assert done.returncode == 1
    assert [cells for cells in rows(done.stdout) if cells[0] == "problem"] == [
        ["problem", "open files (ulimit -n)", "500"]]
    assert "-> Run `ulimit -n 4096`" in done.stdout


@pytest.mark.parametrize(("server", "good"), [
    ("tcp://gpu.example.org:7777", False), ("tcp://10.0.0.1:7777", False), ("tcp://127.0.0.1:7777", True),
    ("tcp://[::1]:7777", True), ("tcp://localhost:7777", True), ("tls://gpu.example.org:7777", True),
    ("unix:///run/djinn.sock", True)])
def test_a_token_that_others_can_read_on_its_way_is_a_problem(server: str, good: bool) -> None:
    check = _token(Config(token="hush"), server)
    assert (check.ok, bool(check.remedy)) == (good, not good)
    assert "hush" not in check.found + check.remedy
    assert _token(Config(), server).ok


def test_the_doctor_names_a_server_that_does_not_answer_and_what_to_do() -> None:
    done = run_djinn("doctor", "--server", "tcp://127.0.0.1:1")
    assert done.returncode == 1
    [cells] = [cells for cells in rows(done.stdout) if cells[0] == "problem"]
    assert cells[1] == "server"
    assert "tcp://127.0.0.1:1" in cells[2]
    assert re.search(r"-> .*djinn serve", done.stdout)


def test_the_doctor_names_a_directory_that_does_not_answer() -> None:
    done = run_djinn("doctor", "--json", DJINN_CLUSTER="tcp://127.0.0.1:1/lab")
    [check] = [check for check in json.loads(done.stdout)["checks"] if check["group"] == "The server"]
    assert (done.returncode, check["name"], check["ok"]) == (1, "cluster", False)
    assert "The directory tcp://127.0.0.1:1/lab does not answer" in check["found"]


def test_the_doctor_tells_of_plugins_and_settings_that_are_wrong(install: Install) -> None:
    folder = install("acme-broken", "import a_module_that_does_not_exist")
    done = run_djinn("doctor", "--json", path=folder, DJINN_LOG_LEVEL="LOUD")
    report = json.loads(done.stdout)
    assert (done.returncode, report["ok"]) == (1, False)
    told = {check["found"][:7]: check["remedy"] for check in report["checks"] if not check["ok"]}
    assert set(told) == {"[DJ101]", "[DJ202]"}
    assert "WARNING" in told["[DJ101]"]
    assert "DJINN_PLUGINS=-acme-broken" in told["[DJ202]"]


COMMAND = """
    from djinn.errors import TransportError
    from djinn.hookspecs import hookimpl

    @hookimpl
    def djinn_register_commands(app):
        @app.command("fall")
        def fall():
            raise TransportError("It fell.", hint="Pick it up.")
"""


def test_an_error_in_a_command_is_one_message_and_status_1(install: Install) -> None:
    done = run_djinn("fall", path=install("acme-command", COMMAND))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "djinn: [DJ301] It fell. Pick it up.\n"


def test_an_error_in_a_command_keeps_its_traceback_when_debugging(install: Install) -> None:
    done = run_djinn("fall", path=install("acme-command", COMMAND), DJINN_DEBUG="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "acme_command.py" in done.stderr


def test_a_command_that_does_not_exist_is_status_2_and_tells_of_broken_plugins(install: Install) -> None:
    done = run_djinn("demolish", path=install("acme-broken", "import a_module_that_does_not_exist"))
    assert done.returncode == 2
    assert "demolish" in done.stderr
    assert "'acme-broken'" in done.stderr

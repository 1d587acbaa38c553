"""What the program ``djinn`` does before it imports PyTorch, as its users start it."""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import attrs
import pytest
import torch
from support.processes.warm import clean_environment

from djinn.errors import ConfigurationError
from djinn.plugins import Plugins
from djinn_plugins.executor.cpu.executor import CpuExecutorFactory
from djinn_plugins.server.opening import _with_device
from djinn_plugins.server.options import ServeOptions

HEAVY = ("torch", "numpy", "sympy", "networkx", "cattrs", "asyncio", "anyio", "transformers")
COMMANDS = ("plugins", "settings", "doctor", "bench", "demo", "status", "top", "serve", "sessions", "kick", "run",
            "trace", "calibrate", "token", "token create", "token rotate", "token revoke", "token list")
OTHERS = ",".join(f"-{entry.name}" for entry in entry_points(group="djinn")
                  if entry.dist is not None and entry.dist.name != "djinn-torch")
"""Plugins of other distributions import what they like."""


def in_new_interpreter(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], env=clean_environment(DJINN_PLUGINS=OTHERS, **environment),
                          capture_output=True, text=True, timeout=120, check=False)


def test_no_help_imports_anything_heavy() -> None:
    done = in_new_interpreter(f"""
import contextlib, io, json, sys
from djinn_plugins.start import main
found = {{}}
for command in ["", *{COMMANDS!r}]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([*command.split(), "--help"])
    found[command] = [out.getvalue()[:200], [name for name in {HEAVY!r} if name in sys.modules], len(sys.modules)]
print(json.dumps(found))
""")
    assert done.returncode == 0, done.stderr
    for command, (text, heavy, modules) in json.loads(done.stdout).items():
        assert f"Usage: djinn {command}".strip() in text, command
        assert not heavy, command
        assert modules < 700, command


@pytest.mark.parametrize("columns", [50, 80, 110])
def test_paragraphs_of_help_are_filled_at_any_width(columns: int) -> None:
    done = in_new_interpreter("""
from djinn_plugins.start import main
for command in ("serve", "sessions", "top", "kick"):
    try: main([command, "--help"])
    except SystemExit: pass
""", COLUMNS=str(columns), TERM="dumb")
    assert done.returncode == 0, done.stderr
    paragraphs = [[]]
    for line in done.stdout.splitlines():
        if line.startswith("╭"):
            paragraphs.append([])
        elif line.startswith(" ") and line.strip() and not line.startswith(" Usage"):
            paragraphs[-1].append(line.strip())
        elif not line.strip() or not line.startswith(" "):
            paragraphs.append([])
    told = [lines for lines in paragraphs if len(lines) > 1]
    assert len(told) > 5
    for lines in told:
        for line, following in itertools.pairwise(lines):
            assert len(line) + 1 + len(following.split()[0]) > columns - 2, (line, following)


def test_a_command_that_does_not_exist_names_the_one_that_was_meant() -> None:
    done = in_new_interpreter("import atexit, sys; from djinn_plugins.start import main\n"
                              "atexit.register(lambda: print('torch' in sys.modules))\nmain(['serv'])")
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert "Did you mean 'serve'?" in done.stderr


def test_an_option_that_does_not_exist_names_those_that_were_meant() -> None:
    done = in_new_interpreter("import atexit, sys; from djinn_plugins.start import main\n"
                              "atexit.register(lambda: print('torch' in sys.modules))\nmain(['serve', '--prot', '1'])")
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert "--port" in done.stderr


SERVE = """
import sys
class Announce:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("PyTorch is imported", file=sys.stderr, flush=True)
sys.meta_path.insert(0, Announce())
from djinn_plugins.start import main
main(["serve", *sys.argv[1:]])
"""


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_server_says_what_it_waits_for_and_which_device_it_takes(log_format: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", SERVE, "--threads", "1", "--log-format", log_format],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env=clean_environment(DJINN_PLUGINS=OTHERS))
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
    finally:
        process.terminate()
        rest, logged = process.communicate(timeout=30)
    assert first.startswith("djinn serving tcp://127.0.0.1:")
    assert rest == ""
    lines = logged.splitlines()
    imported = lines.index("PyTorch is imported")
    if log_format == "text":
        assert lines[0].startswith("djinn: loading PyTorch")
        assert imported == 1
    else:
        # Whoever reads a log of JSON reads nothing else.
        assert imported == 0
        assert all(json.loads(line)["message"] for line in lines[1:])
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    assert any(f"the device is {device}, the best one here" in line for line in lines)
    assert not any(line.rstrip().endswith(" on") for line in lines)


def test_a_directory_serves_without_pytorch() -> None:
    program = "import sys; sys.modules['torch'] = None; from djinn_plugins.start import main; main()"
    with subprocess.Popen([sys.executable, "-c", program, "directory"], stdout=subprocess.PIPE, text=True,
                          env=clean_environment(DJINN_PLUGINS=OTHERS)) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.terminate()
    assert (process.returncode, line.rpartition("/")[2]) == (0, "default\n"), line


def test_the_best_device_is_an_accelerator_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = Plugins.load(names=("djinn-executor-cpu", "djinn-executor-cuda"))
    for count, best in ((2, "cuda:0"), (0, "cpu")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert _with_device(ServeOptions(), plugins).device.names == (best,)
    given = attrs.evolve(ServeOptions(), device=attrs.evolve(ServeOptions().device, device="cpu"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert _with_device(given, plugins).device.names == ("cpu",)


def test_a_mistaken_device_names_the_one_that_was_meant() -> None:
    with pytest.raises(ConfigurationError, match=r"no device 'cdua:0' here; it has cpu\. Did you mean cuda:0\?"):
        CpuExecutorFactory().open("cdua:0")


def test_a_taken_port_is_told_before_anything_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = in_new_interpreter(
            "import atexit, sys; from djinn_plugins.start import main\n"
            "atexit.register(lambda: print('torch' in sys.modules, 'djinn' in sys.modules))\n"
            f"main(['serve', '--port', '{taken.getsockname()[1]}'])")
    assert (done.returncode, done.stdout) == (2, "False False\n")
    assert done.stderr.startswith("djinn: [DJ301] Cannot listen on tcp://127.0.0.1:")


def test_the_package_is_whole_as_soon_as_something_of_it_is_used(tmp_path: Path) -> None:
    done = in_new_interpreter("""
import sys
from djinn_plugins.postponing import postpone
postpone("djinn")
import djinn.errors, djinn.plugins.manager
assert "torch" not in sys.modules
import djinn
try: djinn.no_such_name
except AttributeError as error: print(error)
assert "torch" in sys.modules
import torch
print(torch.ones(2, device="remote_accelerator:0").sum().item(), djinn.stats()["round_trips"])
postpone("djinn")
assert djinn.is_initialized()
""")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "module 'djinn' has no attribute 'no_such_name'\n2.0 1\n"


def test_commands_that_need_all_of_it_get_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import torch\nprint(torch.ones(3).sum().item())\n")
    out, script = str(tmp_path / "out"), str(tmp_path / "script.py")
    done = in_new_interpreter(f"from djinn_plugins.start import main; main(['trace', '--output', {out!r}, {script!r}])")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3.0\n")
    assert (tmp_path / "out.html").exists()

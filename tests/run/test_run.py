"""``djinn run``, and what ``import torch`` does, as their users meet them: on a guarded server, in new interpreters."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from support.processes.warm import clean_environment, run_djinn
from support.servers.serving import Serving

Write = Callable[..., Path]
DJINN = (sys.executable, "-c", "from djinn_plugins.start import main; main()")
CHOOSES = """
    import sys, torch
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 2)
    x = torch.arange(8.0).reshape(2, 4)
    print(device.type, layer.to(device)(x.to(device)).sum().item())
"""
"""Chooses its device as PyTorch's documentation recommends."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with Serving(tmp_path_factory.mktemp("server") / "log") as server:
        yield server.address


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(code: str, name: str = "script.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(code))
        return path

    return write


def python(*arguments: str, folder: Path, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=clean_environment(**environ), input=stdin,
                          capture_output=True, text=True, timeout=120, check=False)


def run(*arguments: str, folder: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run ``djinn run`` in an interpreter of its own, as a shell does."""
    return subprocess.run([*DJINN, "run", *arguments], cwd=folder, env=clean_environment(), input=stdin,
                          capture_output=True, text=True, timeout=120, check=False)


def test_a_script_computes_on_the_server_and_one_line_says_so(write: Write, served: str) -> None:
    script = write(CHOOSES)
    local = python(script.name, folder=script.parent)
    there = run_djinn("run", "--server", served, script.name, folder=script.parent)
    assert (there.returncode, local.returncode) == (0, 0), there.stderr
    device, value = there.stdout.split()
    assert ("cpu " + value, device) == (local.stdout.strip(), "remote_accelerator")
    assert re.fullmatch(rf"djinn run: \d+ operations on {served} \(cpu\), 1 round trip, [\d.]+ k?B?(bytes)? sent, "
                        r"[\d.]+ \w+ received, [\d.]+ s\n", there.stderr), there.stderr


def test_a_script_that_does_not_use_the_device_is_told_and_fails_if_that_matters(write: Write) -> None:
    script = write("import torch; print(torch.ones(3).sum().item())")
    lenient = run_djinn("run", script.name, folder=script.parent)
    assert (lenient.returncode, lenient.stdout) == (0, "3.0\n")
    first, second = lenient.stderr.splitlines()
    assert first.startswith("djinn run: nothing ran on this process (cpu); ")
    assert "has not used the device" in second
    strict = run_djinn("run", "--strict", script.name, folder=script.parent)
    assert strict.returncode == 3
    assert strict.stderr.splitlines()[-1] == "djinn run: The exit status is 3, because of --strict."
    failing = write("raise SystemExit(5)")
    failed = run_djinn("run", "--strict", failing.name, folder=script.parent)
    assert (failed.returncode, len(failed.stderr.splitlines())) == (5, 1), failed.stderr


def test_what_is_wrong_is_said_before_the_script_starts(write: Write) -> None:
    script = write("print('started')")
    wrong = (["missing.py"], ["-m", "missing_module"], ["--server", "tcp://127.0.0.1:9", script.name],
             ["--as", "missing", script.name], ["--server", "nowhere", script.name])
    done = [run_djinn("run", *arguments, folder=script.parent) for arguments in wrong]
    assert [(each.returncode, each.stdout) for each in done] == [(1, "")] * len(wrong)
    assert [each.stderr.split()[1] for each in done] == ["[DJ101]", "[DJ101]", "[DJ301]", "[DJ201]", "[DJ101]"]


TELLS = """
    import __main__, pickle, sys, threading
    class Own: pass
    print(sys.argv, sys.path[0], __name__, __main__.__dict__ is globals(), __file__, __package__, __cached__)
    print(__spec__ and __spec__.name, type(__loader__).__name__, pickle.loads(pickle.dumps(Own)) is Own)
    print(sys.excepthook is sys.__excepthook__, "annotations" in globals())
"""


@pytest.mark.parametrize("arguments", [
    ["folder/script.py", "1", "--strict"], ["-m", "folder.script", "-m"], ["folder"]], ids=" ".join)
def test_a_script_sees_what_it_sees_with_python(arguments: list[str], write: Write, tmp_path: Path) -> None:
    for name in ("folder/script.py", "folder/__main__.py"):
        write(TELLS, name)
    local = python(*arguments, folder=tmp_path)
    there = run_djinn("run", *arguments, folder=tmp_path)
    assert local.returncode == 0, local.stderr
    assert there.stdout == local.stdout


def test_a_script_reads_what_is_typed(write: Write, tmp_path: Path) -> None:
    write("import sys; print(sys.stdin.read(), sys.path[0])")
    for arguments, typed in ((["script.py"], "typed"), (["-", "1"], "import sys; print(sys.argv, repr(sys.path[0]))")):
        assert run(*arguments, folder=tmp_path, stdin=typed).stdout == (
            python(*arguments, folder=tmp_path, stdin=typed).stdout)


FAILS = {
    "exception": "def f():\n    raise ValueError('no')\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    f()\n",
    "syntax": "def f(:\n    pass\n",
    "message": "import sys\nsys.exit('a message')\n",
    "hooks": "import atexit, sys, threading\natexit.register(lambda: print('last'))\n"
             "threading.Timer(0.3, lambda: print('later')).start()\n"
             "sys.excepthook = lambda kind, error, trace: print(kind, error, trace.tb_lineno)\nraise KeyError(1)\n",
    "interrupt": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n",
}


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("name", FAILS)
def test_a_script_fails_as_with_python(name: str, write: Write) -> None:
    script = write(FAILS[name])
    local = python(script.name, folder=script.parent)
    # How an interpreter ends matters where hooks and signals do.
    begin = partial(run_djinn, "run") if name in ("exception", "syntax", "message") else run
    there = begin(script.name, folder=script.parent)
    assert (there.returncode, there.stdout) == (local.returncode, local.stdout)
    told = [line for line in there.stderr.splitlines() if not line.startswith("djinn run: ")]
    assert told == local.stderr.splitlines()
    assert len(told) < len(there.stderr.splitlines())


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_a_script_as_it_ends_python(write: Write) -> None:
    script = write("import time; print('ready', flush=True); time.sleep(60)")
    with subprocess.Popen([*DJINN, "run", script.name], cwd=script.parent, env=clean_environment(),
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in errors
    assert "djinn_" not in errors


PROCESSES = """
    import multiprocessing, sys, torch

    class Squares(torch.utils.data.Dataset):
        def __len__(self):
            return 8
        def __getitem__(self, index):
            return torch.tensor(float(index)) ** 2

    def look(queue):
        queue.put((torch.accelerator.is_available(), str(torch.zeros(1).device)))

    if __name__ == "__main__":
        method = sys.argv[1]
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=look, args=(queue,))
        process.start()
        print(queue.get())
        process.join()
        loader = torch.utils.data.DataLoader(Squares(), 4, num_workers=1, multiprocessing_context=method)
        device = torch.accelerator.current_accelerator()
        print(process.exitcode, [batch.to(device).sum().item() for batch in loader])
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_of_a_script_are_in_the_same_mode(method: str, write: Write, served: str) -> None:
    script = write(PROCESSES)
    done = run("--server", served, script.name, method, folder=script.parent)
    assert (done.returncode, done.stdout) == (0, "(True, 'cpu')\n0 [14.0, 126.0]\n"), done.stderr
    assert done.stderr.count("djinn run: ") == 1
    assert "Exception ignored" not in done.stderr


def test_import_torch_loads_the_device_if_a_server_or_a_mode_is_set(tmp_path: Path, served: str) -> None:
    code = ("import torch; print(torch.ones(3, device=torch.device('remote_accelerator:0')).sum().item(), "
            "torch.accelerator.is_available())")
    loaded = python("-c", code, folder=tmp_path, DJINN_SERVER=served)
    assert (loaded.stdout, loaded.stderr) == ("3.0 False\n", "")
    moded = python("-c", code, folder=tmp_path, DJINN_SERVER=served, DJINN_RUN_AS="accelerator")
    assert moded.stdout == "3.0 True\n"
    assert re.match(rf"djinn run: \d+ operations on {served} \(cpu\), 1 round trip, ", moded.stderr)
    assert python("-c", f"import djinn; {code}", folder=tmp_path, DJINN_RUN_AS="accelerator").stdout == "3.0 True\n"


@pytest.mark.parametrize("environ", [{}, {"DJINN_SERVER": "tcp://127.0.0.1:9", "DJINN_AUTOLOAD": "0"}], ids=str)
def test_import_torch_loads_nothing_otherwise(environ: dict[str, str], tmp_path: Path) -> None:
    code = "import sys, torch; print(*sorted(name for name in sys.modules if name.startswith('djinn')))"
    assert python("-c", code, folder=tmp_path, **environ).stdout == "djinn_plugins djinn_plugins.autoload\n"


def test_import_torch_warns_of_what_cannot_be_loaded_and_goes_on(tmp_path: Path) -> None:
    code = "import torch; print(torch.ones(2).sum().item())"
    missing = python("-c", code, folder=tmp_path, DJINN_RUN_AS="missing")
    assert missing.stdout == "2.0\n"
    assert "djinn was not loaded with `import torch`: [DJ201] There is no mode 'missing'." in missing.stderr
    (tmp_path / "djinn.py").write_text("raise OSError('broken')")
    broken = python("-c", code, folder=tmp_path, DJINN_AUTOLOAD="1", PYTHONPATH=str(tmp_path))
    assert broken.stdout == "2.0\n"
    assert "[DJ202] OSError: broken." in broken.stderr


def test_a_server_is_in_no_mode(write: Write, tmp_path: Path) -> None:
    write("""
        import os
        from djinn_plugins.start import main

        try:
            main(["--version"])
        finally:
            import torch
            print(torch.accelerator.is_available(), os.environ.get("DJINN_RUN_AS"))
    """)
    assert python("script.py", folder=tmp_path, DJINN_RUN_AS="accelerator").stdout == "djinn 0.1.0\nFalse None\n"

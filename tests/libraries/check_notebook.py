"""``%load_ext djinn`` and ``%djinn``, in IPython's own shell."""

from __future__ import annotations

from pathlib import Path

from support.processes.warm import run_python
from support.servers.serving import Serving

CELLS = """
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
for cell in CELLS:
    result = shell.run_cell(cell)
    print("failed" if result.error_in_exec else "done", flush=True)
"""


def test_a_notebook_chooses_server_and_mode(tmp_path: Path) -> None:
    with Serving(tmp_path / "log") as server:
        cells = ["import torch; print(torch.accelerator.is_available())", "%load_ext djinn", "%djinn",
                 "print(torch.accelerator.is_available())", f"%djinn --server {server.address} --as accelerator",
                 "print(torch.ones(3, device=torch.accelerator.current_accelerator()).sum().item())", "%djinn",
                 "%djinn --as missing", "%djinn --sever x", "%unload_ext djinn",
                 "print(torch.accelerator.is_available())"]
        done = run_python(f"CELLS = {cells!r}\n{CELLS}", folder=tmp_path, IPYTHONDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line]
    assert lines[:5] == ["False", "done", "done", lines[3], "done"], done.stdout
    assert lines[3].startswith("accelerator: nothing ran on the device; ")
    assert lines[5:7] == ["True", "done"]
    assert lines[7].startswith(f"accelerator: nothing ran on {server.address} (cpu); ")
    assert lines[9:11] == ["3.0", "done"]
    assert f" operations on {server.address} (cpu), 1 round trip, " in lines[11]
    assert "[DJ201] There is no mode 'missing'." in done.stdout + done.stderr
    assert "[DJ101] %djinn: unrecognized arguments: --sever x" in done.stdout + done.stderr
    assert lines[-2:] == ["False", "done"]

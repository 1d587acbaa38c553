"""``djinn run --as cuda``, with scripts that say "cuda", on a guarded server: they print what the CPU computes."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes.warm import clean_environment, run_djinn
from support.servers.serving import Serving

PROGRAMS = Path(__file__).parents[1] / "support" / "programs"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with Serving(tmp_path_factory.mktemp("server") / "log") as server:
        yield server.address


def run_anew(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """As `run_djinn`, in an interpreter of its own, which can have child processes."""
    program = "from djinn_plugins.start import main; main()"
    return subprocess.run([sys.executable, "-c", program, *arguments], cwd=folder, env=clean_environment(),
                          capture_output=True, text=True, check=False)


def on_the_cpu(script: Path) -> str:
    done = subprocess.run([sys.executable, str(script), "--cpu"], env=clean_environment(), capture_output=True,
                          text=True, check=True)
    return done.stdout


@pytest.mark.parametrize("name", ["cuda_training.py", "cuda_inference.py"])
def test_a_script_for_cuda_prints_what_the_cpu_computes(name: str, served: str, tmp_path: Path) -> None:
    script = PROGRAMS / name
    assert "djinn" not in script.read_text()
    there = run_anew("run", "--server", served, "--as", "cuda", "--strict", str(script), folder=tmp_path)
    assert there.returncode == 0, there.stderr
    assert there.stdout == on_the_cpu(script)
    assert re.search(rf"^djinn run: \d+ operations on {served} \(cpu\), ", there.stderr, re.MULTILINE), there.stderr
    assert "compared with 'cuda'" not in there.stderr


def test_a_comparison_that_is_false_here_is_named_once(served: str, tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("def where(x):\n    return x.device.type == 'cuda', x.is_cuda\n")
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent("""
        import torch
        from helper import where
        device = torch.device("cuda")
        print(device.type == "cuda", *where(torch.ones(2, device=device)))
    """))
    there = run_djinn("run", "--server", served, "--as", "cuda", "script.py", folder=tmp_path)
    assert (there.returncode, there.stdout) == (0, "True False True\n"), there.stderr
    [line] = [line for line in there.stderr.splitlines() if "is_cuda" in line]
    assert line.startswith(f"djinn run: {tmp_path / 'helper.py'}:2: a device is compared with 'cuda'.")


def test_processes_of_the_program_see_it_too(served: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent("""
        import subprocess, sys, torch
        from torch.utils.data import DataLoader, Dataset

        class Data(Dataset):
            def __len__(self): return 2
            def __getitem__(self, index): return torch.full((1,), float(torch.cuda.is_available()))

        if __name__ == "__main__":
            for start in ("fork", "spawn"):
                loader = DataLoader(Data(), batch_size=2, num_workers=1, multiprocessing_context=start)
                [batch] = loader
                print(batch.cuda().sum().item())
            code = "import torch; print(torch.ones(2, device='cuda').sum().item())"
            subprocess.run([sys.executable, "-c", code], check=True)
    """))
    there = run_anew("run", "--server", served, "--as", "cuda", "script.py", folder=tmp_path)
    assert (there.returncode, there.stdout) == (0, "2.0\n2.0\n2.0\n"), there.stderr


def test_without_a_server_it_is_the_cpu_of_this_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import torch; print(torch.ones(2, device='cuda').sum().item(), torch.cuda.device_count())")
    there = run_djinn("run", "--as", "cuda", "script.py", folder=tmp_path)
    assert (there.returncode, there.stdout) == (0, "2.0 1\n"), there.stderr
    assert "on this process (cpu)" in there.stderr

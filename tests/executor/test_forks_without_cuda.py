"""A server starts CUDA in its workers only: a process that has started it must not fork."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes.warm import run_python

# A driver with two devices, which writes down who starts it.
DRIVER = r"""
#include <stdio.h>
#include <stdlib.h>

int cuInit(unsigned int flags) {
    FILE *command = fopen("/proc/self/cmdline", "r"), *log = fopen(getenv("DRIVER_LOG"), "a");
    fputs("begin:", log);
    for (int letter = fgetc(command); letter != EOF; letter = fgetc(command))
        fputc(letter ? letter : ' ', log);
    return fclose(log);
}

int cuDeviceGetCount(int *count) {
    *count = 2;
    return 0;
}
"""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
# A PyTorch with CUDA and two devices, as far as Python sees. Whatever would start CUDA says who called it.
BELIEVED = """
import sys
from pathlib import Path
import torch

def starting(name):
    def start(*args, **kwargs):
        who = Path("/proc/self/comm").read_text().strip()
        sys.stderr.write(f"started {name} in {who}\\n")
        sys.stderr.flush()
        raise RuntimeError(f"{name}: there is no CUDA here")
    return start

torch.version.cuda = "13.0"
torch.cuda._is_compiled = lambda: True
torch.cuda._device_count_nvml = lambda: -1 if NO_LIBRARY else 2
torch.cuda._lazy_init = starting("init")
for name in ("_cuda_init", "_cuda_getDeviceCount", "_cuda_getDevice", "_cuda_setDevice"):
    setattr(torch._C, name, starting(name))
from djinn_plugins.cli.app import main
main()
"""


def started_by(program: str, device: str, **environment: str) -> set[str]:
    """Serve a device, and return which processes have tried to start CUDA."""
    done = run_python(program, "serve", *(("--device", device) if device else ()), has_djinn=True, **environment)
    assert done.returncode != 0
    return {line.rpartition(" in ")[2] for line in done.stderr.splitlines() if line.startswith("started ")}


@pytest.mark.parametrize(("visible", "device"), [("", "cuda:1"), ("", ""), ("MIG-0aa1,MIG-0bb2", "cuda:1")])
def test_no_process_that_forks_starts_cuda(visible: str, device: str) -> None:
    # With instances, the driver's library does not count, and PyTorch would ask CUDA itself.
    environment = {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
    program = BELIEVED.replace("NO_LIBRARY", repr(bool(visible)))
    assert started_by(program, device, **environment) == {"djinn-worker"}


@pytest.mark.skipif(shutil.which("cc") is None, reason="a C compiler is needed")
def test_without_the_drivers_library_another_process_asks_the_driver(tmp_path: Path) -> None:
    source, log = tmp_path / "driver.c", tmp_path / "log"
    source.write_text(DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", source], check=True)
    program = BELIEVED.replace("NO_LIBRARY", "True")
    assert started_by(program, "", LD_LIBRARY_PATH=str(tmp_path), DRIVER_LOG=str(log)) == {"djinn-worker"}
    # The command line of a process that only counts contains what it does.
    asked = log.read_text()
    assert asked.count("begin:") == asked.count("cuDeviceGetCount") > 0, asked

"""A server starts CUDA in its workers only: a process that has started it must not fork."""

from __future__ import annotations

import sys

import pytest
from support.processes.warm import run_python

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
from djinn_cli.app import main
main()
"""


@pytest.mark.parametrize(("visible", "device"), [("", "cuda:1"), ("", ""), ("MIG-0aa1,MIG-0bb2", "cuda:1")])
def test_no_process_that_forks_starts_cuda(visible: str, device: str) -> None:
    # With instances, the driver's library does not count, and PyTorch would ask CUDA itself.
    program = BELIEVED.replace("NO_LIBRARY", repr(bool(visible)))
    environment = {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
    done = run_python(program, "serve", *(("--device", device) if device else ()), has_djinn=True, **environment)
    started = {line.rpartition(" in ")[2] for line in done.stderr.splitlines() if line.startswith("started ")}
    assert started == {"djinn-worker"}, done.stderr
    assert done.returncode != 0

"""After ``import djinn`` everything local is as it was."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.processes.warm import run_python

_PROBE = """
import json, sys, threading, warnings
warnings.simplefilter("ignore")
import torch
{prepare}
from torch.utils.data import DataLoader, TensorDataset
result = dict()
def attempt(name, f):
    try:
        result[name] = f()
    except Exception as error:
        result[name] = [type(error).__name__, str(error).split("\\n")[0][:80]]
attempt("pin_memory", lambda: torch.ones(2).pin_memory().tolist())
attempt("is_pinned", lambda: torch.ones(2).is_pinned())
data = TensorDataset(torch.arange(8.0))
attempt("loader", lambda: [b[0].tolist() for b in DataLoader(data, batch_size=4, pin_memory=True)])
attempt("workers", lambda: [b[0].tolist() for b in DataLoader(data, batch_size=4, num_workers=1, pin_memory=True)])
attempt("accelerator", lambda: str(torch.accelerator.current_accelerator(check_available=True)))
attempt("accelerator_unchecked", lambda: str(torch.accelerator.current_accelerator()))
attempt("accelerators", lambda: torch.accelerator.device_count())
attempt("accelerator_available", lambda: torch.accelerator.is_available())
attempt("default_device", lambda: str(torch.get_default_device()))
def seeds():
    torch.manual_seed(4)
    first = torch.randn(3).tolist()
    with torch.random.fork_rng(devices=[]):
        torch.randn(10)
    return [first, torch.randn(2).tolist(), torch.initial_seed()]
attempt("seeds", seeds)
def autograd():
    x = torch.ones(3, requires_grad=True)
    (x ** 2).sum().backward()
    return x.grad.tolist()
attempt("autograd", autograd)
def train():
    torch.manual_seed(0)
    m = torch.nn.Linear(2, 2)
    o = torch.optim.AdamW(m.parameters())
    m(torch.ones(1, 2)).sum().backward(); o.step()
    return m.weight.tolist()
attempt("train", train)
attempt("autocast", lambda: str(torch.autocast("cpu").fast_dtype))
attempt("lstm", lambda: torch.nn.LSTM(2, 2)(torch.ones(1, 1, 2))[0].shape)
attempt("type", lambda: type(torch.ones(1)).__name__)
print(json.dumps(result))
"""


def _run(prepare: str) -> dict[str, object]:
    script = _PROBE.replace("{prepare}", prepare)
    done = run_python(script)
    assert done.returncode == 0, done.stderr
    made: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
    return made


@pytest.mark.parametrize("prepare", [
    "import djinn",
    "import djinn; torch.ones(2, device='remote_accelerator').sum().item()",
], ids=["imported", "used"])
def test_local_life_goes_on(prepare: str) -> None:
    assert _run(prepare) == _run("")


def test_import_opens_nothing_and_starts_nothing() -> None:
    script = """
import socket, threading, torch
threads = threading.active_count()
def refuse(*a, **k): raise AssertionError("a socket was opened")
socket.socket.connect = refuse
import djinn
assert threading.active_count() == threads
assert not djinn.is_initialized()
assert torch.device("remote_accelerator:0").index == 0
"""
    done = run_python(script)
    assert done.returncode == 0, done.stderr


@pytest.mark.alone
def test_import_is_quick() -> None:
    # Processor time, of which other processes take nothing; the best of a few, since they do empty the caches.
    script = "import time, torch; begin = time.process_time(); import djinn; print(time.process_time() - begin)"
    took_s: list[float] = []
    while len(took_s) < 8 and min(took_s, default=1.0) > 0.150:
        took_s.append(float(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True,
                                           timeout=120).stdout))
    assert min(took_s) <= 0.150, took_s


def test_another_package_took_the_device() -> None:
    script = """
import torch, warnings
torch.utils.rename_privateuse1_backend("npu")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import djinn
assert any("npu" in str(w.message) for w in caught), caught
with djinn.capture() as captured:
    x = torch.ones(3, 3)
    y = (x @ x).sum()
assert isinstance(y, djinn.LazyTensor)
assert y.item() == 27.0
assert len(captured.graph) >= 2
"""
    done = run_python(script)
    assert done.returncode == 0, done.stderr


def test_a_forked_child_leaves_the_session_alone() -> None:
    script = """
import os, torch, djinn
x = torch.ones(2, device="remote_accelerator:0")
assert x.sum().item() == 2
pid = os.fork()
if pid == 0:
    try:
        x.sum().item()
    except djinn.SessionClosedError:
        os._exit(0)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert x.sum().item() == 2
"""
    done = run_python(script)
    assert done.returncode == 0, done.stderr

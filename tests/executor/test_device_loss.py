"""A device that is lost to a worker's process: what its sessions learn, and that another process takes its place."""

from __future__ import annotations

import sys
import threading
from functools import partial
from typing import Any

import pytest
import torch
from support.processes.warm import run_python
from support.servers.serving import Serving

import djinn
from djinn.errors import DeviceLostError
from djinn.plugins import Plugins
from djinn_plugins.common.kinds.guard import Bounds
from djinn_plugins.common.options import ListenOptions
from djinn_plugins.executor.cpu.executor import CpuExecutor
from djinn_plugins.executor.cuda.executor import reason_of_loss
from djinn_plugins.server.server import Server

DEVICE = "remote_accelerator:0"


class BrittleExecutor(CpuExecutor):
    """Its device is lost when a value of 13 was read."""

    reason = ""

    def lend(self, value: torch.Tensor) -> torch.Tensor:
        if value.numel() == 2 and value[0].item() == 13:
            self.reason = "CUDA error: device-side assert triggered"
            raise RuntimeError(self.reason)
        return super().lend(value)

    def loss(self) -> str:
        return self.reason


def test_the_session_learns_why_and_the_process_ends() -> None:
    left = threading.Event()
    plugins = Plugins.load()
    watch = partial(plugins.choose("guard", "core").watch, Bounds("cpu", 2**30), plugins.choose("shapes", "meta"))
    listener = plugins.transport_for("tcp").listen("tcp://127.0.0.1:0", ListenOptions())
    server = Server(listener, BrittleExecutor(), admit=lambda channel, hello: None, watch=watch,
                    leave=left.set)
    with server:
        djinn.init(server=server.address, recovery="replay")
        # The client would compute a single number itself.
        value = torch.full((2,), 12.0, device=DEVICE)
        assert value.cpu().tolist() == [12.0, 12.0]
        assert not left.is_set()
        with pytest.raises((RuntimeError, DeviceLostError), match="device-side assert"):
            (value + 1).cpu()
        with pytest.raises(DeviceLostError, match=r"DJ320.*device cpu is lost.*device-side assert"):
            (value + 2).cpu()
        assert left.wait(60)
        djinn.shutdown()


# As on CUDA: one kernel fails, and after that every call of the process.
FRAGILE = """
import torch
import djinn.plugins
from djinn_plugins.executor.cpu.executor import CpuExecutor
from djinn_plugins.executor.cuda.executor import reason_of_loss
from djinn_plugins.common.calls.binding import bind
from djinn_plugins.executor.torch.executor import TorchProgram

class Fragile:
    is_lost = False

    def call(self):
        if self.is_lost:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered\\nCompile with ...")

class FragileProgram(TorchProgram):
    device = None

    def run_without(self, *args, **kwargs):
        self.device.call()
        outputs = super().run_without(*args, **kwargs)
        values = [value for value in outputs if isinstance(value, torch.Tensor) and value.numel() == 1]
        self.device.is_lost |= any(value.item() == 13 for value in values)
        return outputs

class FragileExecutor(CpuExecutor):
    name = "fragile"

    def __init__(self):
        super().__init__()
        self.fragile = Fragile()

    def compile_checked(self, program, checks):
        self.fragile.call()
        made = FragileProgram(program, bind(program, self._device, checks), self._lock, self.relieve)
        made.device = self.fragile
        return made

    def put(self, tensor):
        self.fragile.call()
        return super().put(tensor)

    adopt = put

    def get(self, value):
        self.fragile.call()
        return super().get(value)

    lend = get

    def loss(self):
        return reason_of_loss(self.fragile.call)

class Factory:
    name = "fragile"

    def devices(self):
        return ["cpu"]

    def open(self, device):
        return FragileExecutor()

djinn.plugins.register(Factory(), "executor")
"""
CLIENT = """
import sys
import torch, djinn

djinn.init(server=sys.argv[1])
value = torch.full((1,), 12.0, device="remote_accelerator:0")
here = torch.zeros(1, dtype=torch.int64, device="remote_accelerator:0")
value.take(here).cpu()
print("asked", flush=True)
for _ in range(2):
    try:
        (value.index_select(0, here) + 1).cpu()
    except Exception as error:
        print(f"{type(error).__name__}: {error}".replace("\\n", " "), flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells which processes there are")
def test_a_worker_whose_calls_raise_accelerator_errors_is_replaced_and_others_recover(tmp_path: Any) -> None:
    torch.manual_seed(0)
    with Serving(tmp_path / "log", "--plugins", "executor=fragile", "--isolate", "tenant", prelude=FRAGILE) as server:
        djinn.init(server=server.address, recovery="replay", log_level="ERROR")
        there = torch.rand(3, device=DEVICE)
        product = there * 2
        wanted = product.cpu()
        [worker] = server.workers
        guilty = run_python(CLIENT, server.address).stdout.splitlines()
        assert guilty[0] == "asked"
        assert guilty[-1].startswith("DeviceLostError: [DJ320]"), guilty
        assert "device-side assert triggered" in guilty[-1]
        assert all("check values there: aten::index_select." in text for text in guilty[1:]), guilty
        assert torch.equal((product + there).cpu(), wanted * 1.5)
        assert djinn.stats()["recoveries"] == 1
        assert worker not in server.workers
        djinn.shutdown()
        log = server.log.read_text()
    assert "The device cpu is lost: CUDA error: device-side assert triggered. The process ends." in log
    assert "is lost to a program of another session" in log


def test_a_lack_of_memory_is_no_loss() -> None:
    def failing(text: str) -> None:
        raise torch.AcceleratorError(text)

    assert reason_of_loss(lambda: True) == ""
    assert reason_of_loss(partial(failing, "CUDA error: out of memory")) == ""
    assert reason_of_loss(partial(failing, "CUDA error: unspecified launch failure\nCompile")) == (
        "CUDA error: unspecified launch failure")

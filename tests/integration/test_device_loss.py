"""A device that is lost to a worker's process: what its session learns, and that the process ends."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from djinn_executor_cpu.executor import CpuExecutor
from djinn_lib_service.kinds.guard import Bounds
from djinn_lib_service.options import ListenOptions
from djinn_server.server import Server

import djinn
from djinn.errors import DeviceLostError
from djinn.plugins import Plugins

DEVICE = "remote_accelerator:0"


class BrittleExecutor(CpuExecutor):
    """Its device is lost when a value of 13 was read."""

    reason = ""

    def lend(self, value: torch.Tensor) -> torch.Tensor:
        if value.numel() == 1 and value.item() == 13:
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
        value = torch.full((1,), 12.0, device=DEVICE)
        assert value.cpu().tolist() == [12.0]
        assert not left.is_set()
        with pytest.raises((RuntimeError, DeviceLostError), match="device-side assert"):
            (value + 1).cpu()
        with pytest.raises(DeviceLostError, match=r"DJ320.*device cpu is lost.*device-side assert"):
            (value + 2).cpu()
        assert left.wait(60)
        djinn.shutdown()

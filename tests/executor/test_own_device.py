"""A worker sees the one device that it was given: its environment says so before its executor is opened."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.servers.serving import Serving

import djinn
from djinn.kinds.backend_wrapper import unwrapped
from djinn.session import runtime
from djinn_plugins.common.device_report import device_of, summary_of

BOARDS = """
import os
import djinn.plugins
from djinn_plugins.executor.cpu.executor import CpuExecutor

class Board(CpuExecutor):
    opened_as = ""

    def properties(self):
        return {**super().properties(), "name": os.environ["BOARD"] + " as " + self.opened_as, "uuid": "a1b2"}

class Boards:
    name = "boards"

    def devices(self):
        return ["board:0", "board:1"]

    def alone(self, device):
        return {"BOARD": device}, "board:0"

    def open(self, device):
        made = Board()
        made.opened_as = device
        return made

djinn.plugins.register(Boards(), "executor")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="djinn serve needs what Linux has")
def test_a_worker_sees_only_the_device_that_it_was_given(tmp_path: Path) -> None:
    with Serving(tmp_path / "log", "--plugins", "executor=boards", "--device", "board:1", prelude=BOARDS) as server:
        djinn.init(server=server.address)
        told = device_of(unwrapped(runtime.current().backend).welcome)
        djinn.shutdown()
    assert told.name == "board:1 as board:0"
    assert summary_of(told).endswith("UUID a1b2")

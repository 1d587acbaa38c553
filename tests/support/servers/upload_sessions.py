"""Sessions that upload, and what the workers that serve them use of the memory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.servers.connection_options import connect_options

from djinn.ir.program import NumberArgument, Program, Step, Template, TensorArgument
from djinn.ir.schema import facts_of
from djinn.wire.messages import Batch, Define, Run, Upload
from djinn.wire.tensors import header_of
from djinn_plugins.client.upload_dedup import DedupConnection
from djinn_plugins.transport.tcp.client import connect

__all__ = ("DOUBLE", "SUM", "UploadSession", "steady_bytes", "template", "used_bytes")

T, N = TensorArgument(), NumberArgument()


def template(operator: Any, *arguments: Any, **keywords: Any) -> Template:
    facts = facts_of(operator)
    return Template(facts.name, facts.digest, arguments, tuple(keywords.items()))


DOUBLE = Program((template(torch.ops.aten.mul_.Scalar, T, N),), (Step(0, (-1,), 0),), 1, ())
SUM = template(torch.ops.aten.sum.default, T)


def used_bytes(server: Any) -> int:
    """What the workers use of the memory.

    A page of kept or stored weights that several of them use counts in each with its part. Other pages count if a
    worker has them for itself: what it shares with the processes that it was forked from, and with others that were, is
    a smaller part when more of these run.
    """
    try:
        texts = [Path(f"/proc/{worker}/smaps").read_text() for worker in server.workers]
    except PermissionError:
        pytest.skip("only root can read what a worker in its sandbox uses")
    return 1024 * sum(map(used_kib, texts))


def steady_bytes(server: Any) -> int:
    """Return what the workers use of the memory once they have returned what they have freed."""
    found = [used_bytes(server)]
    while len(found) < 5 or min(found[-5:]) < found[-5] - 2**20:
        time.sleep(0.2)
        found.append(used_bytes(server))
    return found[-1]


def used_kib(smaps: str) -> int:
    kib, is_kept = 0, False
    for line in smaps.splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            is_kept = "/memfd:" in line or ".safetensors" in line
        elif name in (("Pss:",) if is_kept else ("Private_Clean:", "Private_Dirty:")):
            kib += int(values[0])
    return kib


class UploadSession:
    """A session that uploads, doubles and adds, each tensor under a handle.

    Args:
        address: Of the server.
        options: See `connect_options`.
    """

    def __init__(self, address: str, **options: Any) -> None:
        self.connection = DedupConnection(connect(address, connect_options(**options)))
        self.ask(Define(1, DOUBLE), Define(2, Program((SUM,), (Step(0, (-1,), 1),), 1, (0,))))
        self.upload(1, torch.zeros(8))
        self.double(1)
        assert self.sum_of(1) == 0

    def ask(self, *commands: Any, fetch: tuple[int, ...] = ()) -> list[torch.Tensor]:
        result, data = self.connection.request(Batch(list(commands), fetch=fetch, synchronize=True), ())
        assert not result.failures, result.failures
        return data

    def upload(self, handle: int, tensor: torch.Tensor) -> None:
        self.connection.submit(Batch([Upload(handle, header_of(tensor))]), [tensor])

    def double(self, handle: int) -> None:
        self.ask(Run(1, (handle,), [2.0], ()))

    def sum_of(self, handle: int) -> float:
        return float(self.ask(Run(2, (handle,), [], (1000,)), fetch=(1000,))[0])

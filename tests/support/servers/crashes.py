"""Servers that are killed and come back, and programs that must not notice."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import torch
from support.processes.warm import WarmPython, clean_environment
from torch import nn

import djinn
from djinn.kinds.backend_wrapper import unwrapped

START_TIMEOUT_S = 120.0
DEVICE = "remote_accelerator:0"
# Everything is imported once, so that a server that was killed has a successor within the time that a fork takes. There
# is no gateway before it for that reason: a worker of one imports everything anew.
PROGRAM = """
import ctypes, os, signal, sys
from functools import partial
import torch
import djinn_plugins.guard.guard
from djinn_plugins.common.kinds.guard import Bounds
from djinn_plugins.common.options import ListenOptions
from djinn.plugins import Plugins
from djinn_plugins.server.peers import PeerPolicy
from djinn_plugins.server.server import Server
plugins = Plugins.load()
djinn_plugins.guard.guard._warm_up()
def die_with_parent():
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
def serve():
    torch.set_num_threads(1)
    executor = plugins.find_executor("cpu").value.open("cpu")
    guard, shapes = plugins.choose("guard", "core"), plugins.choose("shapes", "meta")
    listener = plugins.transport_for("tcp").listen(f"tcp://127.0.0.1:{sys.argv[1]}", ListenOptions())
    watch = partial(guard.watch, Bounds("cpu", 2**33), shapes)
    server = Server(listener, executor, admit=lambda channel, hello: None, watch=watch,
                    transport_for=plugins.transport_for, peers=PeerPolicy.parse("", is_private=True))
    server.start()
    print("djinn serving", server.address, flush=True)
    signal.pause()
die_with_parent()
while True:
    child = os.fork()
    if not child:
        die_with_parent()
        serve()
    print("pid", child, flush=True)
    os.waitpid(child, 0)
"""


def free_port() -> int:
    """Find a port that no outgoing connection takes while its server starts again: below those, on Linux."""
    while True:
        port = random.SystemRandom().randrange(15000, 32000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Supervised:
    """A server on one port, started again whenever it dies."""

    def __init__(self, log: Path) -> None:
        self.port = free_port()
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.pid = 0
        self.starts = 0
        self._changed = threading.Condition()
        self._parent = WarmPython(PROGRAM, [str(self.port)], environment=clean_environment(), log=log,
                                  has_djinn=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.wait_for(1)

    def _read(self) -> None:
        for line in self._parent.stdout:
            with self._changed:
                if line.startswith("pid "):
                    self.pid = int(line.split()[1])
                elif line.startswith("djinn serving "):
                    self.starts += 1
                self._changed.notify_all()

    def wait_for(self, starts: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.starts >= starts, START_TIMEOUT_S), "the server does not start"

    def kill(self) -> None:
        """Kill the server that runs now, and return when its successor accepts connections."""
        starts = self.starts
        os.kill(self.pid, signal.SIGKILL)
        self.wait_for(starts + 1)

    def end(self) -> None:
        """Kill the server and whoever would start it again."""
        self._parent.kill()
        self._parent.wait()
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._reader.join(10)
        self._parent.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.end()


@contextmanager
def killed(server: Supervised, times: int, seed: int, longest_s: float = 0.5) -> Iterator[list[float]]:
    """Kill the server at random moments while the block runs: each time, the session has recovered from the last."""
    choose, done, kills = random.Random(seed), threading.Event(), list[float]()

    def work() -> None:
        for index in range(times):
            while unwrapped(djinn.ensure_initialized().backend)._counts["recoveries"] < index:
                if done.wait(0.005):
                    return
            if done.wait(choose.uniform(0, longest_s)):
                return
            server.kill()
            kills.append(time.monotonic())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield kills
    finally:
        done.set()
        thread.join(START_TIMEOUT_S)


class Net(nn.Module):
    """A small network with everything that makes training hard to repeat: dropout, running statistics."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.2),
                                    nn.Linear(width, width), nn.LayerNorm(width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def trained(
    steps: int, after_step: Callable[[int], Any] = lambda step: None, *, asks_every: int = 5
) -> dict[str, torch.Tensor]:
    """Train with AdamW, and bring all parameters, buffers and the state of the random numbers home.

    Args:
        steps: How many.
        after_step: Called after each step.
        asks_every: After how many steps the loss is asked for; 0 for never.
    """
    torch.manual_seed(1)
    model = Net().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = torch.randn(5, 32, 64)
    for step in range(steps):
        batch = batches[step % len(batches)].to(DEVICE)
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if asks_every and step % asks_every == asks_every - 1:
            loss.item()
        after_step(step)
    made = {name: value.cpu() for name, value in model.state_dict().items()}
    return {**made, "random": djinn.ensure_initialized().random_state()}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same elements, NaN being NaN."""
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


def random_program(seed: int, device: str, disturb: Callable[[], Any] = lambda: None) -> list[torch.Tensor]:
    """Run a small program: views, writes through them, draws, values that go; ``disturb`` is called now and then."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    values = [torch.arange(20.0).view(4, 5).to(device), torch.randn(4, 5, device=device)]
    for _ in range(choose.randint(10, 40)):
        one, other = choose.choice(values), choose.choice(values)
        kind = choose.choice(["add", "view", "row", "write", "draw", "dropout", "go", "upload", "read", "disturb"])
        if kind == "add":
            values.append(one + other.sum())
        elif kind == "view":
            values.append(one.t() if one.dim() == 2 else one.view(-1))
        elif kind == "row":
            values.append(one[0] if one.dim() else one.detach())
        elif kind == "write":
            one.mul_(0.5).add_(other.mean())
        elif kind == "draw":
            values.append(torch.rand(3, device=device))
        elif kind == "dropout":
            one.copy_(nn.functional.dropout(one, 0.3))
        elif kind == "upload":
            values.append(torch.full((4, 5), choose.random()).to(device))
        elif kind == "go" and len(values) > 3:
            values = [value for value in values if value is not one]
        elif kind == "read":
            one.sum().item()
        elif kind == "disturb":
            disturb()
    return [value.cpu() for value in values]

"""What moving weights costs the memory of the client's process: run as a program, it prints one line of JSON.

Numbers are in MB (2**20 bytes). ``peak`` is the largest resident size since just before the move; ``anonymous`` the
largest part of it that belongs to no file, sampled, because mapped files are the system's cache and no copies.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import djinn

DEVICE = torch.device("remote_accelerator:0")
WIDTH = 1024
LAYER_MB = WIDTH * WIDTH * 4 / 2**20


def build(layers: int) -> torch.nn.Module:
    """Make a model of ``layers`` times 4 MB."""
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def held_mb(what: str) -> float:
    """What the system says of this process: VmRSS, VmHWM (the peak) or RssAnon."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{what}:"))


class Sampler:
    """Samples the anonymous memory until it is stopped."""

    def __init__(self) -> None:
        self.peak = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stopped.wait(0.001):
            self.peak = max(self.peak, held_mb("RssAnon"))

    def stop(self) -> float:
        self._stopped.set()
        self._thread.join()
        return self.peak


def measured(action: Callable[[], Any]) -> dict[str, Any]:
    """Carry out a move and say what it took."""
    # Threads, buffers and modules that the first use of anything makes are no part of it.
    torch.nn.Linear(4, 4).to(DEVICE).load_state_dict(torch.nn.Linear(4, 4).state_dict())
    torch.nn.Linear(4, 4, device=DEVICE).weight.cpu()
    djinn.synchronize()
    djinn.reset_stats()
    Path("/proc/self/clear_refs").write_text("5")
    before, anonymous = held_mb("VmRSS"), held_mb("RssAnon")
    sampler = Sampler()
    extra = action()
    djinn.synchronize()
    most = sampler.stop()
    return {"before": before, "peak": held_mb("VmHWM") - before, "anonymous": most - anonymous,
            "after": held_mb("VmRSS") - before, "stats": dict(djinn.stats()), "extra": extra}


def to_device(layers: int, _: str) -> dict[str, Any]:
    """Move a model; extra: what was held after each parameter."""
    model = build(layers)
    sizes: list[float] = []

    def move(parameter: torch.Tensor) -> torch.Tensor:
        # `Module.to` calls `_apply` with a function like this one.
        made = parameter.to(DEVICE)
        sizes.append(held_mb("VmRSS"))
        return made

    found = measured(lambda: model._apply(move))
    return {**found, "extra": [size - found["before"] for size in sizes]}


def construct(layers: int, _: str) -> dict[str, Any]:
    """Make a model on the device; extra: its parameters' device types."""
    kept: list[torch.nn.Module] = []

    def make() -> list[str]:
        with torch.device(DEVICE):
            kept.append(build(layers))
        return sorted({parameter.device.type for parameter in kept[0].parameters()})

    return measured(make)


def load_file(layers: int, path: str) -> dict[str, Any]:
    """Load a state dict from a file into a model that is on the device."""
    import safetensors.torch

    with torch.device(DEVICE):
        model = build(layers)
    return measured(lambda: str(model.load_state_dict(safetensors.torch.load_file(path))))


def safe_open(layers: int, path: str) -> dict[str, Any]:
    """Load tensor by tensor."""
    import safetensors

    with torch.device(DEVICE):
        model = build(layers)

    def load() -> str:
        parameters = dict(model.named_parameters())
        with safetensors.safe_open(path, framework="pt", device="cpu") as file, torch.no_grad():
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                parameters[name].copy_(file.get_tensor(name))
        return ""

    return measured(load)


def main() -> None:
    """Arguments: the server's address, the name of a move, layers, a file."""
    address, move, layers, path = sys.argv[1:]
    djinn.init(server=address)
    moves = {function.__name__: function for function in (to_device, construct, load_file, safe_open)}
    print(json.dumps(moves[move](int(layers), path)))


if __name__ == "__main__":
    main()

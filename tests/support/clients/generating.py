"""A process that generates on two servers when it is told to, and says how long that took.

Run as ``python -m support.clients.generating SERVERS PLACEMENT PROMPT_TOKENS NEW_TOKENS ROUNDS``; it prints ``ready``,
and after each line on its standard input the seconds of one generation.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Mapping, Sequence

import torch
from support.models.gpt2 import generated, gpt2

import djinn
from djinn.ir.tape import Node
from djinn.kinds.backend_wrapper import unwrapped
from djinn_plugins.fleet.directory import Directory
from djinn_plugins.fleet.fleet import Fleet
from djinn_plugins.fleet.placement import Placed
from djinn_plugins.schedule.schedule import DeviceProfile, LinkProfile

MODEL = {"n_layer": 6, "n_embd": 384, "n_head": 6, "vocab_size": 5000, "n_positions": 1024}


class InTurns:
    """Each program on the next server, as a balancer that knows nothing of what it balances would have it."""

    shares_generator = True

    def __init__(self, executors: int) -> None:
        self._turns = itertools.cycle(range(executors))

    def house(self, size_bytes: int, device: torch.device | None, where: Directory) -> int:
        return next(self._turns)

    def place(self, nodes: Sequence[Node], gone: set[int], where: Directory) -> Placed:
        turn = next(self._turns)
        return [(node, turn) for node in nodes]

    def pin(self, executor: int | None) -> None:
        """Keep to the turns."""

    def learn(self, executor: int, profile: DeviceProfile, home_link: LinkProfile,
              links: Mapping[int, LinkProfile]) -> None:
        """Keep to the turns."""


def main(servers: str, placement: str, prompt_tokens: str, new_tokens: str) -> None:
    torch.set_num_threads(1)
    model = gpt2(**MODEL)
    prompt = torch.arange(int(prompt_tokens)).remainder(MODEL["vocab_size"]).unsqueeze(0)
    wanted = generated(model, prompt, int(new_tokens))
    session = djinn.init(servers=servers.split(","), placement="automatic", recovery="none")
    assert isinstance(unwrapped(session.backend), Fleet)
    if placement == "in_turns":
        session.backend.placing.use(InTurns(len(session.backend.executors)))
    model.to("remote_accelerator:0")
    there = prompt.to("remote_accelerator:0")
    for _ in range(2):
        assert torch.equal(generated(model, there, int(new_tokens)), wanted)
    print("ready", flush=True)
    for _ in sys.stdin:
        djinn.reset_stats()
        begin = time.perf_counter()
        made = generated(model, there, int(new_tokens))
        seconds = time.perf_counter() - begin
        assert torch.equal(made, wanted)
        print(seconds, djinn.stats()["bytes_transferred"], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

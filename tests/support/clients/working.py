"""A process that trains or generates on a server, and says how far it has come and what came out.

Run as ``python -m support.clients.working KIND SERVER STEPS PERMISSION``; it prints ``step N`` after each step, and
``digest ...`` of all results in the end. Half of the way it waits until there is a file of the name PERMISSION.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from support.models.gpt2 import PROMPT, generated, gpt2
from support.servers.crashes import DEVICE, trained

import djinn


def digest_of(results: list[torch.Tensor]) -> str:
    made = hashlib.sha256()
    for result in results:
        made.update(result.contiguous().numpy().tobytes())
    return made.hexdigest()


class Steps:
    """Says how far it has come; goes beyond half of the way when a file is there."""

    def __init__(self, count: int, permission: str) -> None:
        self._half, self._permission = count // 2, Path(permission)

    def __call__(self, step: int) -> None:
        print("step", step, flush=True)
        while step + 1 == self._half and not self._permission.exists():
            time.sleep(0.01)


def generates(steps: int, said: Callable[[int], None]) -> list[torch.Tensor]:
    model = gpt2(n_layer=2, n_embd=64, n_head=2, vocab_size=500, n_positions=64).to(DEVICE)
    prompt = PROMPT.remainder(500).to(DEVICE)
    made = []
    for step in range(steps):
        made.append(generated(model, prompt, 8).cpu())
        said(step)
    return made


def main(kind: str, server: str, steps: str, permission: str) -> None:
    torch.set_num_threads(1)
    djinn.init(server=server, connect_timeout_s=60)
    said = Steps(int(steps), permission)
    if kind == "trains":
        made = trained(int(steps), said)
        results = [made[name] for name in sorted(made)]
    else:
        results = generates(int(steps), said)
    print("digest", digest_of(results), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

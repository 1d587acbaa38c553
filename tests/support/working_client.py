"""A process that trains or generates on a server, and says how far it has come and what came out.

Run as ``working_client.py KIND SERVER STEPS``; it prints ``step N`` after each step, and ``digest ...`` of all results
in the end.
"""

from __future__ import annotations

import hashlib
import sys

import torch
from gpt2 import PROMPT, generated, gpt2
from killing import DEVICE, trained

import djinn


def digest_of(results: list[torch.Tensor]) -> str:
    made = hashlib.sha256()
    for result in results:
        made.update(result.contiguous().numpy().tobytes())
    return made.hexdigest()


def said(step: int) -> None:
    print("step", step, flush=True)


def generates(steps: int) -> list[torch.Tensor]:
    model = gpt2(n_layer=2, n_embd=64, n_head=2, vocab_size=500, n_positions=64).to(DEVICE)
    prompt = PROMPT.remainder(500).to(DEVICE)
    made = []
    for step in range(steps):
        made.append(generated(model, prompt, 8).cpu())
        said(step)
    return made


def main(kind: str, server: str, steps: str) -> None:
    torch.set_num_threads(1)
    djinn.init(server=server, connect_timeout_s=60)
    if kind == "trains":
        made = trained(int(steps), said)
        results = [made[name] for name in sorted(made)]
    else:
        results = generates(int(steps))
    print("digest", digest_of(results), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""What GPT-2 costs the memory of a client: run as a program, it prints JSON of row, bytes and nodes.

Each is a growth of the resident set, over many forwards, so that what is allocated once does not count.
"""

from __future__ import annotations

import gc
import json
import sys

import torch
from support.clients.weights import held_mb
from support.models import gpt2

import djinn

DEVICE = "remote_accelerator:0"
FORWARDS = 20


def resident() -> float:
    """Bytes that this process holds."""
    gc.collect()
    return held_mb("VmRSS") * 2**20


def main(address: str) -> None:
    """Measure, and print one line."""
    djinn.init(server=address, flush_every=None)
    ids = torch.arange(16, device=DEVICE)[None]
    with torch.device(DEVICE):
        small = gpt2.gpt2(n_layer=1, n_embd=32, n_head=4, vocab_size=64, n_positions=32)
    djinn.synchronize()
    before = resident()
    with torch.device(DEVICE):
        model = gpt2.gpt2()
    djinn.synchronize()
    found = [("the model's weights, on the server", sum(value.nbytes for value in model.parameters()), 0),
             ("the model, in the client", resident() - before, 0)]
    with torch.no_grad():
        for warmed in (small, model):
            with djinn.capture(warmed) as captured:
                warmed(ids)
            assert captured.annotated
        djinn.synchronize()
        before = resident()
        kept = [model(ids).logits for _ in range(FORWARDS)]
        found.append(("pending operations", resident() - before, djinn.stats()["pending_nodes"]))
        kept.clear()
        djinn.synchronize()
        blocks = []
        before = resident()
        for _ in range(FORWARDS):
            with djinn.capture(model) as captured:
                model(ids)
            blocks.append(captured)
            djinn.synchronize()
        nodes = sum(len(block.graph.nodes()) for block in blocks)
        found.append(("captured graphs", resident() - before, nodes))
        before = resident()
        assert all(block.annotated for block in blocks)
        found.append(("metadata of them, once somebody looks", resident() - before, nodes))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])

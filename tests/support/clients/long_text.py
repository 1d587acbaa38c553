"""Generates a long text on a server, and watches both processes meanwhile.

``python -m support.clients.long_text ADDRESS SERVER_PID TOKENS EVERY`` prints a list of samples as JSON, one for every
so many tokens: resident bytes of client and server, and the values that the server holds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from support.models import gpt2
from transformers import LogitsProcessor, LogitsProcessorList

import djinn

SMALL = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 512, "bos_token_id": 0, "eos_token_id": 511}
"""Small, so that the KV cache of 3,000 tokens, 1.5 MB in all, hides nothing."""


class Sampler(LogitsProcessor):
    """Takes the samples, and leaves the scores alone."""

    def __init__(self, server: int, every: int) -> None:
        self._server, self._every, self._calls = server, every, 0
        self.samples: list[tuple[int, int, int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._calls += 1
        if self._calls % self._every == 0:
            self.samples.append((resident_bytes("self"), resident_bytes(self._server), djinn.stats()["live_handles"]))
        return scores


def resident_bytes(process: int | str) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * 4096


def main() -> None:
    address, server, tokens, every = sys.argv[1], *map(int, sys.argv[2:])
    torch.set_num_threads(1)
    djinn.init(server=address)
    prompt = torch.arange(8)[None]
    model = gpt2.gpt2(n_positions=tokens + prompt.shape[1], **SMALL).to("remote_accelerator:0")
    sampler = Sampler(server, every)
    # The flag that a loop reads in each round, here never true, is sent early.
    with torch.no_grad():
        made = model.generate(prompt.to("remote_accelerator:0"), max_new_tokens=tokens, min_new_tokens=tokens,
                              do_sample=False, pad_token_id=0, logits_processor=LogitsProcessorList([sampler]))
    assert made.shape[1] == tokens + prompt.shape[1]
    stats = djinn.stats()
    print(json.dumps({"samples": sampler.samples, "plans": stats["shape_cache_misses"],
                      "early": stats["answered_early"]}))


if __name__ == "__main__":
    main()

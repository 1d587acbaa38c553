"""A process that decodes on a server with caches of keys and values, and says whether that gives what eager gives.

Run as ``python -m support.clients.decoding SERVER SEED TOKENS``; it prints ``ready`` once its weights are there, waits
for a line on its standard input, and prints ``equal`` or what differs.
"""

from __future__ import annotations

import sys

import torch
from support.models.small_gpt import HEADS, WIDTH, SmallGPT
from torch import nn
from torch.nn import functional

import djinn

BATCH = 2
PROMPT = 8


class Decoder(nn.Module):
    """The small GPT, one token at a time."""

    def __init__(self, model: SmallGPT) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, tokens: torch.Tensor, position: int, caches: list[tuple[torch.Tensor, torch.Tensor]] | None
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        model, grown = self.model, []
        x = model.tokens(tokens) + model.positions(torch.arange(
            position, position + tokens.shape[1], device=tokens.device))
        for index, block in enumerate(model.blocks):
            heads = block.attention(block.before_attention(x)).view(
                BATCH, tokens.shape[1], 3, HEADS, WIDTH // HEADS)
            query, key, value = heads.permute(2, 0, 3, 1, 4).unbind()
            if caches is not None:
                key, value = torch.cat([caches[index][0], key], 2), torch.cat([caches[index][1], value], 2)
            grown.append((key, value))
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=caches is None)
            x = x + block.projection(mixed.transpose(1, 2).reshape(BATCH, tokens.shape[1], WIDTH))
            x = x + block.mlp(block.before_mlp(x))
        return model.head(model.norm(x))[:, -1].argmax(-1, keepdim=True), grown


def decoded(decoder: Decoder, prompt: torch.Tensor, count: int) -> torch.Tensor:
    made = []
    with torch.no_grad():
        token, caches = decoder(prompt, 0, None)
        for position in range(PROMPT, PROMPT + count):
            made.append(token.cpu())
            token, caches = decoder(token, position, caches)
    return torch.cat(made, 1)


def main(server: str, seed: str, tokens: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(int(seed))
    decoder = Decoder(SmallGPT().eval())
    prompt = torch.randint(256, (BATCH, PROMPT))
    wanted = decoded(decoder, prompt, int(tokens))
    djinn.init(server=server)
    decoder.to("remote_accelerator:0")
    there = prompt.to("remote_accelerator:0")
    djinn.synchronize()
    print("ready", flush=True)
    sys.stdin.readline()
    got = decoded(decoder, there, int(tokens))
    print("equal" if torch.equal(got, wanted) else f"different: {got.tolist()} {wanted.tolist()}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

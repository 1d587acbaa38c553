"""Samples from a small model with generators, streams and events, as scripts for CUDA do; prints the samples."""

from __future__ import annotations

import argparse
import threading

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

parser = argparse.ArgumentParser()
parser.add_argument("--cpu", action="store_true", help="the same arithmetic, on the CPU")
arguments = parser.parse_args()

use_cuda = torch.cuda.is_available() and not arguments.cpu
where = "cuda:0" if use_cuda else "cpu"
torch.manual_seed(1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


embedding = nn.Embedding(11, 16).to(where)
blocks = nn.Sequential(Block(), Block()).to(where)
head = nn.Linear(16, 11).to(where)
generator = torch.Generator(device=where).manual_seed(7)


@torch.inference_mode()
def sample(tokens: torch.Tensor, count: int) -> torch.Tensor:
    for _ in range(count):
        with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
            logits = head(blocks(embedding(tokens)))[:, -1]
        drawn = torch.multinomial(torch.softmax(logits, -1), 1, generator=generator)
        tokens = torch.cat((tokens, drawn), dim=1)
    return tokens


start = torch.zeros(2, 1, dtype=torch.long, device=where)
if use_cuda:
    print(torch.cuda.device_count(), torch.cuda.current_device(), torch.cuda.get_device_name(0) != "")
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    begin.record()
    with torch.cuda.stream(side):
        made = sample(start, 6)
    torch.cuda.current_stream().wait_stream(side)
    end.record()
    torch.cuda.synchronize()
    assert begin.elapsed_time(end) > 0
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total
else:
    print(1, 0, True)
    made = sample(start, 6)
print(made.tolist())

noise = torch.randn(3, device=where, generator=generator)
other: list[torch.Tensor] = []
thread = threading.Thread(target=lambda: other.append(torch.full((3,), 2.0, device=where) * noise))
thread.start()
thread.join()
print(f"{other[0].sum().item():.6f}")
assert isinstance(generator, torch.Generator)

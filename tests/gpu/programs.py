"""Small programs whose results are compared on a device itself and through djinn.

Usage: python programs.py DEVICE FILE runs them on a device and saves the results. It does not import djinn: PyTorch
trains on one kind of accelerator in a process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Program = Callable[[str], torch.Tensor]
CLOSE = 1e-5
"""Relative distance in float32 that is allowed where kernels differ, as docs/cuda.md lists them."""


def drawn(*size: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def layer(make: Callable[[], nn.Module], *size: int, trains: bool = True) -> Program:
    """Make a program: a layer forward, and backward if it is to be trained."""

    def run(device: str) -> torch.Tensor:
        torch.manual_seed(0)
        module = make().to(device).train(trains)
        given = drawn(*size).to(device).requires_grad_(trains)
        with torch.set_grad_enabled(trains):
            out = module(given)
            out = out[0] if isinstance(out, tuple) else out
        if not trains:
            return out
        out.square().sum().backward()
        found = [out.detach(), given.grad, *(parameter.grad for parameter in module.parameters())]
        return torch.cat([tensor.flatten() for tensor in found if tensor is not None])

    return run


def trained(kind: Any, **options: Any) -> Program:
    def run(device: str) -> torch.Tensor:
        torch.manual_seed(0)
        layers = nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 8)
        model = nn.Sequential(*layers).to(device)
        optimizer = kind(model.parameters(), **options)
        given, wanted = drawn(4, 32).to(device), torch.arange(4, device=device)
        losses = []
        torch.manual_seed(1)
        for step in range(6):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(given + step), wanted)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses)

    return run


def attention(dtype: torch.dtype, **options: Any) -> Program:
    def run(device: str) -> torch.Tensor:
        query = drawn(4, 4, 16, 16).to(device, dtype).requires_grad_()
        F.scaled_dot_product_attention(query, query, query, **options).float().square().sum().backward()
        assert query.grad is not None
        return query.grad.float()

    return run


def random(draw: Callable[[str], torch.Tensor]) -> Program:
    def run(device: str) -> torch.Tensor:
        torch.manual_seed(7)
        return torch.cat([draw(device).flatten().double() for _ in range(3)])

    return run


def autocast(device: str) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Linear(32, 32).to(device)
    with torch.autocast(torch.device(device).type, torch.bfloat16), torch.no_grad():
        return model(drawn(4, 32).to(device)).softmax(-1)


def tf32(device: str) -> torch.Tensor:
    torch.set_float32_matmul_precision("high")
    try:
        return drawn(64, 64).to(device) @ drawn(64, 64, seed=4).to(device)
    finally:
        torch.set_float32_matmul_precision("highest")
        # That names a precision for products, where none was named before.
        for backend in (torch.backends.cuda, torch.backends.mkldnn):
            backend.matmul.fp32_precision = "none"


EXACT: Mapping[str, Program] = {
    "product": lambda device: drawn(16, 32).to(device) @ drawn(32, 32).to(device),
    "product in TF32": tf32,
    "sum": lambda device: drawn(1000).to(device).sum().reshape(1),
    "index": lambda device: drawn(100).to(device)[drawn(100).to(device) > 0.5],
    "sort": lambda device: drawn(100).to(device).sort()[0],
    "FFT": lambda device: torch.fft.fft(drawn(4, 32).to(device)).abs(),
    "rand": random(lambda device: torch.rand(1000, device=device)),
    "randn": random(lambda device: torch.randn(37, device=device)),
    "randperm": random(lambda device: torch.randperm(100, device=device)),
    "multinomial": random(lambda device: torch.multinomial(torch.ones(3, 50, device=device), 5)),
    "dropout": random(lambda device: F.dropout(torch.ones(999, device=device), 0.3)),
    "SGD": trained(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": trained(torch.optim.AdamW),
    "AdamW, fused": trained(torch.optim.AdamW, fused=True),
    "convolution": layer(lambda: nn.Conv2d(4, 8, 3), 2, 4, 9, 9),
    "LSTM cell": layer(lambda: nn.LSTMCell(32, 16), 4, 32),
    "LSTM": layer(lambda: nn.LSTM(32, 16), 7, 4, 32),
    "LSTM, without gradients": layer(lambda: nn.LSTM(32, 16), 7, 4, 32, trains=False),
    "GRU": layer(lambda: nn.GRU(32, 16, batch_first=True), 4, 7, 32),
    "RNN": layer(lambda: nn.RNN(32, 16, num_layers=2, bidirectional=True), 7, 4, 32),
    "attention": attention(torch.float32, is_causal=True),
    "attention in bfloat16": attention(torch.bfloat16, is_causal=True),
    "autocast": autocast,
}
"""Programs whose bits have to be equal."""
NEAR: Mapping[str, Program] = {
    "batch norm": layer(lambda: nn.BatchNorm1d(16), 4, 16, 32),
    "RMS norm": layer(lambda: nn.RMSNorm(32), 4, 32),
    "encoder layer": layer(lambda: nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), 4, 16, 32),
    "division by a number on the host": lambda device: drawn(100).to(device) / torch.tensor(3.0),
}
"""Programs whose results may differ by `CLOSE`: djinn takes other kernels."""


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return how far results are apart, relative to what is wanted; 0 if their bits are equal."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return float("inf")
    if torch.equal(found, wanted):
        return 0.0
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30))


def main(device: str, file: str) -> None:
    torch.save({name: run(device).detach().cpu() for name, run in {**EXACT, **NEAR}.items()}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A small model that is trained and used on a device; also a program that imports nothing of djinn."""

from __future__ import annotations

import json
import sys

import torch


def losses(device: str) -> list[float]:
    """Train for twenty steps; return the losses, and what the model makes of twenty inputs."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(6)]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    found = []
    for step in range(20):
        batch = torch.linspace(-1, 1 + step % 3, 128).reshape(8, 16).to(device)
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    with torch.inference_mode():
        return [*found, *(model(torch.full((1, 16), float(step), device=device)).sum().item() for step in range(20))]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(losses(sys.argv[1])))

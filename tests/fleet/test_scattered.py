"""Wherever operations run, results are eager's: views, writes, random numbers and models all over three executors."""

from __future__ import annotations

import copy

import pytest
import torch
from support.servers.fleet import fleet_of

import djinn
from djinn.session.session import Session
from djinn_conformance.random_placement import scatter

DEVICE = "remote_accelerator:0"


def test_views_and_writes(scattered: Session) -> None:
    def work(device: str) -> list[torch.Tensor]:
        x = torch.arange(24.0, device=device).reshape(4, 6)
        view, turned = x[1:3], x.T
        view.mul_(2)
        column = turned[2]
        y = column + view.sum()
        column.zero_()
        z = x @ turned
        view[0].copy_(z[0, :1].expand(6))
        x.view(-1)[::5].add_(y[0])
        return [x, view, turned, column, y, z]

    for seed in range(20):
        scatter(scattered, seed)
        for mine, wanted in zip(djinn.materialize(work(DEVICE)), work("cpu"), strict=True):
            assert torch.equal(mine, wanted), seed


def test_random_numbers_are_one_stream(scattered: Session) -> None:
    def work(device: str) -> list[torch.Tensor]:
        torch.manual_seed(7)
        return [torch.randn(5, device=device) + torch.rand(5, device=device) for _ in range(6)]

    for mine, wanted in zip(djinn.materialize(work(DEVICE)), work("cpu"), strict=True):
        assert torch.equal(mine, wanted)


def test_writes_into_tensors_of_several_servers(scattered: Session) -> None:
    def work(device: str) -> list[torch.Tensor]:
        tensors = [torch.full((3,), float(n), device=device) for n in range(6)]
        torch._foreach_add_(tensors, [tensor * 2 for tensor in tensors])
        torch._foreach_mul_(tensors, 0.5)
        return tensors

    for seed in range(10):
        scatter(scattered, seed)
        for mine, wanted in zip(djinn.materialize(work(DEVICE)), work("cpu"), strict=True):
            assert torch.equal(mine, wanted)


@pytest.mark.parametrize("flush_every", [None, 3, 100])
def test_training(scattered: Session, flush_every: int | None) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(inplace=True),
                                torch.nn.Dropout(0.3), torch.nn.Linear(8, 3))
    data, target = torch.randn(10, 6), torch.randint(0, 3, (10,))

    def train(device: str) -> dict[str, torch.Tensor]:
        own = copy.deepcopy(model).to(device)
        optimizer = torch.optim.AdamW(own.parameters(), lr=0.05, foreach=True)
        torch.manual_seed(1)
        for _ in range(4):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(own(data.to(device)), target.to(device)).backward()
            optimizer.step()
        return djinn.materialize(own.state_dict())

    scattered.flush_after(flush_every)
    wanted = train("cpu")
    for seed in range(3):
        scatter(scattered, seed)
        mine = train(DEVICE)
        assert all(torch.equal(mine[name], wanted[name]) for name in wanted)


def test_nothing_is_left_behind(scattered: Session) -> None:
    fleet = fleet_of(scattered)
    x = torch.randn(50, 50, device=DEVICE)
    for step in range(30):
        y = x.T[:10].relu() if step % 3 else x[5:].clone()
        x = x + y.sum()
        x[step].mul_(0.5)
    x.cpu()
    del x, y
    djinn.synchronize()
    assert djinn.stats()["live_handles"] == 0
    assert len(fleet.where) == 0
    assert fleet.where.held_bytes == [0, 0, 0]

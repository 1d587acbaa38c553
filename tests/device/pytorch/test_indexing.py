"""Indexing, shapes that data decides, and tensors of awkward sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.recording.eager import DEVICE, Program, assert_same, outcome, programs

import djinn


def _x(device: str) -> torch.Tensor:
    return torch.arange(24.0).reshape(2, 3, 4).to(device).clone()


def basic(device: str) -> Any:
    x = _x(device)
    i = torch.tensor(1).to(device)
    return (
        x[0], x[-1], x[0, 1], x[0, 1, 2], x[...], x[..., 0], x[0, ...], x[:, None], x[None, ..., None], x[:], x[()],
        x[1:], x[:, ::2], x[..., 1:3], x[:, -2:], x[5:], x[2:1], x[:, 1:100], x[True], x[False], x[i], x[:, i], x[i:],
        x[0][None], x[slice(None), 0], x[[0]], x[[0, 1], [1, 2]], x[(0, 1)], x[:, [2, 0]], x[[True, False]],
        x[torch.tensor([1]).to(device), None], x[None, torch.tensor([1, 0]).to(device)], len(x), x[0, 0].tolist(),
    )


def refused(device: str) -> Any:
    x = _x(device)
    return [outcome(action) for action in (
        lambda: x[::-1], lambda: x[2], lambda: x[0, 0, 0, 0], lambda: x[0, 3], lambda: x["a"], lambda: x[1.0],
        lambda: x[::0], lambda: x[torch.tensor([0.5]).to(device)], lambda: x[:, [0, 1], [0, 1, 2]],
        lambda: x[torch.ones(3, dtype=torch.bool).to(device)], lambda: x[..., ...], lambda: x.select(3, 0),
        lambda: x.narrow(0, 1, 2), lambda: x.flip(3), lambda: x.view(5), x.t, lambda: iter(x.sum()),
        lambda: len(x.sum()), lambda: x.sum()[0], lambda: x.expand(3, 3, 4), lambda: x.squeeze(4), x.item,
        lambda: bool(x), lambda: int(x[0]), lambda: x.new_empty(-1), lambda: x.as_strided((2,), (-1,)),
        lambda: x.as_strided((2, 2), (1,)), lambda: x.unfold(0, 3, 1), lambda: x.chunk(0), lambda: x.split(-1),
        lambda: x.permute(0, 1), lambda: x.reshape(-1, -1),
        lambda: x.index_select(0, torch.ones(1, 1).long().to(device)),
        lambda: x.__setitem__(0, torch.ones(5).to(device)), lambda: x.__setitem__((0, 0, 0, 0), 1),
        lambda: x.repeat_interleave(torch.tensor([1]).to(device), 0), lambda: torch.bincount(x.long()),
        lambda: torch.masked_select(x, x), lambda: torch.take_along_dim(x, x.long()[0], 1),
    )]


def assigned(device: str) -> Any:
    x = _x(device)
    x[0, 1] = 5
    x[:, :, 1] = torch.arange(3.0).to(device)
    x[..., -1] = x[..., 0] * 2
    x[[0, 1], [2, 0]] = torch.zeros(4).to(device)
    x[None, 1, 2:, :] = -1
    x[x > 15] = 100
    x[x.sum(-1) < 10] += 1
    x[torch.tensor([1]).to(device), :, torch.tensor([2]).to(device)] = 3.5
    x[True, 0, 0] = 8
    x[False] = 1
    x[0, 0, 0] = torch.tensor(4)
    y = x.clone()
    y.index_put_((torch.tensor([0, 0]).to(device),), torch.ones(3, 4).to(device), accumulate=True)
    y.masked_fill_(y > 50, 0)
    y.masked_scatter_(y == 0, torch.arange(100.0).to(device))
    y.index_add_(0, torch.tensor([1]).to(device), torch.ones(1, 3, 4).to(device))
    z = x.flatten().scatter(0, torch.tensor([3, 1]).to(device), 7.0)
    taken = torch.take(x, torch.tensor([3, -1]).to(device))
    return x, y, z, taken, x.put_(torch.tensor([0]).to(device), torch.ones(1).to(device))


def shapes_from_data(device: str) -> Any:
    x = torch.tensor([[0.0, 1.0, 2.0], [3.0, 2.0, 0.0]]).to(device)
    n = torch.tensor([3, 1, 1, 0]).to(device)
    return (
        x.nonzero(), x.nonzero(as_tuple=True), torch.argwhere(x), torch.where(x > 1), x[x > 1], x[x > 9],
        x[:, x[0] > 0],
        torch.masked_select(x, x > 1), x.unique(), torch.unique(x, return_inverse=True, return_counts=True),
        torch.unique(x, dim=0), torch.unique_consecutive(x.flatten()), torch.repeat_interleave(n),
        x.repeat_interleave(2),
        torch.repeat_interleave(x, torch.tensor([2, 0]).to(device), dim=0), torch.bincount(n),
        torch.bincount(n, minlength=6),
        torch.bincount(n, weights=x.flatten()[:4]), torch.histc(x), torch.combinations(n), torch.cartesian_prod(n, n),
        torch.nonzero_static(x, size=3), torch.isin(x, n.float()), torch.one_hot(n) if hasattr(torch, "one_hot")
        else torch.nn.functional.one_hot(n), torch.tensor([]).to(device).nonzero(),
        torch.tensor(1).to(device).nonzero(),
        torch.allclose(x, x), torch.equal(x, x + 1), n.count_nonzero(), torch.bucketize(x, n.float().sort().values),
        torch.searchsorted(n.sort().values, n), torch.block_diag(x, x),
    )


def empties(device: str) -> Any:
    x = torch.empty(0, 3).to(device)
    return (
        x, x.sum(), x.sum(0), x.mean(), x.t(), x @ torch.ones(3, 2).to(device),
        torch.cat([x, torch.ones(2, 3).to(device)]),
        x.reshape(3, 0), x.nonzero(), x[x > 0], x.unique(), x.tolist(), x.numpy().shape, repr(x.cpu()), x.prod(),
        torch.stack([x, x]), x.expand(2, 0, 3), x.max(1), x.sort(), outcome(lambda: x.view(-1)), x.view(0, 3),
        outcome(x.item),
        torch.zeros(0).to(device).cumsum(0), torch.linspace(0, 1, 0).to(device), torch.nn.functional.relu(x),
        torch.nn.Linear(3, 2).to(device)(x).shape, x.split(1), x.chunk(2), x.numel(), x.nbytes, x.is_contiguous(),
        x.any(), x.all(),
    )


def scalars(device: str) -> Any:
    x = torch.tensor(3.0).to(device)
    return (
        x, x + 1, x.item(), float(x), int(x), bool(x), x[None], x[()], x[...], x.unsqueeze(0), x.expand(2), x.view(1),
        x.view(()), x.squeeze(), x.t(), x.sum(), x.max(), x.sort(), x.tolist(), x.reshape(1, 1), x.flatten(),
        x.nonzero(),
        x.cumsum(0), x.stride(), x.ndim, x.size(), x.numel(), x.repeat(2), torch.stack([x, x]), x.is_contiguous(),
        round(x.item()), [1, 2, 3, 4][x.long()], x.softmax(0),
        outcome(x.unbind), outcome(lambda: x.size(0)).split(":")[0], outcome(lambda: x.dot(x)), x == 3,
        hash(x) == hash(x),
        complex(x), x.long() << 1, 2 ** x, 7 // x, 7 % x, -x, abs(-x), x in x[None],
    )


def overlapping(device: str) -> Any:
    x = torch.arange(6.0).to(device)
    windows = x.as_strided((3, 3), (1, 1))
    expanded = x[:1].expand(4)
    return (
        windows, windows.sum(1), windows * 2, windows.clone(), x.unfold(0, 3, 1), expanded, windows.contiguous(),
        outcome(lambda: windows.add_(1)), outcome(lambda: expanded.mul_(2)), outcome(lambda: expanded.copy_(x[:4])),
        outcome(lambda: x[1:].copy_(x[:-1]).tolist()),
        outcome(windows.zero_), outcome(lambda: expanded.fill_(9).tolist()), x,
        outcome(lambda: x.as_strided((100,), (1,)).sum().item()),
    )


def huge_views(device: str) -> Any:
    x = torch.ones(1).to(device)
    big = x.expand(2**31 + 5)
    wide = torch.zeros(1, 1, dtype=torch.int8).to(device).expand(2**20, 2**20)
    return (
        big.shape, big.stride(), big.numel(), big.nbytes, big[2**31], big[-2:], wide[2**19, 3:9], wide.t().shape,
        wide.unsqueeze(0).stride(), big.view(-1).numel(), outcome(lambda: wide.view(-1).shape), big.is_contiguous(),
    )


def metadata_in_place(device: str) -> Any:
    x = _x(device)
    y = x.view(-1)
    x.transpose_(0, 2).unsqueeze_(1).squeeze_(1).swapaxes_(0, 1).swapdims_(0, 1)
    z = torch.arange(6.0).to(device).reshape(2, 3).t_()
    z.resize_(2, 2)
    w = torch.ones(2).to(device)
    w.resize_(4)
    w[2:] = 0
    v = torch.empty(0).to(device)
    v.set_(y[3:])
    u = torch.arange(6.0).to(device)
    u.as_strided_((2, 2), (3, 1), 1)
    t = torch.ones(4).to(device)
    t.resize_as_(u).fill_(2)
    s = torch.ones(2, 1).to(device)
    s.squeeze_().detach_().requires_grad_()
    r = torch.ones(2, 3).to(device)
    r.data = torch.zeros(4, dtype=torch.float64).to(device)
    q = torch.arange(4).to(device)
    y[0] = 99
    v[0] = -5
    return (
        x, y, z, w, v, u, t, s, r, q, x.storage_offset(), v.storage_offset(),
        outcome(lambda: r.t_().t_()),
    )


@programs(
    basic, refused, assigned, shapes_from_data, empties, scalars, huge_views, metadata_in_place,
)
def test_indexing_equals_eager(program: Program) -> None:
    assert_same(program)


@pytest.mark.usefixtures("in_process")  # a server refuses to write to memory that overlaps itself; docs/server.md
def test_writes_to_overlapping_memory_equal_eager() -> None:
    assert_same(overlapping)


DATA_DEPENDENT: dict[str, Callable[[torch.Tensor], Any]] = {
    "nonzero": torch.nonzero,
    "unique": torch.unique,
    "boolean_index": lambda x: x[x > 0],
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "where": lambda x: torch.where(x > 0)[0],
    "repeat_interleave": lambda x: torch.repeat_interleave(x.gt(0).long()),
    "bincount": lambda x: torch.bincount(x.gt(0).long()),
}


@pytest.mark.parametrize("name", DATA_DEPENDENT)
def test_only_the_shape_comes_home(name: str, server: Any) -> None:
    try:
        djinn.init(server.address)
        x = torch.randn(5000, device=DEVICE)
        djinn.synchronize()
        djinn.reset_stats()
        made = DATA_DEPENDENT[name](x)
        shape = made.shape
        stats = djinn.stats()
        assert 1 <= stats["round_trips"] <= 2
        assert stats["bytes_received"] < 800
        assert made.cpu().shape == shape
        assert djinn.stats()["bytes_received"] >= made.nbytes
    finally:
        djinn.init()


def test_a_mask_that_is_assigned_to_costs_no_round_trip() -> None:
    x = torch.randn(100, device=DEVICE)
    x[x > 0] = 1
    djinn.synchronize()
    djinn.reset_stats()
    x[x > 0.5] = 2
    x.masked_fill_(x < 0, 0)
    assert djinn.stats()["round_trips"] == 0

"""Ordinary tensors that meet lazy ones: uploads, gradients, writes home, and strict mode."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.recording.eager import DEVICE, Program, assert_same, outcome, programs, values
from torch import nn

import djinn


def test_an_ordinary_tensor_travels_once_for_each_version(server: Any) -> None:
    try:
        djinn.init(server.address)
        ordinary, remote = torch.ones(1000), torch.ones(1000, device=DEVICE)

        def bytes_of(action: Callable[[], Any]) -> int:
            djinn.synchronize()
            djinn.reset_stats()
            action()
            djinn.synchronize()
            return djinn.stats()["bytes_sent"]

        assert bytes_of(lambda: remote + ordinary) > 4000
        assert bytes_of(lambda: (remote + ordinary, remote * ordinary)) < 1500
        ordinary.add_(1)
        assert bytes_of(lambda: remote + ordinary) > 4000
        ordinary.requires_grad_()
        assert bytes_of(lambda: (remote * ordinary).sum().backward()) < 1500
        assert bytes_of(lambda: (remote * ordinary).sum().backward()) < 1500
        assert torch.equal(ordinary.grad, torch.full((1000,), 2.0))
    finally:
        djinn.init()


def test_what_was_written_at_home_is_uploaded_anew() -> None:
    ordinary, remote = torch.zeros(3), torch.ones(3, device=DEVICE)
    assert (remote + ordinary).tolist() == [1.0, 1.0, 1.0]
    torch._foreach_add_([ordinary], [remote])
    assert (remote + ordinary).tolist() == [2.0, 2.0, 2.0]
    torch.add(remote, remote, out=ordinary)
    assert (remote + ordinary).tolist() == [3.0, 3.0, 3.0]
    # PyTorch does not count the writes of fused optimizers.
    torch._fused_sgd_([ordinary], [remote], [], weight_decay=0.0, momentum=0.0, lr=1.0, dampening=0.0, nesterov=False,
                      maximize=False, is_first_step=True)
    assert (remote + ordinary).tolist() == [2.0, 2.0, 2.0]


def test_a_fused_optimizer_of_a_model_that_stayed_local_is_noticed() -> None:
    def program(device: str) -> Any:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
        x = torch.ones(2, 3).to(device)
        losses = []
        for _ in range(3):
            loss = model(x).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    assert_same(program)


@pytest.mark.parametrize("with_gradients", [False, True])
def test_statistics_that_stay_here_are_followed(with_gradients: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    twin = copy.deepcopy(model)
    with torch.set_grad_enabled(with_gradients):
        for is_training, is_here in ((True, False), (False, False), (True, True), (False, False), (True, False)):
            # What PyTorch writes to the statistics here is not counted, either.
            model.train(is_training)
            twin.train(is_training)
            x = torch.randn(2, 3, 6, 6)
            y = model(x if is_here else x.to(DEVICE))
            assert isinstance(y, djinn.LazyTensor) is not is_here
            assert torch.equal(y.detach().cpu(), twin(x).detach())
            for name, statistics in model.named_buffers():
                assert statistics.device.type == "cpu"
                assert torch.equal(statistics, twin.get_buffer(name)), name


def test_views_of_a_parameter_are_views_of_its_upload(server: Any) -> None:
    weight, x = nn.Parameter(torch.randn(300, 300)), torch.randn(4, 300)
    try:
        djinn.init(server.address)
        there = x.to(DEVICE)
        with torch.no_grad():
            assert torch.equal((there @ weight).cpu(), x @ weight)
            before = djinn.stats()["bytes_sent"]
            for view in (weight.t(), weight[100:].t(), weight.view(2, 150, 300)[1].t()):
                assert torch.equal((there @ view).cpu(), x @ view)
            assert djinn.stats()["bytes_sent"] - before < 10_000
            weight.mul_(2)
            assert torch.equal((there @ weight.t()).cpu(), x @ weight.t())
    finally:
        djinn.init()


def test_gradients_of_ordinary_tensors_are_ordinary() -> None:
    weight = torch.ones(3, requires_grad=True)
    seen: list[torch.Tensor] = []
    weight.register_hook(seen.append)
    x = torch.tensor([1.0, 2.0, 3.0], device=DEVICE)
    (weight * x).sum().backward()
    assert type(weight.grad) is torch.Tensor
    assert weight.grad.tolist() == [1.0, 2.0, 3.0]
    (weight * 2 * x * weight + weight).sum().backward()
    assert weight.grad.tolist() == [6.0, 11.0, 16.0]
    assert all(type(grad) is torch.Tensor for grad in seen)
    y = torch.ones(3, device=DEVICE, requires_grad=True)
    (first, second) = torch.autograd.grad((weight * y * x).exp().sum(), [weight, y], create_graph=True)
    assert (first.device.type, second.device.type) == ("cpu", "remote_accelerator")
    (first.sum() + second.sum().cpu()).backward()
    assert (weight.grad.device.type, y.grad.device.type) == ("cpu", "remote_accelerator")
    scalar = torch.tensor(2.0, requires_grad=True)
    (scalar * x).sum().backward()
    assert scalar.grad.item() == 6.0


@pytest.mark.parametrize("captured", [False, True])
def test_a_model_that_stayed_local_trains(captured: bool) -> None:
    def program(device: str) -> Any:
        model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2))
        table = nn.Embedding(5, 3)
        attention = nn.MultiheadAttention(3, 1, batch_first=True)
        parameters = [*model.parameters(), *table.parameters(), *attention.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=0.1)
        for _ in range(3):
            if captured and device != "cpu":
                with djinn.capture(model):
                    rows = table(torch.tensor([[0, 2, 4]]))
                    loss = model(attention(rows, rows, rows)[0]).square().mean()
            else:
                rows = table(torch.tensor([[0, 2, 4]]).to(device))
                loss = model(attention(rows, rows, rows)[0]).square().mean()
            assert loss.device.type == torch.device(device).type
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [p.detach() for p in parameters], [p.grad for p in parameters]

    found = assert_same(program)
    assert all(type(tensor) is torch.Tensor for group in found for tensor in group)


def in_place_into_ordinary(device: str) -> Any:
    x = torch.tensor([1.0, 2.0, 3.0]).to(device).requires_grad_()
    w = torch.ones(3, requires_grad=True)
    y = torch.ones(3)
    y.mul_(x)
    y.sum().backward()
    z = w * 2
    z.mul_(x)
    z.square().sum().backward()
    return y, z, x.grad.cpu(), w.grad


def written_at_home(device: str) -> Any:
    x = torch.tensor([1.0, 2.0, 3.0]).to(device)
    a, b, c = torch.zeros(3), torch.zeros(3), torch.zeros(0)
    a.add_(x)
    torch.add(x, 1, out=b)
    torch.add(x, 1, out=c)
    b[0] = x[2]
    b[x > 2] = 9
    torch._foreach_add_([a, b], [x, x])
    version = a._version
    a.copy_(x, non_blocking=True)
    return a, b, c, version, a._version, a.lerp_(x, 0.5)


def copied_both_ways(device: str) -> Any:
    x = torch.arange(6.0).reshape(2, 3).to(device)
    y = torch.zeros(3, 2, dtype=torch.float64)
    y.copy_(x.t(), non_blocking=True)
    x.copy_(torch.ones(3, dtype=torch.int32))
    x[:, 1].copy_(torch.tensor([5.0, 6.0]))
    w = torch.ones(3, requires_grad=True)
    z = torch.zeros(3).to(device)
    z.copy_(w)
    (z * 3).sum().backward()
    v = torch.ones(3).to(device).requires_grad_()
    home = torch.zeros(3)
    home.copy_(v)
    (home * 2).sum().backward()
    return (
        y, x, w.grad, v.grad, x.to("cpu", non_blocking=True), outcome(lambda: x.copy_(torch.ones(4))),
        outcome(lambda: x.cpu().copy_(torch.ones(7).to(device))),
    )


def scalars(device: str) -> Any:
    x = torch.arange(3).to(device)
    return (
        x + torch.tensor(1.5), x * torch.tensor(2), torch.tensor(3.0) - x, x.float().add_(torch.tensor(2.0)),
        torch.where(x > 1, torch.tensor(0.0), torch.tensor(1.0)), x.float().clamp(min=torch.tensor(1.0)),
    )


def indices_from_here(device: str) -> Any:
    x = torch.arange(12.0).reshape(3, 4).to(device)
    rows, mask = torch.tensor([2, 0]), torch.tensor([True, False, True])
    found = x[rows], x[mask], x[rows, torch.tensor([1, 1])], x[:, torch.tensor([3, 0])], x[mask, 1]
    x[rows] = torch.tensor(7.0)
    x[mask, 0] = -1
    x.index_put_((rows,), torch.tensor(1.0), accumulate=True)
    return *found, x, outcome(lambda: values(x[torch.tensor([3])])), outcome(lambda: x[torch.tensor([True])])


@programs(in_place_into_ordinary, written_at_home, copied_both_ways, scalars, indices_from_here)
def test_mixtures_equal_eager(program: Program) -> None:
    assert_same(program)


@pytest.fixture
def strict() -> Iterator[None]:
    try:
        djinn.init(strict=True)
        yield
    finally:
        djinn.init()


REFUSED: tuple[Callable[[torch.Tensor, torch.Tensor], Any], ...] = (
    lambda here, there: here + there,
    lambda here, there: there + here,
    lambda here, there: there @ here,
    lambda here, there: nn.functional.linear(there, here),
    lambda here, there: torch.cat([here, there]),
    lambda here, there: there.add_(here),
    lambda here, there: here.add_(there),
    lambda here, there: here.add_(there.sum()),
    lambda here, there: torch.add(there, there, out=here),
    lambda here, there: torch.where(there > 0, here, there),
    lambda here, there: there.index_select(0, torch.tensor([0])),
    lambda here, there: there.gather(0, torch.tensor([[0, 0]])),
    lambda here, there: there.index_put_((torch.tensor([0]),), here[0]),
    lambda here, there: here[there.long()],
    lambda here, there: nn.functional.embedding(torch.tensor([0]), there),
    lambda here, there: there * here.clone().requires_grad_(),
)


@pytest.mark.parametrize("number", range(len(REFUSED)))
@pytest.mark.usefixtures("strict")
def test_strict_mode_refuses_what_an_accelerator_refuses(number: int) -> None:
    here, there = torch.ones(2, 2), torch.ones(2, 2, device=DEVICE)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device|indices should be either"):
        REFUSED[number](here, there)
    assert torch.equal(here, torch.ones(2, 2))
    assert torch.equal(there.cpu(), torch.ones(2, 2))


@pytest.mark.usefixtures("strict")
@programs(copied_both_ways, scalars, indices_from_here)
def test_strict_mode_takes_what_an_accelerator_takes(program: Program) -> None:
    assert_same(program)

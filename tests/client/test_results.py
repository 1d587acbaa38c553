"""Results that are used again: the same work on the same values is done once, and nobody can tell but by counting."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import djinn

DEVICE = "remote_accelerator:0"
ROOM_BYTES = 2**28
REUSED, NOT_FETCHED, KEPT, KEPT_BYTES = "results_reused", "results_not_fetched", "results_kept", "results_kept_bytes"


@pytest.fixture(params=["auto", None, 1, 7], ids=lambda every: f"flush_every={every}")
def keeping(request: pytest.FixtureRequest) -> Iterator[None]:
    """A session that keeps results."""
    djinn.init(result_cache_bytes=ROOM_BYTES, flush_every=request.param)
    yield
    djinn.shutdown()


def executed(action: Callable[[], Any]) -> tuple[Any, int]:
    """What an action gives, brought home, and how many operations it made the executor run."""
    djinn.synchronize()
    before = djinn.stats()["nodes_executed"]
    made = djinn.materialize(action())
    return made, djinn.stats()["nodes_executed"] - before


class Pair:
    """A model and its input, here and there."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.here = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.5), nn.LayerNorm(32),
                                  nn.Linear(32, 16)).eval()
        self.there = copy.deepcopy(self.here).to(DEVICE)
        self.x_here = torch.randn(8, 16)
        self.x_there = self.x_here.to(DEVICE)
        self.views = [(x.view(-1), x[2:], x.t()) for x in (self.x_here, self.x_there)]
        for _ in range(2):
            self.check()
        assert self.check() == 0

    def check(self) -> int:
        """Compare results bit by bit; tells how many operations ran."""
        with torch.no_grad():
            wanted = self.here(self.x_here)
            got, count = executed(lambda: self.there(self.x_there))
        assert torch.equal(got, wanted)
        return count

    def both(self, action: Callable[[nn.Module, torch.Tensor, tuple[torch.Tensor, ...]], object]) -> None:
        """Do the same here and there."""
        action(self.here, self.x_here, self.views[0])
        action(self.there, self.x_there, self.views[1])


def _step(model: nn.Module, x: torch.Tensor, _: object) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _load(model: nn.Module, *_: object) -> None:
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


def _assign(model: Any, *_: object) -> None:
    model[0].weight.data = model[0].weight.data * 3


def _exchange(_: object, x: torch.Tensor, __: object) -> None:
    x.set_(torch.full_like(x, 0.25))  # type: ignore[call-overload]  # as its documentation has it


WRITES: dict[str, Callable[[Any, Any, Any], object]] = {
    "in place": lambda _, x, __: x.add_(1),
    "through a view made before": lambda _, __, views: views[0].mul_(2),
    "through a part made before": lambda _, __, views: views[1].zero_(),
    "through a transposed view made before": lambda _, __, views: views[2][3].fill_(7),
    "through a view made after": lambda _, x, __: x.select(1, 3).neg_(),
    "through a view of a view": lambda _, x, __: x.view(-1)[5:9].view(2, 2).t().sub_(1),
    "through data": lambda _, x, __: x.data.mul_(-1),
    "detached": lambda _, x, __: x.detach().clamp_(0),
    "copied from elsewhere": lambda _, x, __: x.copy_(torch.ones(8, 16)),
    "copied from there": lambda _, x, __: x.copy_(x.flip(0)),
    "by index": lambda _, x, __: x.__setitem__((slice(None), 2), 5.0),
    "by a mask": lambda _, x, __: x.masked_fill_(x > 0, -1),
    "as out": lambda _, x, __: torch.mul(x, 2, out=x),
    "foreach": lambda _, x, views: torch._foreach_add_([views[0], x[0]], 1.5),
    "of the weights": lambda model, *_: model[0].weight.data.mul_(2),
    "of the last bias": lambda model, *_: model[4].bias.data.add_(1),
    "of weights by an optimizer": _step,
    "of weights that are loaded": _load,
    "of weights that are assigned": _assign,
    "of a storage that is exchanged": _exchange,
    "of random numbers": lambda _, x, __: (torch.manual_seed(5), x.copy_(torch.randn(8, 16))),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_what_was_written_is_computed_anew(keeping: None, write: Callable[[Any, Any, Any], object]) -> None:
    pair = Pair()
    pair.both(write)
    assert pair.check() > 0
    pair.check()
    pair.both(write)
    pair.check()


@pytest.mark.usefixtures("keeping")
def test_a_result_that_is_written_is_not_what_was_computed() -> None:
    pair = Pair()
    with torch.no_grad():
        first, second = pair.there(pair.x_there), pair.there(pair.x_there)
        djinn.synchronize()
        third = pair.there(pair.x_there)
        third.mul_(2)
        first[1:].zero_()
        wanted = pair.here(pair.x_here)
        assert torch.equal(second.cpu(), wanted)
        assert torch.equal(third.cpu(), wanted * 2)
        assert torch.equal(first[0].cpu(), wanted[0])
        assert not first[1:].cpu().any()
        del first, second, third
        fourth = pair.there(pair.x_there)
        fourth.view(-1)[::2] += 1
        pair.check()
        pair.check()


@pytest.mark.usefixtures("keeping")
def test_draws_differ_and_seeds_repeat_them() -> None:
    x = torch.ones(64, device=DEVICE)
    dropout = nn.Dropout(0.5)
    draws = [dropout(x).cpu() for _ in range(4)]
    assert not any(torch.equal(draws[0], other) for other in draws[1:])
    seeded = []
    for _ in range(3):
        torch.manual_seed(3)
        seeded.append((torch.rand(5, device=DEVICE).cpu(), dropout(x).cpu()))
    assert all(torch.equal(a, b) for pair in seeded[1:] for a, b in zip(pair, seeded[0], strict=True))


@pytest.mark.usefixtures("keeping")
def test_numbers_of_another_sign_or_type_or_default_are_others() -> None:
    x = torch.ones(2, 3, device=DEVICE)
    for _ in range(3):
        assert (x * 0.0).signbit().tolist() != (x * -0.0).signbit().tolist()
        made = [x + 1, x + 2, torch.full((2,), 1, device=DEVICE), torch.full((2,), 1.0, device=DEVICE)]
        assert [value.flatten()[0].item() for value in made] == [2, 3, 1, 1.0]
        assert [value.dtype for value in made[2:]] == [torch.int64, torch.float32]
        torch.set_default_dtype(torch.float64)
        try:
            assert torch.full((2,), 1.0, device=DEVICE).cpu().dtype is torch.float64
            assert (torch.ones(2, dtype=torch.int64, device=DEVICE) / 3).cpu()[0].item() == 1 / 3
        finally:
            torch.set_default_dtype(torch.float32)
        assert (torch.ones(2, dtype=torch.int64, device=DEVICE) / 3).cpu().dtype is torch.float32


@pytest.mark.usefixtures("keeping")
def test_views_of_what_is_reused_share_memory_as_before() -> None:
    x = torch.arange(12.0, device=DEVICE).view(3, 4)
    wanted = (torch.arange(12.0).view(3, 4) * 2 + 1).sqrt()
    for _ in range(4):
        y = (x * 2 + 1).sqrt()
        first, second = y.chunk(2, 1)
        rows = y.t()
        djinn.synchronize()
        assert torch.equal(second.cpu(), wanted[:, 2:])
        first.fill_(9)
        assert y[:, 0].tolist() == [9, 9, 9]
        assert rows[1].tolist() == [9, 9, 9]
        assert second.stride() == (4, 1)
        assert torch.equal(second.cpu(), wanted[:, 2:])


@pytest.mark.usefixtures("keeping")
def test_conjugates_and_negatives_stay_what_they_are() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j], device=DEVICE)
    for _ in range(4):
        conjugate = (z * 2).conj()
        negative = conjugate.imag
        djinn.synchronize()
        assert conjugate.tolist() == [2 - 4j, 6 + 8j]
        assert negative.tolist() == [-4.0, 8.0]
        assert z.conj().tolist() == [1 - 2j, 3 + 4j]


@pytest.mark.usefixtures("keeping")
def test_what_fails_fails_again() -> None:
    weights, index = torch.ones(2, 2, device=DEVICE), torch.tensor([9], device=DEVICE)
    for _ in range(4):
        made = nn.functional.embedding(index, weights) * 2
        with pytest.raises(IndexError):
            made.cpu()
    for _ in range(3):
        made = nn.functional.embedding(index, weights) * 2
        djinn.flush()
        with pytest.raises(IndexError):
            djinn.synchronize()
    index.zero_()
    assert nn.functional.embedding(index, weights).tolist() == [[1, 1]]


@pytest.mark.usefixtures("keeping")
def test_a_value_that_is_at_home_is_not_fetched_again_until_it_is_written() -> None:
    x = torch.ones(4, device=DEVICE)
    assert x.cpu().add_(5).tolist() == [6] * 4
    before = djinn.stats()
    assert x.tolist() == [1] * 4
    after = djinn.stats()
    assert after[NOT_FETCHED] == before[NOT_FETCHED] + 1
    assert after["round_trips"] == before["round_trips"]
    x[1:].add_(1)
    assert x.tolist() == [1, 2, 2, 2]
    state = torch.rand(1, device=DEVICE).cpu()
    assert not torch.equal(torch.rand(1, device=DEVICE).cpu(), state)


@pytest.mark.usefixtures("keeping")
def test_statistics_of_running_norms_are_written_though_no_schema_says_so() -> None:
    torch.manual_seed(0)
    here = nn.Sequential(nn.BatchNorm1d(3), nn.InstanceNorm1d(3, track_running_stats=True))
    there = copy.deepcopy(here).to(DEVICE)
    x = torch.randn(4, 3, 5)
    remote = x.to(DEVICE)
    with torch.no_grad():
        for training in (True, True, False, False, True, False):
            here.train(training)
            there.train(training)
            assert torch.allclose(there(remote).cpu(), here(x), atol=1e-6)
            for mine, theirs in zip(there.buffers(), here.buffers(), strict=True):
                assert torch.allclose((mine * 2).cpu(), theirs * 2)


def test_what_is_kept_is_bounded_and_goes_when_it_is_of_no_use() -> None:
    room = 10 * 2**20
    djinn.init(result_cache_bytes=room)
    try:
        djinn.synchronize()
        before = djinn.stats()["live_handles"]
        x = torch.ones(256, 1024, device=DEVICE)
        for step in range(40):
            made = (x * float(step)).exp().log1p().cpu()
            assert made.shape == x.shape
            stats = djinn.stats()
            assert stats[KEPT_BYTES] <= room
            assert stats["live_handles"] - stats[KEPT] <= before + 3
        djinn.synchronize()
        assert djinn.stats()[KEPT] >= 8
        x.zero_()
        djinn.synchronize()
        assert djinn.stats()[KEPT] == djinn.stats()[KEPT_BYTES] == 0
        (x + 1).exp().sum(0).cpu()
        djinn.synchronize()
        assert djinn.stats()[KEPT] > 0
        del x
        djinn.synchronize()
        assert djinn.stats()[KEPT] == 0
        assert djinn.stats()["live_handles"] == before
    finally:
        djinn.shutdown()


def test_a_long_chain_goes_at_once() -> None:
    djinn.init(result_cache_bytes=ROOM_BYTES, flush_every=1)
    try:
        x = torch.ones(3, device=DEVICE)
        y = x
        for _ in range(3000):
            y = y * 1.5
        djinn.synchronize()
        assert djinn.stats()[KEPT] > 2900
        x.add_(1)
        djinn.synchronize()
        assert djinn.stats()[KEPT] == 0
    finally:
        djinn.shutdown()


def test_nothing_is_kept_unless_it_is_asked_for() -> None:
    djinn.init()
    try:
        x = torch.ones(3, device=DEVICE)
        for _ in range(3):
            assert executed(lambda: torch.exp(x * 2))[1] == 2
        assert not any(djinn.stats()[name] for name in (REUSED, NOT_FETCHED, KEPT, KEPT_BYTES, "results_dropped"))
    finally:
        djinn.shutdown()


@pytest.mark.parametrize("every", ["auto", None])
def test_a_language_model_runs_once_for_the_same_tokens(every: int | str | None) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()
    tokens = torch.tensor([[464, 3290, 318, 257, 845]])
    djinn.init(result_cache_bytes=ROOM_BYTES, flush_every=every)
    try:
        with torch.no_grad():
            wanted = model(tokens).logits
            remote, prompt = copy.deepcopy(model).to(DEVICE), tokens.to(DEVICE)
            djinn.synchronize()
            counts = []
            for _ in range(3):
                made, count = executed(lambda: remote(prompt).logits)
                assert torch.equal(made, wanted)
                counts.append(count)
            assert counts[0] > 100
            assert counts[1:] == [0, 0]
            for network in (model, remote):
                network.transformer.h[5].mlp.c_proj.weight.data.mul_(1.5)
            made, count = executed(lambda: remote(prompt).logits)
            assert torch.equal(made, model(tokens).logits)
            assert count > 0
    finally:
        djinn.shutdown()

"""``torch.compile(backend="djinn")``: results that share memory, and gradients that cross graphs."""

from __future__ import annotations

import copy
import gc
import logging
from typing import Any

import pytest
import torch
from support.recording.compiled import remotely, same
from torch import nn

import djinn

REMOTE = "remote_accelerator:0"
# Dynamo looks at the gradient of every tensor that it meets.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


class TestAliases:
    """What shares memory in eager shares it here."""

    def test_a_written_argument_is_written(self) -> None:
        def function(x: torch.Tensor) -> torch.Tensor:
            x.mul_(2)
            x[0] += 1
            return x.sum()

        compiled, mine, theirs = remotely(function), torch.ones(3, 2), torch.ones(3, 2)
        for _ in range(3):
            assert same(compiled(mine), function(theirs))
            assert same(mine, theirs)

    def test_a_written_buffer_is_written_and_not_sent_again(self, server: Any) -> None:
        djinn.init(server=server.address)

        class Counting(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("seen", torch.zeros(10_000))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.seen += x
                return self.seen[:2] * 2

        model = Counting()
        twin, compiled, x = copy.deepcopy(model), remotely(model), torch.ones(1)
        for _ in range(4):
            djinn.reset_stats()
            assert same(compiled(x), twin(x))
            assert same(model.seen, twin.seen)
        assert djinn.stats()["bytes_sent"] < 5000

    def test_views_of_arguments(self) -> None:
        def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x.t(), x[1:, :2], x.detach()[0], x + 1

        base = torch.randn(5, 4, requires_grad=True)
        compiled, x = remotely(function), (base * 1)[1:]
        for _ in range(2):
            found, expected = compiled(x), function(x)
            assert same(found, expected)
            for one, other in zip(found[:3], expected[:3], strict=True):
                assert one.data_ptr() == other.data_ptr()
                assert one.stride() == other.stride()
            assert [r.requires_grad for r in found] == [r.requires_grad for r in expected]
        with torch.no_grad():
            found[1].zero_()
            assert x[1:, :2].abs().sum() == 0

    def test_views_of_what_is_not_dense(self, caplog: pytest.LogCaptureFixture) -> None:
        def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.t(), x * 2

        compiled, x = remotely(function), torch.randn(4, 6)[:, ::2]
        with caplog.at_level(logging.WARNING, "djinn.dynamo"):
            for _ in range(2):
                found = compiled(x)
                assert same(found, function(x))
                assert found[0].data_ptr() == x.data_ptr()
        assert "runs in this process" in caplog.text

    def test_results_that_share_memory(self) -> None:
        def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = x * 2
            return y, y[1:], y.t(), y.flatten()[-1]

        compiled, x = remotely(function), torch.randn(3, 4)
        for _ in range(2):
            found, expected = compiled(x), function(x)
            assert same(found, expected)
            for results in (found, expected):
                results[0].add_(1)
            assert same(found, expected)
        assert [r.stride() for r in found] == [r.stride() for r in expected]

    def test_written_arguments_that_share_memory(self) -> None:
        def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return y * 2

        compiled = remotely(function)
        for _ in range(2):
            mine, theirs = torch.zeros(4), torch.zeros(4)
            assert same(compiled(mine[:3], mine[1:]), function(theirs[:3], theirs[1:]))
            assert same(mine, theirs)
            apart = torch.zeros(3), torch.zeros(3)
            assert compiled(*apart).sum() == 0, "after apart"

    def test_a_written_argument_with_a_gradient(self) -> None:
        def function(x: torch.Tensor) -> torch.Tensor:
            return x.mul_(3) * x

        compiled, found = remotely(function), []
        for run in (function, compiled, compiled):
            leaf = torch.arange(3.0, requires_grad=True)
            x = leaf * 2
            run(x).sum().backward()
            found.append([x.detach(), leaf.grad])
        assert same(found[1], found[0])
        assert same(found[2], found[0])

    def test_constants_and_empty_results(self) -> None:
        def function(x: torch.Tensor) -> tuple[Any, ...]:
            return torch.tensor([1, 2, 3]), x[:0], None, torch.tensor(2.5) * x, x.shape[0], torch.ones(2)

        compiled, x = remotely(function), torch.randn(3)
        for _ in range(2):
            found, expected = compiled(x), function(x)
            assert same([found[0], found[1], found[3], found[5]], [expected[0], expected[1], expected[3], expected[5]])
            assert (found[2], found[4]) == (None, 3)

    def test_a_constant_that_is_written_begins_anew(self) -> None:
        def function(x: torch.Tensor) -> torch.Tensor:
            start = torch.tensor([1.0, 2.0])
            start += x
            return start

        compiled, x = remotely(function), torch.ones(2)
        for _ in range(3):
            assert same(compiled(x), function(x))


class TestAutograd:
    """A compiled graph is one operation of local autograd."""

    def test_what_eager_refuses(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
        compiled, x = remotely(model), torch.randn(2, 3)
        for _ in range(2):
            loss = compiled(x).sum()
            loss.backward()
            with pytest.raises(RuntimeError, match="second time"):
                loss.backward()
            loss = compiled(x).sum()
            with torch.no_grad():
                model[2].weight.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()

    def test_a_retained_graph_gives_its_gradients_again(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        compiled, x = remotely(model), torch.randn(2, 3)
        for _ in range(2):
            model.zero_grad()
            loss = compiled(x).sum()
            loss.backward(retain_graph=True)
            once = model[0].weight.grad.clone()
            loss.backward()
            assert torch.equal(model[0].weight.grad, once + once)

    def test_two_calls_before_a_backward_pass(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        compiled, x, y = remotely(model), torch.randn(2, 3), torch.randn(2, 3)
        for _ in range(2):
            grads = []
            for function in (model, compiled):
                model.zero_grad()
                (function(x).sum() * function(y).prod()).backward()
                grads.append([p.grad for p in model.parameters()])
            assert same(grads[1], grads[0])

    def test_nothing_is_kept_when_the_results_are_gone(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
        compiled, x = remotely(model), torch.randn(2, 3)
        counts = []
        for turn in range(6):
            loss = compiled(x).sum()
            if turn % 2:
                loss.backward()
            del loss
            gc.collect()
            djinn.synchronize()
            counts.append(djinn.stats()["live_handles"])
        assert counts[2:] == [counts[2]] * 4, counts
        del compiled, model
        torch._dynamo.reset()
        gc.collect()
        djinn.synchronize()
        assert djinn.stats()["live_handles"] == 0

    def test_results_without_gradients(self) -> None:
        def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            with torch.no_grad():
                scale = x.abs().max()
            return x / scale, scale, x.argmax(), (x * 2).detach()

        compiled, x = remotely(function), torch.randn(4, requires_grad=True)
        for _ in range(2):
            found, expected = compiled(x), function(x)
            assert same(found, expected)
            assert [r.requires_grad for r in found] == [r.requires_grad for r in expected]
            gradients = [torch.autograd.grad(results[0].sum(), x) for results in (found, expected)]
            assert same(*gradients)

    def test_expanded_and_missing_gradients(self) -> None:
        def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x @ w, x.exp()

        compiled = remotely(function)
        x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 2, requires_grad=True)
        for _ in range(2):
            for index in (0, 1):
                grads = [torch.autograd.grad(f(x, w)[index].sum(), (x,)) for f in (compiled, function)]
                assert same(*grads)

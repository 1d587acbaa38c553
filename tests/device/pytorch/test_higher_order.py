"""Operators that call functions (``torch.cond``, flex attention), and backends of ``torch.compile`` that run graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.recording.eager import DEVICE, assert_same
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import djinn

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")


def test_control_flow_gives_what_its_functions_give() -> None:
    from torch._higher_order_ops.while_loop import while_loop

    x = torch.linspace(-1, 1, 6, device=DEVICE).requires_grad_()
    chosen = torch.cond(x.sum() > 1, torch.sin, lambda tensor: tensor.cos() * 2, (x,))
    chosen.sum().backward()
    local = torch.linspace(-1, 1, 6)
    assert x.grad is not None
    assert (chosen.tolist(), x.grad.tolist()) == ((local.cos() * 2).tolist(), (local.sin() * -2).tolist())
    with torch.no_grad():
        rounds, doubled = while_loop(lambda count, _: count < 3, lambda count, value: (count + 1, value * 2),
                                     (torch.zeros((), device=DEVICE), x))
    assert (rounds.item(), doubled.tolist()) == (3, (local * 8).tolist())


def attention(device: str) -> Any:
    query, key, value = (torch.randn(1, 2, 130, 8).to(device) for _ in range(3))
    document, slope = (torch.arange(130) // 50).to(device), torch.tensor([0.5, 0.25]).to(device)
    mask = create_block_mask(lambda batch, head, row, column: (document[row] == document[column]) & (row >= column),
                             None, None, 130, 130, device=device)
    with torch.no_grad():
        return (flex_attention(query, key, value), mask.kv_num_blocks, mask.to_dense(),
                flex_attention(query, key, value, block_mask=mask, score_mod=(
                    lambda score, batch, head, row, column: score - slope[head] * (row - column))))


def test_flex_attention_gives_what_eager_gives() -> None:
    assert_same(attention)


def test_gradients_of_flex_attention_are_those_of_the_formula() -> None:
    torch.manual_seed(0)
    operands = [torch.randn(1, 1, 12, 4) for _ in range(3)]
    here = [operand.clone().requires_grad_() for operand in operands]
    there = [operand.to(DEVICE).requires_grad_() for operand in operands]
    weights = torch.softmax(here[0] @ here[1].mT * 0.5 - torch.arange(12), -1)
    (weights @ here[2]).square().sum().backward()
    flex_attention(*there, score_mod=lambda score, *place: score - place[3]).square().sum().backward()
    for mine, theirs in zip(there, here, strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad)


def trained(device: str, backend: Any) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).to(device)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(3):
        loss = compiled(torch.ones(3, 4, device=device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, list(model.parameters())


def test_operators_that_only_compilers_call_are_decomposed() -> None:
    def program(device: str) -> Any:
        x = torch.arange(4.0, device=device).view(2, 2)
        mean, variance = torch.zeros(2).to(device), torch.ones(2).to(device)
        return (torch.ops.aten._native_batch_norm_legit_functional(x, None, None, mean, variance, True, 0.5, 1e-5),
                mean, torch.ops.aten.zero(x), torch.ops.aten.uniform(x, 2.0, 3.0) > 2, x)

    assert_same(program)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_backends_that_run_graphs_are_given_those_of_remote_tensors(backend: str) -> None:
    torch._dynamo.reset()
    assert_same(lambda device: trained(device, backend))


def test_a_backend_of_the_program_is_called_and_waits_for_nothing() -> None:
    torch._dynamo.reset()
    graphs = []

    def run(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(inputs[0].device)
        return graph.forward

    double = torch.compile(lambda x: torch.sin(x) + torch.ones(4, device=x.device), backend=run)
    x = torch.arange(4.0, device=DEVICE)
    djinn.reset_stats()
    made = double(x)
    assert (graphs, djinn.stats()["round_trips"]) == ([DEVICE], 0)
    assert torch.equal(made.cpu(), x.cpu().sin() + 1)

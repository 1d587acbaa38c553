"""Attention as a client records it for a CUDA executor: whole, for the executor to choose a kernel.

A guarded server in another process runs it, with the kernels of its CPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.recording.believed_cuda import believed_cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

import djinn

D = "remote_accelerator:0"
WHOLE = "djinn::scaled_dot_product_attention"
CALLS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": ((2, 4, 5, 8), (2, 4, 7, 8), {}),
    "causal": ((2, 4, 5, 8), (2, 4, 5, 8), {"is_causal": True}),
    "scaled": ((2, 4, 5, 8), (2, 4, 7, 8), {"scale": 0.3}),
    "grouped": ((2, 4, 5, 8), (2, 2, 5, 8), {"enable_gqa": True}),
    "mask": ((2, 4, 5, 8), (2, 4, 7, 8), {"attn_mask": torch.randn(5, 7)}),
    "mask of bools": ((2, 4, 5, 8), (2, 4, 7, 8), {"attn_mask": torch.ones(5, 7, dtype=torch.bool).tril(2)}),
}


def arguments(name: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    torch.manual_seed(0)
    query, key, options = CALLS[name]
    return [torch.randn(query), torch.randn(key), torch.randn(key)], options


def attended(tensors: list[torch.Tensor], options: dict[str, Any], device: str) -> torch.Tensor:
    moved = {name: item.to(device) if isinstance(item, torch.Tensor) else item for name, item in options.items()}
    result: torch.Tensor = F.scaled_dot_product_attention(*(tensor.to(device) for tensor in tensors), **moved)
    return result


def names_in(captured: Any) -> list[str]:
    return [node.operation for node in captured.graph.nodes()]


@pytest.mark.parametrize("name", CALLS)
def test_without_gradients_it_is_one_operation_of_one_layout(server: Any, name: str) -> None:
    tensors, options = arguments(name)
    with torch.no_grad():
        wanted = attended(tensors, options, "cpu")
        with believed_cuda(server=server.address):
            with djinn.capture(modules=False) as captured:
                got = attended(tensors, options, D)
            _, heads, rows, width = wanted.shape
            assert got.stride() == (rows * heads * width, width, heads * width, 1)
            assert torch.equal(got.cpu(), wanted)
    assert [item for item in names_in(captured) if "_to_copy" not in item] == [WHOLE]


@pytest.mark.parametrize("name", CALLS)
def test_gradients_come_from_the_kernel_that_the_executor_takes(server: Any, name: str) -> None:
    tensors, options = arguments(name)

    def gradients(device: str) -> list[torch.Tensor]:
        given = [tensor.detach().clone().requires_grad_() for tensor in tensors]
        attended(given, options, device).square().sum().backward()
        return [tensor.grad for tensor in given if tensor.grad is not None]

    wanted = gradients("cpu")
    with believed_cuda(server=server.address):
        with djinn.capture(modules=False) as captured:
            got = gradients(D)
        assert len(got) == 3
        assert all(map(torch.equal, (gradient.cpu() for gradient in got), wanted))
    found = names_in(captured)
    assert [item for item in found if "attention" in item] == [
        f"{WHOLE}_kernel", f"{WHOLE}_with_residuals", f"{WHOLE}_backward"]
    assert not any("softmax" in item for item in found)


def test_new_lengths_ask_nothing(server: Any) -> None:
    with believed_cuda(server=server.address), torch.no_grad():
        query = torch.randn(1, 4, 1, 8, device=D)
        cache = torch.randn(1, 4, 1, 8, device=D)
        torch.remote_accelerator.synchronize()  # type: ignore[attr-defined]  # made by djinn
        before = djinn.stats()["round_trips"]
        for _ in range(30):
            cache = torch.cat([cache, torch.randn(1, 4, 1, 8, device=D)], 2)
            query = F.scaled_dot_product_attention(query, cache, cache)
        query.cpu()
        assert djinn.stats()["round_trips"] - before == 1


def test_training_asks_once_for_each_form(server: Any) -> None:
    with believed_cuda(server=server.address):
        weight = torch.randn(1, 4, 6, 8, device=D, requires_grad=True)
        F.scaled_dot_product_attention(weight, weight, weight).sum().backward()
        torch.remote_accelerator.synchronize()  # type: ignore[attr-defined]  # made by djinn
        before = djinn.stats()["round_trips"]
        for _ in range(5):
            F.scaled_dot_product_attention(weight, weight, weight).sum().backward()
        torch.remote_accelerator.synchronize()  # type: ignore[attr-defined]  # made by djinn
        assert djinn.stats()["round_trips"] - before == 1


def test_the_users_choice_of_kernels_travels(server: Any) -> None:
    tensors, options = arguments("causal")
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        chosen = attended(tensors, options, "cpu")
        with believed_cuda(server=server.address):
            assert torch.equal(attended(tensors, options, D).cpu(), chosen)
    with sdpa_kernel(SDPBackend.MATH), believed_cuda(server=server.address), djinn.capture(modules=False) as captured:
        attended([tensor.requires_grad_() for tensor in tensors], options, D)
    # What has no kernel with a backward pass is decomposed, as local PyTorch does.
    assert any("softmax" in item for item in names_in(captured))


def test_dropout_is_drawn_from_the_sessions_numbers(server: Any) -> None:
    tensors, _ = arguments("causal")
    with torch.no_grad(), believed_cuda(server=server.address):
        def draw() -> torch.Tensor:
            torch.manual_seed(3)
            return attended(tensors, {"dropout_p": 0.5}, D).cpu()

        once = draw()
        assert torch.equal(once, draw())
        assert not torch.equal(once, attended(tensors, {"dropout_p": 0.5}, D).cpu())


def test_what_does_not_fit_raises_what_eager_raises(server: Any) -> None:
    tensors, _ = arguments("plain")
    with pytest.raises(RuntimeError) as wanted:
        attended([tensors[0], tensors[1][..., :4], tensors[2]], {}, "cpu")
    with believed_cuda(server=server.address), torch.no_grad(), pytest.raises(RuntimeError) as got:
        attended([tensors[0], tensors[1][..., :4], tensors[2]], {}, D).cpu()
    assert str(got.value).partition("\n")[0] == str(wanted.value).partition("\n")[0]

"""Grouped-query attention on a server, where a guard stands: several heads of the query share one of key and value."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

DEVICE = "remote_accelerator:0"
HEADS = [(4, 4), (4, 2), (4, 1), (6, 2)]
PADDED = pytest.mark.parametrize("padding", [0, 2], ids=["whole", "padded"])


def llama(heads: int = 4, groups: int = 2) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=16 * heads, intermediate_size=128, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=groups, pad_token_id=0)
    return transformers.LlamaForCausalLM(config)


def inputs(padding: int) -> dict[str, torch.Tensor]:
    """Two texts, the second padded on the left. Only without a mask do transformers leave grouping to PyTorch."""
    ids = torch.arange(1, 13).view(2, 6)
    ids[1, :padding] = 0
    return {"input_ids": ids, "attention_mask": (ids != 0).long()} if padding else {"input_ids": ids}


def masks() -> dict[str, dict[str, Any]]:
    torch.manual_seed(2)
    return {
        "none": {},
        "causal": {"is_causal": True},
        "additive": {"attn_mask": torch.randn(2, 1, 5, 5)},
        "boolean": {"attn_mask": torch.rand(5, 5) > 0.2},
        "of each head": {"attn_mask": torch.randn(2, 12, 5, 5)},
    }


@pytest.mark.parametrize("mask", list(masks()))
def test_attention_and_its_gradients_equal_eager(session: Any, mask: str) -> None:
    made = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        sizes = ((2, 12, 5, 16), (2, 3, 5, 16), (2, 3, 5, 16))
        tensors = [torch.randn(size).to(device).requires_grad_() for size in sizes]
        words = {name: value.to(device) if isinstance(value, torch.Tensor) else value
                 for name, value in masks()[mask].items()}
        result = functional.scaled_dot_product_attention(*tensors, enable_gqa=True, **words)
        result.square().sum().backward()
        made.append([item.detach().cpu() for item in (result, *(tensor.grad for tensor in tensors))])
    for remote, local in zip(*reversed(made), strict=True):
        assert torch.equal(remote, local)


@PADDED
@pytest.mark.parametrize(("heads", "groups"), HEADS)
def test_a_llama_and_its_gradients_equal_eager(session: Any, heads: int, groups: int, padding: int) -> None:
    model = llama(heads, groups)
    remote = copy.deepcopy(model).to(DEVICE)
    words = inputs(padding)
    expected = model(**words, labels=words["input_ids"])
    there = {name: value.to(DEVICE) for name, value in words.items()}
    result = remote(**there, labels=there["input_ids"])
    assert torch.equal(result.logits.detach().cpu(), expected.logits.detach())
    expected.loss.backward()
    result.loss.backward()
    for (name, parameter), there in zip(model.named_parameters(), remote.parameters(), strict=True):
        assert torch.equal(there.grad.cpu(), parameter.grad), name


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"use_cache": False}, {"num_beams": 3}],
                         ids=["dynamic cache", "static cache", "no cache", "beams"])
@PADDED
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_llama_generates_the_same_tokens(
    session: Any, mode: Callable[[], Any], options: dict[str, Any], padding: int,
) -> None:
    model = llama().eval()
    remote = copy.deepcopy(model).to(DEVICE)
    words = inputs(padding)
    there = {name: value.to(DEVICE) for name, value in words.items()}
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, **options}
    with mode():
        expected = model.generate(**words, **options)
        tokens = remote.generate(**there, **options)
    assert torch.equal(tokens.cpu(), expected)


@pytest.mark.parametrize("gradients", [True, False])
def test_encoders_with_padded_batches_run(session: Any, gradients: bool) -> None:
    """Eager makes a nested tensor of such a batch in its fast path, which no server runs."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder, batch = torch.nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 5, 16)
    padding = torch.tensor([[False] * 4 + [True], [False] * 3 + [True] * 2])
    with torch.set_grad_enabled(gradients), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors", UserWarning)
        wanted = encoder(batch, src_key_padding_mask=padding)
        got = encoder.to(DEVICE)(batch.to(DEVICE), src_key_padding_mask=padding.to(DEVICE)).cpu()
    if gradients:
        assert torch.equal(got, wanted)
    else:
        # What is padded is zero in what is made of a nested tensor, and counts for nothing otherwise.
        torch.testing.assert_close(got[~padding], wanted[~padding])

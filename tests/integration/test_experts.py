"""Mixtures of experts with the settings that transformers chooses, on an executor that computes on a CPU.

transformers takes the type of the device for that of a GPU, and asks for what only GPUs have kernels for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import djinn

DEVICE = "remote_accelerator:0"
COMMON = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
          "bos_token_id": 1, "eos_token_id": 2, "num_experts_per_tok": 2}
LATENT = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
          "moe_intermediate_size": 24, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
          "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8},
    "olmoe": {"num_experts": 4},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "granitemoe": {"num_local_experts": 4},
    "phimoe": {"num_local_experts": 4},
}
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@pytest.fixture(params=["server", "here"])
def session(request: pytest.FixtureRequest) -> Iterator[None]:
    """A session on a guarded server in a process of its own, and one in this process."""
    djinn.init(request.getfixturevalue("server").address if request.param == "server" else None)
    yield
    djinn.shutdown()


def _models(family: str) -> tuple[Any, Any]:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family]})
    torch.manual_seed(0)
    local = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert local.config._experts_implementation == "grouped_mm"
    return local, copy.deepcopy(local).to(DEVICE)


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_give_what_they_give_here(family: str) -> None:
    local, remote = _models(family)
    ids = torch.randint(3, 60, (2, 9))
    with torch.no_grad():
        assert torch.equal(remote(input_ids=ids.to(DEVICE)).logits.cpu(), local(input_ids=ids).logits)
    options = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(remote.generate(ids.to(DEVICE), **options).cpu(), local.generate(ids, **options))
    local.train()
    remote.train()
    losses = []
    for model, given in ((local, ids), (remote, ids.to(DEVICE))):
        torch.manual_seed(1)
        loss = model(input_ids=given, labels=given).loss
        loss.backward()
        losses.append(loss.detach().cpu())
    assert torch.equal(*losses)
    for (name, mine), theirs in zip(local.named_parameters(), remote.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        assert mine.grad is None or torch.equal(theirs.grad.cpu(), mine.grad), name


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_are_counted_where_no_kernel_does(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    ids = torch.randint(0, 8, (3, 11), dtype=dtype)
    remote = ids.to(DEVICE)
    calls: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: torch.histc(x, bins=8, min=0, max=7),
        lambda x: torch.histc(x, bins=6, min=0, max=5),
        lambda x: x.histc(4, 0, 8),
        lambda x: torch.histc(x, bins=5),
        lambda x: torch.histc(x[:0], bins=3, min=0, max=2),
        lambda x: torch.histc(torch.full_like(x, 3), bins=4),
    ]
    for call in calls:
        counted = call(remote)
        assert counted.dtype == dtype
        assert torch.equal(counted.cpu(), call(ids.double()).to(dtype))
    assert torch.equal(torch.histc(remote, bins=8, min=0, max=7).cpu(), ids.flatten().bincount(minlength=8).to(dtype))


@pytest.mark.usefixtures("session")
def test_a_histogram_of_what_cannot_be_counted_raises_as_here() -> None:
    for given in (torch.ones(3, dtype=torch.bool), torch.ones(3, dtype=torch.complex64)):
        with pytest.raises(NotImplementedError, match="not implemented for"):
            torch.histc(given, bins=4)
        with pytest.raises(NotImplementedError, match="not implemented for"):
            torch.histc(given.to(DEVICE), bins=4).cpu()

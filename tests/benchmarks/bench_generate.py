"""GPT-2 generates 32 tokens: in this process, and in a server's, against local eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

import djinn

transformers = pytest.importorskip("transformers")
OPTIONS = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
PROMPT = torch.tensor([[464, 3290, 318, 257, 845, 922, 3290, 13]])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("where", ["in_process", "tcp"])
def test_generate(
    benchmark: BenchmarkFixture, request: pytest.FixtureRequest, compare: Callable[..., Any], where: str, mode: type
) -> None:
    djinn.init(server=request.getfixturevalue("server_address") if where == "tcp" else "")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()
    remote = copy.deepcopy(model).to("remote_accelerator:0")
    prompt = PROMPT.to("remote_accelerator:0")
    with mode():
        assert torch.equal(remote.generate(prompt, **OPTIONS).cpu(), model.generate(PROMPT, **OPTIONS))
        comparison = compare(lambda: model.generate(PROMPT, **OPTIONS),
                             lambda: remote.generate(prompt, **OPTIONS).cpu())
        djinn.reset_stats()
        benchmark.pedantic(lambda: remote.generate(prompt, **OPTIONS).cpu(), rounds=3)
        stats = djinn.stats()
    tokens = 3 * 32
    benchmark.extra_info.update(speed=comparison.speed, where=where, mode=mode.__name__)
    print(f"\nGPT-2 124M, 32 tokens, {where}, {mode.__name__}: {comparison}; "
          f"{stats['round_trips'] / tokens:.2f} round trips and {stats['bytes_sent'] / tokens:,.0f} bytes sent a token")
    djinn.shutdown()

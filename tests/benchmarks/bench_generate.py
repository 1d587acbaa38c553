"""GPT-2 124M generates 32 tokens on a server in another process, against local eager."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from support.models import gpt2
from support.models.gpt2 import PROMPT, TOKENS, generated
from transformers import GPT2LMHeadModel

import djinn

DEVICE = "remote_accelerator:0"
DELAY_S = 0.015


@pytest.fixture(scope="module")
def model() -> GPT2LMHeadModel:
    return gpt2.gpt2()


def remote(model: GPT2LMHeadModel, address: str) -> Callable[[], torch.Tensor]:
    """Move a copy of the model to a server, and check what it generates there."""
    djinn.init(server=address)
    there, prompt = copy.deepcopy(model).to(DEVICE), PROMPT.to(DEVICE)
    assert torch.equal(generated(there, prompt), generated(model, PROMPT))
    return lambda: generated(there, prompt)


def test_generate(
    compare: Callable[..., Any], publish: Callable[..., None], model: GPT2LMHeadModel, server_address: str
) -> None:
    ours = remote(model, server_address)
    comparison = compare(lambda: generated(model, PROMPT), ours)
    publish(comparison.speed, comparison.details)


def test_generate_compiled(
    compare: Callable[..., Any], publish: Callable[..., None], model: GPT2LMHeadModel, server_address: str
) -> None:
    torch._dynamo.reset()
    djinn.init(server=server_address)
    there, prompt = copy.deepcopy(model).to(DEVICE), PROMPT.to(DEVICE)
    there.forward = torch.compile(there.forward, backend="djinn")
    static = {"cache_implementation": "static", "disable_compile": True}
    for _ in range(2):
        assert torch.equal(generated(there, prompt, **static), generated(model, PROMPT, **static))
    comparison = compare(lambda: generated(model, PROMPT, **static), lambda: generated(there, prompt, **static))
    publish(comparison.speed, comparison.details)


@pytest.fixture(scope="module")
def traffic() -> dict[str, float]:
    """What was counted over calls after the first, a token; filled by the first benchmark that needs it."""
    return {}


@pytest.fixture
def traffic_of_a_token(
    benchmark: BenchmarkFixture, model: GPT2LMHeadModel, request: pytest.FixtureRequest, traffic: dict[str, float]
) -> dict[str, float]:
    calls = 2
    if not traffic:
        ours = remote(model, request.getfixturevalue("server_address"))
        djinn.reset_stats()
        benchmark.pedantic(ours, rounds=calls)
        counted = ("bytes_sent", "bytes_received", "round_trips", "flushes", "programs_sent", "operations")
        traffic.update((name, djinn.stats()[name] / (calls * TOKENS)) for name in counted)
    else:
        benchmark.pedantic(lambda: None)
    return traffic


def test_generate_bytes(publish: Callable[..., None], traffic_of_a_token: dict[str, float]) -> None:
    counted = traffic_of_a_token
    publish(counted["bytes_sent"] + counted["bytes_received"], counted)


def test_generate_round_trips(publish: Callable[..., None], traffic_of_a_token: dict[str, float]) -> None:
    publish(traffic_of_a_token["round_trips"])


def test_generate_delayed(
    compare: Callable[..., Any], publish: Callable[..., None], model: GPT2LMHeadModel, server_address: str,
    delay: Callable[[str, float], str],
) -> None:
    ours = remote(model, delay(server_address, DELAY_S))
    turns = compare(lambda: generated(model, PROMPT), ours, turns=3)
    ratios = [ours_s / (2 * DELAY_S * TOKENS + rival_s)
              for rival_s, ours_s in zip(turns.rival_s, turns.ours_s, strict=True)]
    publish(statistics.median(ratios), turns.details)

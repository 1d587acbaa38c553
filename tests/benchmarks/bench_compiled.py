"""``generate`` of a narrow GPT-2 on a server, its forward pass compiled: the cost to the client, and the time.

Kernels cost next to nothing in this model, so what is left is the client's own work.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from time import perf_counter, process_time
from typing import Any

import attrs
import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

import djinn

DEVICE = "remote_accelerator:0"
TOKENS = 64
TURNS = 5
PROMPT = torch.arange(1, 9)[None]


@attrs.frozen
class Turns:
    """Seconds of alternating turns: local eager's, then djinn's."""

    wall_s: list[tuple[float, float]]
    processor_s: list[tuple[float, float]]

    @staticmethod
    def ratio(pairs: list[tuple[float, float]]) -> float:
        """The median ratio of djinn's to local eager's."""
        return statistics.median(ours / rival for rival, ours in pairs)

    @staticmethod
    def details(pairs: list[tuple[float, float]]) -> dict[str, float]:
        """Medians of a token, in milliseconds."""
        rival, ours = (statistics.median(side) / TOKENS * 1e3 for side in zip(*pairs, strict=True))
        return {"rival (ms a token)": rival, "djinn (ms a token)": ours}


def generated(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = model.generate(prompt, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
    return made.cpu()


def measured(address: str) -> Turns:
    transformers = pytest.importorskip("transformers")
    torch._dynamo.reset()
    djinn.init(server=address)
    torch.manual_seed(0)
    local = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_embd=64, n_head=4, vocab_size=1000, bos_token_id=0, eos_token_id=0)).eval()
    local.generation_config.eos_token_id = None
    remote, prompt = copy.deepcopy(local).to(DEVICE), PROMPT.to(DEVICE)
    remote.forward = torch.compile(remote.forward, backend="djinn")
    wanted = generated(local, PROMPT)
    for _ in range(2):
        assert torch.equal(generated(remote, prompt), wanted)
    turns = Turns([], [])
    for _ in range(TURNS):
        walls, processors = [], []
        for model, ids in ((local, PROMPT), (remote, prompt)):
            begin, begin_processor = perf_counter(), process_time()
            generated(model, ids)
            walls.append(perf_counter() - begin)
            processors.append(process_time() - begin_processor)
        turns.wall_s.append((walls[0], walls[1]))
        turns.processor_s.append((processors[0], processors[1]))
    return turns


@pytest.fixture(scope="module")
def kept() -> list[Turns]:
    """The turns, once a benchmark has taken them."""
    return []


@pytest.fixture
def turns(benchmark: BenchmarkFixture, request: pytest.FixtureRequest, kept: list[Turns]) -> Turns:
    if not kept:
        address = request.getfixturevalue("server_address")
        benchmark.pedantic(lambda: kept.append(measured(address)))
    else:
        benchmark.pedantic(lambda: None)
    return kept[0]


def test_compiled_generate(publish: Callable[..., None], turns: Turns) -> None:
    publish(turns.ratio(turns.wall_s), turns.details(turns.wall_s))


def test_compiled_generate_client(publish: Callable[..., None], turns: Turns) -> None:
    publish(turns.ratio(turns.processor_s), turns.details(turns.processor_s))

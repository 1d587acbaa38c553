"""``generate`` of narrow models on a server, compiled and recorded: the cost to the client, and the time.

Kernels cost next to nothing in these models, so what is left is the client's own work.
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


def gpt2() -> Any:
    """Make a GPT-2 of 12 narrow layers."""
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_embd=64, n_head=4, vocab_size=1000, bos_token_id=0, eos_token_id=0))


def llama() -> Any:
    """Make a Llama of 16 narrow layers, in which two heads for queries share one for keys and values."""
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=16, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=0, eos_token_id=0))


def measured(address: str, make: Callable[[], Any], *, compiles: bool) -> Turns:
    torch._dynamo.reset()
    djinn.init(server=address)
    torch.manual_seed(0)
    local = make().eval()
    local.generation_config.eos_token_id = None
    remote, prompt = copy.deepcopy(local).to(DEVICE), PROMPT.to(DEVICE)
    if compiles:
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
def kept() -> dict[tuple[Callable[[], Any], bool], Turns]:
    """The turns of each model, recorded or compiled, once a benchmark has taken them."""
    return {}


@pytest.fixture
def turns(
    benchmark: BenchmarkFixture, request: pytest.FixtureRequest, kept: dict[tuple[Callable[[], Any], bool], Turns]
) -> Callable[..., Turns]:
    """Takes the turns of a model, unless that was done."""

    def take(make: Callable[[], Any], *, compiles: bool) -> Turns:
        key = make, compiles
        if key in kept:
            benchmark.pedantic(lambda: None)
        else:
            address = request.getfixturevalue("server_address")
            benchmark.pedantic(lambda: kept.update({key: measured(address, make, compiles=compiles)}))
        return kept[key]

    return take


def publish_time(publish: Callable[..., None], turns: Turns) -> None:
    publish(turns.ratio(turns.wall_s), turns.details(turns.wall_s))


def publish_processor_time(publish: Callable[..., None], turns: Turns) -> None:
    publish(turns.ratio(turns.processor_s), turns.details(turns.processor_s))


def test_compiled_generate(publish: Callable[..., None], turns: Callable[..., Turns]) -> None:
    publish_time(publish, turns(gpt2, compiles=True))


def test_compiled_generate_client(publish: Callable[..., None], turns: Callable[..., Turns]) -> None:
    publish_processor_time(publish, turns(gpt2, compiles=True))


def test_recorded_generate(publish: Callable[..., None], turns: Callable[..., Turns]) -> None:
    publish_time(publish, turns(gpt2, compiles=False))


def test_recorded_generate_client(publish: Callable[..., None], turns: Callable[..., Turns]) -> None:
    publish_processor_time(publish, turns(gpt2, compiles=False))


def test_compiled_llama(publish: Callable[..., None], turns: Callable[..., Turns]) -> None:
    publish_time(publish, turns(llama, compiles=True))


def test_compiled_llama_client(publish: Callable[..., None], turns: Callable[..., Turns]) -> None:
    publish_processor_time(publish, turns(llama, compiles=True))


def test_recorded_llama(publish: Callable[..., None], turns: Callable[..., Turns]) -> None:
    publish_time(publish, turns(llama, compiles=False))


def test_recorded_llama_client(publish: Callable[..., None], turns: Callable[..., Turns]) -> None:
    publish_processor_time(publish, turns(llama, compiles=False))

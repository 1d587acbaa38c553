"""The patterns find what the modules of many families say is there: all of it, and nothing else."""

from __future__ import annotations

import collections
import gc
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.labelled_families import (
    DEVICE,
    FAMILIES,
    VOCABULARY,
    Family,
    PresetCacheLlama,
    Run,
    cache_buffers,
    cached_tensors,
    captured_run,
    gpt2,
    is_cross,
    read_only_tensors,
    recorded,
    transformers,
)

import djinn
from djinn_conformance.graphs import renamed
from djinn_plugins.graph.graph import RecordedGraph
from djinn_plugins.graph.kinds import PatternMatch
from djinn_plugins.graph.patterns.patterns import PATTERNS

PAGE = Path(__file__).parents[2] / "docs" / "patterns.md"
KINDS = ("attention", "mlp", "norm", "conv_block", "moe", "recurrent", "head")
BY_NAME = {family.name: family for family in FAMILIES}
DECODERS = [family for family in FAMILIES if family.decodes]
MODES = ("no_grad", "training") if os.environ.get("HYPOTHESIS_PROFILE") == "ci" else (
    "no_grad", "inference", "grad", "training")
"""The nightly run, and whoever runs this file alone, tries all of them."""
each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
each_decoder = pytest.mark.parametrize("family", DECODERS, ids=lambda family: family.name)


@pytest.fixture(autouse=True, scope="module")
def own_session() -> Iterator[None]:
    djinn.shutdown()
    djinn.init()
    yield
    djinn.shutdown()


def found(graph: RecordedGraph) -> list[PatternMatch]:
    return [match for pattern in PATTERNS for match in pattern.find(graph)]


def counted(matches: Sequence[PatternMatch]) -> collections.Counter[str]:
    return collections.Counter(match.pattern for match in matches)


def of(matches: Sequence[PatternMatch], pattern: str) -> list[PatternMatch]:
    return [match for match in matches if match.pattern == pattern]


def differences(run: Run, matches: Sequence[PatternMatch]) -> list[str]:
    """Hold matches against calls of labelled modules, one by one, in both directions."""
    places = {node.id: place for place, node in enumerate(run.graph.nodes())}
    said = []
    for kind in KINDS:
        calls, hits = run.calls.get(kind, []), collections.Counter[Any]()
        for match in of(matches, kind):
            inside = [call for call in calls if any(call.start <= places[node] < call.end for node in match.nodes)]
            if len(inside) != 1:
                said.append(f"{kind} {match.nodes} is in {[call.path for call in inside]}")
            hits.update(inside)
        said += [f"{kind} {call.path} was found {hits[call]} times" for call in calls if hits[call] != 1]
    lookups = sum(match.metadata["lookups"] for match in of(matches, "embedding"))
    if lookups != len(run.calls.get("lookup", [])):
        said.append(f"{lookups} lookups, not {len(run.calls.get('lookup', []))}")
    return said


@each_family
@pytest.mark.parametrize("mode", MODES)
def test_each_labelled_call_is_found_once_and_nothing_else_is(family: Family, mode: str) -> None:
    run = recorded(family, mode)
    matches = found(run.graph)
    assert differences(run, matches) == []
    assert {whole: counted(matches)[whole] for whole in ("llm", "vision_encoder")} == {
        "llm": 0, "vision_encoder": 0, **family.wholes}


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "deepseek_v3"])
def test_experts_are_found_in_one_product_for_all_tokens_too(name: str) -> None:
    family = BY_NAME[name]
    model = family.model()
    model.set_experts_implementation("batched_mm")
    run = captured_run(family, model, "no_grad", use_cache=False)
    matches = found(run.graph)
    assert differences(run, matches) == []
    assert all((match.metadata["experts"], match.metadata["experts_per_token"]) == (4, 2)
               for match in of(matches, "moe"))


@each_family
def test_matches_of_a_pattern_have_no_node_in_common(family: Family) -> None:
    for mode in ("no_grad", "training"):
        seen: set[tuple[str, str]] = set()
        for match in found(recorded(family, mode).graph):
            here = {(match.pattern, node) for node in match.nodes}
            assert not here & seen
            seen |= here


@each_family
def test_roles_and_values_belong_to_the_match(family: Family) -> None:
    graph = recorded(family, "no_grad").graph
    values = {value for node in graph.nodes() for value in (*node.inputs, *node.outputs)}
    for match in found(graph):
        assert set(match.roles) <= set(match.nodes), match
        assert set(match.values.values()) <= values | {""}, match


def test_gpt2_of_twelve_layers_has_what_it_is_known_for() -> None:
    model = gpt2().eval()
    run = captured_run(BY_NAME["gpt2"], model, "no_grad", use_cache=True)
    matches = found(run.graph)
    assert counted(matches) == {"attention": 12, "mlp": 12, "norm": 25, "kv_cache": 24, "embedding": 1, "head": 1,
                                "llm": 1}
    assert of(matches, "embedding")[0].metadata["lookups"] == 2
    llm, = of(matches, "llm")
    assert (llm.metadata["layers"], llm.metadata["architecture"]) == (12, "decoder")
    assert {match.metadata["activation"] for match in of(matches, "mlp")} == {"gelu_tanh"}


@each_family
def test_heads_and_directions_are_those_of_the_configuration(family: Family) -> None:
    run = recorded(family, "no_grad")
    attentions = of(found(run.graph), "attention")
    if not family.attention:
        assert not attentions
        return
    calls = run.calls["attention"]
    assert sum(match.metadata["is_cross"] for match in attentions) == sum(map(is_cross, calls))
    causal = sum(map(family.is_causal, calls))
    assert sum(match.metadata["is_causal"] for match in attentions) == causal
    assert sum(match.metadata["is_grouped"] for match in attentions) == (causal if family.is_grouped else 0)
    for match in attentions:
        assert match.metadata["heads"] in family.heads, match.metadata
        assert match.metadata["query_length"]
        assert match.metadata["key_length"]


@each_decoder
def test_a_cache_grows_in_prefill_and_in_each_step(family: Family) -> None:
    model = family.model().to(DEVICE)
    inputs = {name: value.to(DEVICE) for name, value in family.inputs().items()}
    with torch.no_grad():
        first = captured_run(family, model, "no_grad", inputs=inputs, use_cache=True)
        step = captured_run(family, model, "no_grad", inputs=family.next_inputs(inputs, first.output), use_cache=True,
                            past_key_values=first.output.past_key_values)
    tensors = cached_tensors(first.output.past_key_values)
    assert tensors
    for run, count in ((first, tensors), (step, tensors - read_only_tensors(first.output.past_key_values))):
        matches = found(run.graph)
        assert differences(run, matches) == []
        caches = of(matches, "kv_cache")
        assert len(caches) == count
        assert {match.metadata["form"] for match in caches} == {"growing"}
        assert all(match.metadata["is_causal"] for match in of(matches, "attention")
                   if not match.metadata["is_cross"] and match.metadata["query_length"] == 1)
        assert counted(matches)["llm"] == 1
    assert {match.metadata["new_length"] for match in of(found(step.graph), "kv_cache")} == {1}
    assert all(match.metadata["query_length"] == 1 for match in of(found(step.graph), "attention"))


STATIC = [family for family in DECODERS if family.has_static_cache]


@pytest.mark.parametrize("family", STATIC, ids=lambda family: family.name)
def test_a_cache_of_fixed_size_is_written(family: Family) -> None:
    model = family.model().to(DEVICE)
    inputs = {name: value.to(DEVICE) for name, value in family.inputs().items()}
    cache = transformers.StaticCache(config=model.config, max_cache_len=24)
    first = captured_run(family, model, "no_grad", inputs=inputs, use_cache=True, past_key_values=cache)
    step = captured_run(family, model, "no_grad", inputs=family.next_inputs(inputs, first.output), use_cache=True,
                        past_key_values=cache)
    for run, new in ((first, inputs["input_ids"].shape[1]), (step, 1)):
        matches = found(run.graph)
        caches = of(matches, "kv_cache")
        assert differences(run, matches) == []
        assert len(caches) == 2 * len(cache.layers)
        assert {(match.metadata["form"], match.metadata["new_length"]) for match in caches
                if match.metadata["length"] == 24} <= {("static", new)}
        assert counted(matches)["llm"] == 1


def test_a_hand_written_cache_is_written_by_slices() -> None:
    family = BY_NAME["hand_written_llama"]
    model = PresetCacheLlama().eval().to(DEVICE)
    prompt = captured_run(family, model, "no_grad")
    step = captured_run(family, model, "no_grad", inputs={"input_ids": torch.tensor([[4]]).to(DEVICE)}, start=7)
    for run, new, length in ((prompt, 7, 7), (step, 1, 8)):
        caches = of(found(run.graph), "kv_cache")
        assert [(match.metadata["form"], match.metadata["new_length"], match.metadata["length"]) for match in caches] \
            == [("static", new, 32)] * 4
        attention = of(found(run.graph), "attention")
        assert [(match.metadata["query_length"], match.metadata["key_length"], match.metadata["is_grouped"])
                for match in attention] == [(new, length, True)] * 2


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "t5", "bart"])
def test_each_step_of_generate_is_a_language_model_of_its_own(name: str) -> None:
    family = BY_NAME[name]
    model = family.model().to(DEVICE)
    inputs = {"input_ids": family.inputs()["input_ids"].to(DEVICE)}
    with torch.no_grad(), djinn.capture(model) as captured:
        made = model.generate(**inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0,
                              return_dict_in_generate=True)
    matches = found(captured.graph)
    tensors, once = cached_tensors(made.past_key_values), read_only_tensors(made.past_key_values)
    assert counted(matches)["llm"] == 4
    assert len(of(matches, "kv_cache")) == once + 4 * (tensors - once)
    nodes = [node for match in of(matches, "llm") for node in match.nodes]
    assert len(nodes) == len(set(nodes))


@pytest.mark.parametrize("sampling", [{"do_sample": True, "top_k": 5, "temperature": 0.7}, {"num_beams": 2}],
                         ids=["sampled", "beams"])
def test_choosing_tokens_hides_no_head(sampling: dict[str, Any]) -> None:
    model = BY_NAME["llama"].model().to(DEVICE)
    with torch.no_grad(), djinn.capture(model) as captured:
        model.generate(input_ids=torch.tensor([[3, 4, 5]]).to(DEVICE), max_new_tokens=3, min_new_tokens=3,
                       pad_token_id=0, **sampling)
    matches = found(captured.graph)
    assert (counted(matches)["head"], counted(matches)["llm"], counted(matches)["moe"]) == (3, 3, 0)
    assert all(match.metadata["kind"] == "language_model" for match in of(matches, "head"))
    assert counted(matches)["kv_cache"] == 3 * 4


def alone(build: Callable[[], object]) -> list[PatternMatch]:
    with torch.no_grad(), djinn.capture() as captured:
        build()
    return found(captured.graph)


LOOKALIKES: dict[str, Callable[[], object]] = {
    "rotation is no cache": lambda: torch.cat((torch.randn(1, 4, 7, 8).neg(), torch.randn(1, 4, 7, 8).relu()), -1),
    "softmax over classes": lambda: torch.softmax(torch.randn(4, 8).relu() @ torch.randn(8, 10), -1),
    "products in a row": lambda: torch.randn(4, 8).relu() @ torch.randn(8, 16) @ torch.randn(16, 8),
    "length of a vector": lambda: torch.nn.functional.normalize(torch.randn(4, 8).relu()),
    "variance alone": lambda: torch.randn(4, 8).pow(2).mean(-1, keepdim=True).rsqrt().exp(),
    "sigmoid of a sum": lambda: torch.sigmoid(torch.randn(4, 8).relu() + torch.randn(4, 8)),
    "top of a vector": lambda: torch.topk(torch.randn(4, 8).relu() @ torch.randn(8, 10), 3),
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_what_only_looks_like_a_structure_is_none(name: str) -> None:
    matches = alone(LOOKALIKES[name])
    assert [match.pattern for match in matches if match.pattern != "head"] == []


def test_a_training_step_with_an_optimizer_adds_nothing() -> None:
    model = gpt2(layers=2).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.arange(12).reshape(2, 6).to(DEVICE) % VOCABULARY
    with djinn.capture(model) as captured:
        for _ in range(2):
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    counts = counted(found(captured.graph))
    assert counts == {"attention": 4, "mlp": 4, "norm": 10, "embedding": 2, "head": 2, "llm": 2}


def test_another_name_for_everything_changes_nothing() -> None:
    graph = recorded(BY_NAME["llava"], "no_grad").graph
    other, names = renamed(graph)
    assert [match.nodes for match in found(other)] == [
        tuple(names[node] for node in match.nodes) for match in found(graph)]


def searched_s(run: Run) -> float:
    """Processor time of a search in a graph that was not searched before."""
    graph = RecordedGraph(run.graph.nodes(), run.graph.storages)
    gc.collect()
    gc.disable()
    started = time.thread_time()
    found(graph)
    seconds = time.thread_time() - started
    gc.enable()
    return seconds


def test_the_search_is_linear() -> None:
    short, long = (captured_run(BY_NAME["gpt2"], gpt2(layers).eval(), "no_grad", use_cache=True) for layers in (4, 32))
    assert len(long.graph) > 6 * len(short.graph)
    # What else the machine does can only make a search slower; so one pair of fast ones is enough.
    short_s = long_s = inf
    for _ in range(20):
        short_s, long_s = min(short_s, searched_s(short)), min(long_s, searched_s(long))
        if long_s / len(long.graph) < 2.5 * short_s / len(short.graph):
            return
    pytest.fail(f"{len(short.graph)} nodes take {short_s:.4f} s, {len(long.graph)} take {long_s:.4f} s")


def test_indices_go_with_their_graphs() -> None:
    run = captured_run(BY_NAME["gpt2"], gpt2(1).eval(), "no_grad")
    graph = RecordedGraph(run.graph.nodes(), run.graph.storages)
    found(graph)
    alive = weakref.ref(graph)
    del graph
    gc.collect()
    assert alive() is None


@lru_cache(maxsize=1)
def table() -> list[str]:
    """The rows of the page: what the modules say, for one call of each model."""
    columns = ("attention", "mlp", "norm", "conv_block", "moe", "recurrent", "lookup", "head")
    rows = []
    for family in FAMILIES:
        run = recorded(family, "cached" if family.decodes else "no_grad")
        cached = cached_tensors(run.output.past_key_values) if family.decodes else cache_buffers(run.model)
        counts = [len(run.calls.get(kind, [])) for kind in columns]
        counts.insert(3, cached)
        rows.append("| " + " | ".join([family.name, *(str(count or "") for count in counts)]) + " |")
    return rows


def test_the_page_has_the_table() -> None:
    said = [line for line in PAGE.read_text().splitlines() if line.startswith(tuple(f"| {f.name} |" for f in FAMILIES))]
    assert said == table(), "\n".join(table())


def test_the_table_is_what_is_found() -> None:
    for family, row in zip(FAMILIES, table(), strict=True):
        run = recorded(family, "cached" if family.decodes else "no_grad")
        matches = found(run.graph)
        counts = counted(matches)
        lookups = sum(match.metadata["lookups"] for match in of(matches, "embedding"))
        got = [counts[kind] for kind in ("attention", "mlp", "norm", "kv_cache", "conv_block", "moe", "recurrent")]
        cells = [family.name, *(str(count or "") for count in (*got, lookups, counts["head"]))]
        assert row == "| " + " | ".join(cells) + " |"


def test_gradients_do_not_change_what_is_said_of_a_model() -> None:
    for name in ("llama", "t5", "gemma2", "hand_written_gpt", "vit"):
        family = BY_NAME[name]
        said = []
        for mode in ("no_grad", "grad"):
            matches = found(recorded(family, mode).graph)
            said.append([(match.pattern, {key: value for key, value in match.metadata.items() if key != "form"})
                         for match in matches if match.pattern in ("attention", "mlp", "norm", "kv_cache")])
        assert said[0] == said[1]



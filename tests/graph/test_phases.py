"""Each step of generating and of training is known for what it is, from the graph alone and with what was watched."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from support.models.labelled_families import FAMILIES, Family, transformers
from support.recording.annotated import BY_STRUCTURE, DEVICE, annotated, recorded, there
from torch import nn

import djinn
from djinn.ir.phase import ExecutionPhase
from djinn_plugins.graph.graph import Graph
from djinn_plugins.graph.kinds import Annotations
from djinn_plugins.graph.metadata import DataResidency, Tier

PREFILL, DECODE = ExecutionPhase.LLM_PREFILL, ExecutionPhase.LLM_DECODE
FORWARD, ENCODING = ExecutionPhase.FORWARD, ExecutionPhase.VISION_ENCODING
TRAINING, BACKWARD, OPTIMIZER = (ExecutionPhase.TRAINING_FORWARD, ExecutionPhase.BACKWARD,
                                 ExecutionPhase.OPTIMIZER_STEP)
BY_NAME = {family.name: family for family in FAMILIES}
DECODERS = [family for family in FAMILIES if family.decodes]
NEW_TOKENS = 4
TIERS = pytest.mark.parametrize("tiers", [BY_STRUCTURE, tuple(Tier)], ids=["structure", "all"])


@pytest.fixture(autouse=True)
def own_session() -> Iterator[None]:
    djinn.init(device="cpu", flush_every=None)
    yield
    djinn.shutdown()


@contextlib.contextmanager
def _calls(model: nn.Module) -> Iterator[list[ExecutionPhase]]:
    """Say of each call from outside what it is: by the cache that it is given, or by the part that is called alone."""
    said: list[ExecutionPhase] = []
    running: list[str] = []

    def before(path: str, given: Mapping[str, Any]) -> None:
        if not running:
            cache = given.get("past_key_values")
            if path:
                said.append(FORWARD if path.endswith("encoder") else ENCODING)
            else:
                said.append(DECODE if cache is not None and int(cache.get_seq_length()) > 0 else PREFILL)
        running.append(path)

    def after(*_: object) -> None:
        running.pop()

    handles: list[Any] = []
    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(
            lambda module, args, given, path=path: before(path, given), with_kwargs=True))
        handles.append(module.register_forward_hook(after))
    yield said
    for handle in handles:
        handle.remove()


def _generated(family: Family, **options: Any) -> tuple[Graph, list[ExecutionPhase]]:
    model, inputs = family.model().to(DEVICE), there(family.inputs())
    inputs.pop("decoder_input_ids", None)
    with torch.no_grad(), _calls(model) as said:
        graph = recorded(model, lambda: model.generate(
            **inputs, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, **options))
    assert said.count(DECODE) == NEW_TOKENS - 1
    return graph, said


def _written(phases: Sequence[ExecutionPhase]) -> list[ExecutionPhase]:
    return [phase for phase in phases if phase in (PREFILL, DECODE)]


def _phases(annotations: Annotations, nodes: Sequence[str]) -> Counter[ExecutionPhase]:
    return Counter(annotations.nodes[node]["execution_phase"] for node in nodes)


def _in(graph: Graph, call: int, path: str) -> list[str]:
    return [node.id for node in graph.nodes()
            if node.origin.call_index == call and f".{node.origin.module_path}.".find(f".{path}.") >= 0]


@pytest.mark.parametrize("family", DECODERS, ids=lambda family: family.name)
def test_every_step_of_generate(family: Family) -> None:
    graph, expected = _generated(family)
    for tiers in (BY_STRUCTURE, tuple(Tier)):
        _expect_steps(graph, expected, tiers)


def _expect_steps(graph: Graph, expected: Sequence[ExecutionPhase], tiers: Sequence[Tier]) -> None:
    annotations = annotated(graph, tiers)
    assert annotations.profile is not None
    if Tier.RUNTIME in tiers:
        assert list(annotations.profile.steps) == expected
    # By structure alone, a part that is called by itself may belong to the step that it is called for.
    assert _written(annotations.profile.steps) == _written(expected)
    for call, phase in enumerate(expected):
        inside = [node.id for node in graph.nodes() if node.origin.call_index == call and node.origin.module_type
                  and "vision" not in node.origin.module_path and "projector" not in node.origin.module_path]
        found = _phases(annotations, inside)
        found.pop(ExecutionPhase.MULTIMODAL_FUSION, None)
        # What is prepared ahead of a step, such as a mask, may look like the end of the one before.
        assert found[phase] == found.total() if Tier.RUNTIME in tiers else found[phase] >= 0.85 * found.total(), found


@pytest.mark.parametrize("family", [f for f in DECODERS if f.has_static_cache and f.name in ("gpt2", "llama", "qwen3")],
                         ids=lambda family: family.name)
def test_every_step_of_generate_with_a_cache_of_fixed_size(family: Family) -> None:
    graph, expected = _generated(family, cache_implementation="static")
    for tiers in (BY_STRUCTURE, tuple(Tier)):
        profile = annotated(graph, tiers).profile
        assert profile is not None
        assert _written(profile.steps) == _written(expected)


def test_a_prompt_of_one_token_is_read_and_not_written() -> None:
    model = BY_NAME["llama"].model().to(DEVICE)
    with torch.no_grad():
        graph = recorded(model, lambda: model.generate(
            torch.tensor([[7]]).to(DEVICE), max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0))
    for tiers in (BY_STRUCTURE, tuple(Tier)):
        profile = annotated(graph, tiers).profile
        assert profile is not None
        assert profile.steps == (PREFILL, DECODE, DECODE)


def test_a_single_decode_step_is_known_by_itself() -> None:
    model, ids = BY_NAME["llama"].model().to(DEVICE), torch.tensor([[7, 8, 9]]).to(DEVICE)
    with torch.no_grad():
        cache = model(ids).past_key_values
        djinn.synchronize()
        graph = recorded(nn.Identity(), lambda: model(ids[:, :1], past_key_values=cache))
    annotations = annotated(graph)
    assert annotations.profile is not None
    assert annotations.profile.steps == (DECODE,)
    kept = {value for value, residency in annotations.values.items() if residency is DataResidency.STATEFUL_KV_CACHE}
    produced = {value for node in graph.nodes() for value in node.outputs}
    assert len(kept - produced) == 2 * 2, "keys and values of two layers come from outside"


def test_drafts_that_are_checked_together_are_a_decode_step() -> None:
    model, ids = BY_NAME["llama"].model().to(DEVICE), torch.arange(3, 15)[None].to(DEVICE)

    def work() -> None:
        cache = model(ids).past_key_values
        model(ids[:, :4], past_key_values=cache)

    with torch.no_grad():
        graph = recorded(model, work)
    profile = annotated(graph).profile
    assert profile is not None
    assert profile.steps == (PREFILL, DECODE)


def test_a_hand_written_cache_is_read_and_written_in_turns() -> None:
    model, ids = BY_NAME["hand_written_llama"].model().to(DEVICE), torch.tensor([[7, 8, 9, 10]]).to(DEVICE)

    def work() -> None:
        model(ids, 0)
        model(ids[:, :1], 4)
        model(ids[:, :1], 5)

    with torch.no_grad():
        graph = recorded(model, work)
    for tiers in (BY_STRUCTURE, tuple(Tier)):
        profile = annotated(graph, tiers).profile
        assert profile is not None
        assert profile.steps == (PREFILL, DECODE, DECODE)


@TIERS
def test_a_language_model_without_attention_carries_a_state(tiers: Sequence[Tier]) -> None:
    config = transformers.MambaConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, state_size=8, pad_token_id=0,
                                      bos_token_id=1, eos_token_id=2)
    model = transformers.MambaForCausalLM(config).eval().to(DEVICE)
    with torch.no_grad():
        graph = recorded(model, lambda: model.generate(
            torch.tensor([[3, 4, 5, 6]]).to(DEVICE), max_new_tokens=3, min_new_tokens=3, do_sample=False,
            pad_token_id=0))
    profile = annotated(graph, tiers).profile
    assert profile is not None
    assert (profile.steps, profile.workload) == ((PREFILL, DECODE, DECODE), "llm")


@TIERS
@pytest.mark.parametrize(("name", "phase", "workload", "modality"), [
    ("bert", FORWARD, "text_encoder", "text"),
    ("albert", FORWARD, "text_encoder", "text"),
    ("hand_written_gpt", FORWARD, "llm", "text"),
    ("hand_written_tagger", FORWARD, "recurrent", "text"),
    ("vit", ENCODING, "vision", "vision"),
    ("swin", ENCODING, "vision", "vision"),
    ("resnet", ENCODING, "vision", "vision"),
    ("convnext", ENCODING, "vision", "vision"),
    ("hand_written_cnn", ENCODING, "vision", "vision"),
    ("wav2vec2", FORWARD, "speech", "audio"),
])
def test_other_models(
    name: str, phase: ExecutionPhase, workload: str, modality: str, tiers: Sequence[Tier]
) -> None:
    model, inputs = BY_NAME[name].model().to(DEVICE), there(BY_NAME[name].inputs())
    with torch.no_grad():
        graph = recorded(model, lambda: model(**inputs))
    annotations = annotated(graph, tiers)
    profile = annotations.profile
    assert profile is not None
    assert (profile.workload, profile.steps) == (workload, (phase,))
    assert {known["modality"] for known in annotations.nodes.values()} == {modality}
    assert all("modality" in known["evidence"] for known in annotations.nodes.values())
    assert _phases(annotations, [node.id for node in graph.nodes()])[phase] > 0.9 * len(graph.nodes())


def _run(name: str) -> tuple[Graph, Annotations]:
    model, inputs = BY_NAME[name].model().to(DEVICE), there(BY_NAME[name].inputs())
    with torch.no_grad():
        graph = recorded(model, lambda: model(**inputs))
    return graph, annotated(graph)


def test_pictures_and_text_meet() -> None:
    graph, annotations = _run("llava")
    assert annotations.profile is not None
    assert annotations.profile.workload == "multimodal"
    assert annotations.profile.steps == (PREFILL,)
    tower = _in(graph, 0, "vision_tower")
    assert set(_phases(annotations, tower)) == {ENCODING}
    assert set(_phases(annotations, _in(graph, 0, "language_model"))) == {PREFILL}
    met = [node for node in graph.nodes()
           if annotations.nodes[node.id]["execution_phase"] is ExecutionPhase.MULTIMODAL_FUSION]
    assert "aten::masked_scatter" in {node.operation for node in met}
    assert len(met) < 5


def test_two_towers_meet_at_their_end() -> None:
    graph, annotations = _run("clip")
    for part, modality in (("vision_model", "vision"), ("text_model", "text")):
        assert {annotations.nodes[node]["modality"] for node in _in(graph, 0, part)} == {modality}
    logits = graph.nodes()[-1]
    assert annotations.nodes[logits.id]["modality"] is djinn.Modality.MULTIMODAL_FUSION
    assert logits.metadata["modality"] == "fusion"
    assert set(_phases(annotations, _in(graph, 0, "vision_model"))) == {ENCODING}
    assert set(_phases(annotations, _in(graph, 0, "text_model"))) == {FORWARD}
    met = _phases(annotations, [node.id for node in graph.nodes()])[ExecutionPhase.MULTIMODAL_FUSION]
    assert 0 < met < 10
    assert annotations.profile is not None
    assert annotations.profile.workload == "multimodal"


def test_boxes_are_decoded_from_features() -> None:
    graph, annotations = _run("detr")
    assert set(_phases(annotations, _in(graph, 0, "decoder"))) <= {ExecutionPhase.VISION_DECODING, ENCODING}
    assert set(_phases(annotations, _in(graph, 0, "encoder"))) == {ENCODING}
    assert _phases(annotations, _in(graph, 0, "decoder"))[ExecutionPhase.VISION_DECODING] > 50


def test_features_are_enlarged_to_pictures() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.ConvTranspose2d(8, 4, 4, stride=2), nn.ReLU(),
                          nn.Conv2d(4, 1, 1)).to(DEVICE)
    with torch.no_grad():
        graph = recorded(model, lambda: model(torch.ones(1, 3, 16, 16).to(DEVICE)))
    phases = annotated(graph).profile
    assert phases is not None
    assert set(phases.phases) == {ENCODING, ExecutionPhase.VISION_DECODING}


def _trained(
    model: nn.Module, inputs: Mapping[str, Any], make: Callable[[Any], torch.optim.Optimizer], steps: int = 3
) -> tuple[Graph, list[ExecutionPhase]]:
    """Train, and say of each node what it is by when it was recorded."""
    expected: list[ExecutionPhase] = []
    optimizer = make(model.parameters())
    with djinn.capture(model) as captured:

        def note(phase: ExecutionPhase) -> None:
            expected.extend([phase] * (len(captured._watch) - len(expected)))

        for _ in range(steps):
            optimizer.zero_grad()
            note(OPTIMIZER)
            made = model(**inputs)
            loss = (made if isinstance(made, torch.Tensor) else made[0]).float().square().mean()
            note(TRAINING)
            loss.backward()
            note(BACKWARD)
            optimizer.step()
            note(OPTIMIZER)
    return captured.graph, expected


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "adamw, one by one": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=False),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, foreach=False),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["gpt2", "bert", "resnet", "hand_written_tagger", "hand_written_gpt"])
def test_every_node_of_a_training_loop(name: str, optimizer: str) -> None:
    family = BY_NAME[name]
    graph, expected = _trained(family.model().to(DEVICE).train(), there(family.inputs()), OPTIMIZERS[optimizer])
    for tiers in (BY_STRUCTURE, tuple(Tier)):
        annotations = annotated(graph, tiers)
        wrong = [(node.id, node.operation, phase.value, annotations.nodes[node.id]["execution_phase"].value)
                 for node, phase in zip(graph.nodes(), expected, strict=True)
                 if annotations.nodes[node.id]["execution_phase"] is not phase]
        assert wrong == []
        assert annotations.profile is not None
        assert annotations.profile.steps == (TRAINING,) * 3
        assert annotations.profile.workload == "training"


def test_accumulating_clipping_and_evaluating_in_between() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)).to(DEVICE)
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.ones(4, 8).to(DEVICE)
    expected: list[ExecutionPhase] = []
    with djinn.capture(model) as captured:

        def note(phase: ExecutionPhase) -> None:
            expected.extend([phase] * (len(captured._watch) - len(expected)))

        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(2):
                loss = model(x).square().mean()
                note(TRAINING)
                loss.backward()
                note(BACKWARD)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            note(OPTIMIZER)
            with torch.no_grad():
                model(x)
            note(FORWARD)
    annotations = annotated(captured.graph)
    assert [annotations.nodes[node.id]["execution_phase"] for node in captured.graph.nodes()] == expected
    assert annotations.profile is not None
    assert annotations.profile.steps == (TRAINING, TRAINING, FORWARD) * 2


def test_values_of_a_training_loop() -> None:
    model = BY_NAME["hand_written_gpt"].model().to(DEVICE).train()
    graph, _ = _trained(model, there(_inputs("hand_written_gpt")), OPTIMIZERS["adamw"])
    parameters = sum(parameter.numel() * 4 for parameter in model.parameters())
    profile, values = annotated(graph).profile, annotated(graph).values
    assert profile is not None
    assert profile.residency_bytes[DataResidency.PERSISTENT_WEIGHT] == parameters
    assert 2 * parameters <= profile.residency_bytes[DataResidency.OPTIMIZER_STATE] < 2.1 * parameters
    assert profile.residency_bytes[DataResidency.GRADIENT] >= 3 * parameters
    named = {"parameter": DataResidency.PERSISTENT_WEIGHT, "optimizer_state": DataResidency.OPTIMIZER_STATE,
             "gradient": DataResidency.GRADIENT}
    alone = annotated(graph, BY_STRUCTURE).values
    for value, info in graph.values.items():
        if info.kind in named and value in values:
            assert values[value] is named[info.kind], (info.name, info.kind)
            assert alone[value] is named[info.kind], (info.name, info.kind)


def _inputs(name: str) -> dict[str, torch.Tensor]:
    return BY_NAME[name].inputs()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_weights_and_inputs_are_told_apart_by_structure(family: Family) -> None:
    model, inputs = family.model().to(DEVICE), there(family.inputs())
    with torch.no_grad():
        graph = recorded(model, lambda: model(**inputs))
    values, named = annotated(graph, BY_STRUCTURE).values, annotated(graph).values
    for value, info in graph.values.items():
        if info.kind == "parameter":
            assert named[value] is DataResidency.PERSISTENT_WEIGHT
            assert values[value] is DataResidency.PERSISTENT_WEIGHT, info
        if info.kind == "input":
            assert named[value] is DataResidency.INPUT
            assert values[value] is DataResidency.INPUT, info


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_who_decided_is_said(name: str) -> None:
    graph, _ = _generated(BY_NAME[name])
    for tiers, decided in ((BY_STRUCTURE, Tier.STRUCTURE), (tuple(Tier), Tier.RUNTIME)):
        annotations = annotated(graph, tiers)
        assert set(annotations.seconds) == set(tiers)
        for known in annotations.nodes.values():
            evidence = known["evidence"]
            assert {said.tier for said in evidence.values()} <= set(tiers)
            assert evidence["execution_phase"].tier is decided
            assert "flops" not in evidence
    operations = annotated(graph, [Tier.OPERATION])
    assert all("evidence" not in known for known in operations.nodes.values())
    assert operations.profile is not None
    assert operations.profile.flops == annotated(graph).profile.flops  # type: ignore[union-attr]  # a profile is given

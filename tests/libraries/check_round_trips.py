"""Round trips of libraries in their steady state, counted over a guarded server that does not answer early."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.servers.serving import Serving

import djinn

DEVICE = "remote_accelerator:0"


@pytest.fixture(scope="module", autouse=True)
def _served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with Serving(tmp_path_factory.mktemp("server") / "log") as server:
        djinn.init(server=server.address, early_answers=False)
        yield
        djinn.shutdown()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [
    {"logging_steps": 500}, {"logging_steps": 1}, {"logging_steps": 4}, {"logging_steps": 1, "optim": "sgd"},
    {"logging_steps": 1, "gradient_accumulation_steps": 2},
    {"logging_steps": 1, "gradient_accumulation_steps": 2, "logging_nan_inf_filter": False},
], ids=["silent", "logging each step", "logging each fourth step", "another optimizer, after others", "accumulating",
        "accumulating unchecked"])
def test_trainer_waits_once_a_step(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", DEVICE)
    from accelerate.state import AcceleratorState, PartialState
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    trips: list[int] = []

    class Counting(TrainerCallback):  # type: ignore[misc]  # transformers has no types
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            trips.append(djinn.stats()["round_trips"])

    data = [{"input_ids": (torch.arange(16) * step) % 64, "labels": (torch.arange(16) * step) % 64,
             "attention_mask": torch.ones(16, dtype=torch.long)} for step in range(64)]
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0,
                                       eos_token_id=0))
    arguments = TrainingArguments(output_dir=str(tmp_path), max_steps=16, per_device_train_batch_size=8, report_to=[],
                                  disable_tqdm=True, save_strategy="no", **options)
    Trainer(model, arguments, train_dataset=data, callbacks=[Counting()]).train()
    steps = [after - before for before, after in pairwise(trips)]
    # What follows a wait is learned the first time, the second time completely. Trainer looks at each batch's loss.
    checked = options.get("gradient_accumulation_steps", 1) if options.get("logging_nan_inf_filter", True) else 1
    assert max(steps[8:]) <= checked, steps


@pytest.mark.filterwarnings("ignore")
def test_ddim_waits_no_more_than_euler() -> None:
    from diffusers import DDIMScheduler, EulerDiscreteScheduler

    def trips(kind: Any) -> int:
        scheduler = kind()
        scheduler.set_timesteps(8, device=DEVICE)
        sample = torch.ones(1, 4, 8, 8, device=DEVICE)
        djinn.synchronize()
        djinn.reset_stats()
        for step in scheduler.timesteps:
            scaled = scheduler.scale_model_input(sample, step)
            sample = scheduler.step(scaled * 0.5, step, sample).prev_sample
        return int(djinn.stats()["round_trips"])

    for kind in (DDIMScheduler, EulerDiscreteScheduler):
        trips(kind)
    assert trips(DDIMScheduler) <= trips(EulerDiscreteScheduler)


def questions() -> int:
    """Return how often the program asked for values, also where the server answered early."""
    stats = djinn.stats()
    return int(stats["round_trips"] + stats["answered_early"])


@pytest.mark.parametrize("name", ["BinaryAUROC", "BinaryAveragePrecision", "R2Score"])
def test_a_metric_waits_only_for_a_size_and_its_value(name: str) -> None:
    import torchmetrics.classification
    import torchmetrics.regression

    metric = getattr(torchmetrics.regression if name == "R2Score" else torchmetrics.classification, name)().to(DEVICE)
    for _ in range(5):
        metric.reset()
        truth = torch.randn(16) if name == "R2Score" else torch.arange(16) % 2
        guesses, wanted = torch.randn(16).to(DEVICE), truth.to(DEVICE)
        djinn.synchronize()
        djinn.reset_stats()
        metric.update(guesses, wanted)
        updated = questions()
        metric.compute().tolist()
    # How many guesses differ is known where the operation runs; results have that size.
    assert (updated, questions()) == (0, 1 if name == "R2Score" else 2)


@pytest.mark.parametrize(("name", "most"), [("MulticlassAUROC", 3 * 4), ("MulticlassAveragePrecision", 2 * 4)])
def test_a_metric_of_curves_waits_for_sizes_of_each_class(name: str, most: int) -> None:
    import torchmetrics.classification

    metric = getattr(torchmetrics.classification, name)(4).to(DEVICE)
    for _ in range(4):
        metric.reset()
        guesses, truth = torch.randn(16, 4).softmax(-1).to(DEVICE), torch.randint(4, (16,)).to(DEVICE)
        djinn.synchronize()
        djinn.reset_stats()
        metric.update(guesses, truth)
        metric.compute().tolist()
    assert djinn.stats()["round_trips"] <= most


@pytest.mark.parametrize(("name", "value"), [
    ("BinaryAUROC", 1), ("BinaryAveragePrecision", 1), ("MulticlassAUROC", 3), ("MulticlassAveragePrecision", 3)])
def test_a_metric_with_thresholds_waits_once_an_update(name: str, value: int) -> None:
    import torchmetrics.classification

    is_binary = name.startswith("Binary")
    metric = getattr(torchmetrics.classification, name)(*() if is_binary else (4,), thresholds=20).to(DEVICE)
    for _ in range(2):
        metric.reset()
        guesses = torch.randn(*(16,) if is_binary else (16, 4)).to(DEVICE)
        truth = (torch.arange(16) % (2 if is_binary else 4)).to(DEVICE)
        djinn.synchronize()
        djinn.reset_stats()
        metric.update(guesses, truth)
        updated = questions()
        metric.compute().tolist()
    assert (updated, questions()) == (1, 1 + value)


@pytest.mark.parametrize("name", ["MulticlassAccuracy", "MulticlassF1Score", "MulticlassConfusionMatrix"])
def test_a_metric_waits_once_an_update_and_once_for_its_value(name: str) -> None:
    import torchmetrics.classification

    metric = getattr(torchmetrics.classification, name)(4).to(DEVICE)
    for _ in range(4):
        metric.reset()
        guesses, truth = torch.randn(16, 4).to(DEVICE), torch.randint(4, (16,)).to(DEVICE)
        djinn.synchronize()
        djinn.reset_stats()
        metric.update(guesses, truth)
        updated = djinn.stats()["round_trips"]
        with warnings.catch_warnings():
            metric.compute().tolist()
    assert (updated, djinn.stats()["round_trips"]) == (1, 2)

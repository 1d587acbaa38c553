"""Real weights, real text: sentence embeddings with all-MiniLM-L6-v2."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from djinn_plugins.cli.demo.report import DemoReport

SENTENCES = (
    "The cat sleeps on the warm windowsill.",
    "A kitten is napping in the sun.",
    "The committee postponed the vote until Tuesday.",
    "Lawmakers delayed their decision by a few days.",
    "Add two cups of flour and a pinch of salt.",
    "Mix the dough and let it rest for an hour.",
    "The rover sent its first pictures from Mars.",
    "A probe transmitted images of the red planet.",
    "She plays the violin in a string quartet.",
    "The orchestra is rehearsing a new symphony.",
    "Heavy rain flooded the valley overnight.",
    "The river burst its banks after the storm.",
)
TOLERANCE = 1e-5
"""Largest difference of an embedding's component that counts as equal on another type of device; float32 rounding."""


def run(console: Console, report: DemoReport, path: Path) -> None:
    """Embed the sentences locally and remotely, and print the nearest neighbours."""
    from transformers import AutoModel, AutoTokenizer

    console.rule("all-MiniLM-L6-v2 embeds a dozen sentences")
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    model = AutoModel.from_pretrained(path, local_files_only=True).eval()
    batch = dict(tokenizer(list(SENTENCES), padding=True, return_tensors="pt"))
    remote_model = copy.deepcopy(model).to("remote_accelerator:0")
    remote_batch = {name: tensor.to("remote_accelerator:0") for name, tensor in batch.items()}
    expected, embedded = report.compare("embedding", lambda: embed(model, batch),
                                        lambda: embed(remote_model, remote_batch).cpu())
    similarity = embedded @ embedded.T
    similarity.fill_diagonal_(-1)
    for sentence, (score, neighbour) in zip(SENTENCES, zip(*similarity.max(dim=1), strict=True), strict=True):
        console.print(f"  {sentence:<48} {score.item():.2f}  {SENTENCES[int(neighbour)]}")
    difference = (embedded - expected).abs().max().item()
    console.print(report.check("embeddings", difference <= (0.0 if report.exact else TOLERANCE),
                               f"largest difference from local eager {difference:.1e}"))


@torch.inference_mode()
def embed(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Embed a batch, ``i64[N, T]`` to unit vectors ``f32[N, 384]``.

    Source:
        Mean pooling over the attention mask, as the model's card describes.
    """
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    pooled = (hidden * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(pooled, dim=1)

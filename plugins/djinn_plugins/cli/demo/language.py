"""Trains a small GPT on Python's own manual."""

from __future__ import annotations

import copy
from typing import Any

import attrs
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from djinn_plugins.cli.demo.report import DemoReport

BLOCK = 64
BATCH = 16
READ_EVERY = 10
LOSS_TOLERANCE = 0.02
"""Largest difference of a loss that counts as equal on another type of device, where rounding differs."""


@attrs.frozen
class DemoOutcome:
    """The losses that were read, and the tokens that were generated."""

    losses: list[float]
    tokens: list[int]


def run(console: Console, report: DemoReport, *, steps: int, tokens: int, seed: int) -> None:
    """Train and generate locally and remotely."""
    text = manual()
    letters = sorted(set(text))
    data = torch.tensor([letters.index(letter) for letter in text])
    console.rule(f"a GPT learns the Python manual's way of writing ({len(text):,} characters)")
    torch.manual_seed(seed)
    model = small_gpt(len(letters))
    remote = copy.deepcopy(model)
    expected, result = report.compare(
        "GPT",
        lambda: train_and_generate(console, model, data, "cpu", steps, tokens, seed),
        lambda: train_and_generate(console, remote, data, "remote_accelerator:0", steps, tokens, seed),
    )
    written = "".join(letters[token] for token in result.tokens)
    console.print(f"It writes: {written!r}", markup=False, soft_wrap=True)
    gap = max(abs(mine - theirs) for mine, theirs in zip(result.losses, expected.losses, strict=True))
    console.print(f"loss {result.losses[0]:.3f} -> {result.losses[-1]:.3f}; "
                  + report.check("losses", gap <= (0.0 if report.exact else LOSS_TOLERANCE),
                                 f"largest difference {gap:.1e}"))
    if report.exact:
        console.print(report.check("generated tokens", result.tokens == expected.tokens))


def manual() -> str:
    """Return the beginning of the language reference that ships with Python."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))[:200_000]
    return "".join(letter for letter in text if letter.isascii())


def small_gpt(letters: int) -> Any:
    """Create a GPT of 3 layers, 96 wide, over single characters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=letters, n_positions=256, n_embd=96, n_layer=3, n_head=4,
                                      bos_token_id=0, eos_token_id=0))


def train_and_generate(
    console: Console, model: Any, data: torch.Tensor, device: str, steps: int, tokens: int, seed: int
) -> DemoOutcome:
    """Train on random windows of ``data``, ``i64[L]``, then continue a text greedily."""
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    torch.manual_seed(seed)
    picker = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    unread: list[torch.Tensor] = []
    with _progress(console, device) as progress:
        task = progress.add_task(device, total=steps, loss="")
        for step in range(steps):
            starts = torch.randint(len(data) - BLOCK, (BATCH,), generator=picker)
            batch = torch.stack([data[start : start + BLOCK] for start in starts]).to(device)
            loss = model(batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            unread.append(loss.detach())
            if len(unread) == READ_EVERY or step == steps - 1:
                losses += torch.stack(unread).tolist()
                unread.clear()
                progress.update(task, loss=f"loss {losses[-1]:.3f}")
            progress.advance(task)
    if not console.is_terminal:
        console.print(f"  {device}: {steps} steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    model.eval()
    prompt = data[:8].unsqueeze(0).to(device)
    made = model.generate(prompt, max_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=None)
    return DemoOutcome(losses, made[0].tolist())


def _progress(console: Console, device: str) -> Progress:
    return Progress(TextColumn(f"  {device:<22}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
                    TextColumn("{task.fields[loss]}"), TimeRemainingColumn(), console=console,
                    disable=not console.is_terminal)

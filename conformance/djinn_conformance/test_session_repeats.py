"""Laws of sessions about their caches for calls: a call similar to an earlier one is not the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from djinn.session.session import Session
from djinn_conformance.laws import is_thorough, law
from djinn_conformance.repeats import Repeat, combinations, differences, named, repeats
from djinn_conformance.replays import unflushed
from djinn_conformance.subjects import Subject

_GROUPS = 12
_SAMPLES = 6 if is_thorough() else 1
_EVERY = 1 if is_thorough() else 8
"""In a sampled run: every this many entries, and all whose operators choose their kernel by a number."""
_CHOOSING = ("scaled_dot_product", "layer_norm", "group_norm", "rms_norm", "linalg.norm", "linalg.matrix_norm", "norm.",
             "clamp", "add", "gelu", "softmax", "cdist", "pow")


@law("session.calls_repeated")
@pytest.mark.parametrize("group", ["drawn", *range(_GROUPS)])
def test_calls_repeated(subject: Subject, session: Session, group: int | str) -> None:
    """Make drawn calls and calls of PyTorch's database, without gradients, again with one argument changed."""
    found = []
    with unflushed(session):
        for repeat, mode in _drawn() if isinstance(group, str) else _recorded(group):
            found += differences(repeat, session.device, mode)
    assert not found, f"{subject}: " + "\n".join(found)


def _drawn() -> Iterator[tuple[Repeat, Any]]:
    for seed, dtype in enumerate((torch.float32, torch.float64)):
        for repeat in combinations(random.Random(seed), dtype):
            yield repeat, torch.no_grad


def _recorded(group: int) -> Iterator[tuple[Repeat, Any]]:
    chosen = [name for index, name in enumerate(named())
              if index // _GROUPS % _EVERY == 0 or any(word in name for word in _CHOOSING)]
    for name in chosen[group::_GROUPS]:
        choose = random.Random(name)
        samples = 2 * _SAMPLES if any(word in name for word in _CHOOSING) else _SAMPLES
        for dtype in (torch.float32, torch.float64):
            for repeat in repeats(name, choose, samples, dtype):
                yield repeat, choose.choice((torch.no_grad, torch.inference_mode))

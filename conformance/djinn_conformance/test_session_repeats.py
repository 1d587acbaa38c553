"""Laws of sessions about what they remember of calls: a call that is like another one is not the same."""

from __future__ import annotations

import random

import pytest
import torch

from djinn.session import Session
from djinn_conformance.laws import is_thorough, law
from djinn_conformance.repeats import combinations, differences, named, repeats
from djinn_conformance.replays import unflushed
from djinn_conformance.subjects import Subject

_GROUPS = 12
_SAMPLES = 6 if is_thorough() else 1
_EVERY = 1 if is_thorough() else 8
"""Where not everything is run: every so many entries, and all whose operators choose their kernel by a number."""
_CHOOSING = ("scaled_dot_product", "layer_norm", "group_norm", "rms_norm", "linalg.norm", "linalg.matrix_norm", "norm.",
             "clamp", "add", "gelu", "softmax", "cdist", "pow")


@law("session.calls_repeated")
@pytest.mark.parametrize("group", range(_GROUPS))
def test_calls_repeated(subject: Subject, session: Session, group: int) -> None:
    """Make calls of PyTorch's database without gradients, again, with one argument changed, and again."""
    chosen = [name for index, name in enumerate(named())
              if index // _GROUPS % _EVERY == 0 or any(word in name for word in _CHOOSING)]
    found = []
    with unflushed(session):
        if group == 0:
            for seed, dtype in enumerate((torch.float32, torch.float64)):
                for repeat in combinations(random.Random(seed), dtype):
                    found += differences(repeat, session.device, torch.no_grad)
        for name in chosen[group::_GROUPS]:
            choose = random.Random(name)
            is_choosing = any(word in name for word in _CHOOSING)
            for dtype in (torch.float32, torch.float64):
                for repeat in repeats(name, choose, 2 * _SAMPLES if is_choosing else _SAMPLES, dtype):
                    found += differences(repeat, session.device, choose.choice((torch.no_grad, torch.inference_mode)))
    assert not found, f"{subject}: " + "\n".join(found)

"""What a session counts, and since when."""

from __future__ import annotations

import torch

import djinn

DEVICE = "remote_accelerator:0"


def test_each_session_counts_from_zero() -> None:
    try:
        djinn.init()
        (torch.ones(3, device=DEVICE) + 1).cpu()
        djinn.reset_stats()
        assert djinn.stats()["round_trips"] == 0
        djinn.init()
        assert djinn.stats()["round_trips"] == 0
        (torch.ones(3, device=DEVICE) + 1).cpu()
        assert djinn.stats()["round_trips"] == 1
    finally:
        djinn.shutdown()
